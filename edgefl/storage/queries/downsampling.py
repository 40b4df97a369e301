"""Down-sampling of curves that keeps their extremes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from edgefl.core.types import Array


def downsample_indices(columns: Sequence[Array], points: int) -> list[int]:
    """Returns the row indices for a chart: first, last, and the extremes of each stretch.

    Args:
        columns: [n] each, not empty, NaN where unknown.
        points: number of points; fewer than the extremes of one stretch make one stretch.
    """
    count = len(columns[0])
    if count <= points:
        return list(range(count))
    num_stretches = max(1, points // (2 * len(columns)))
    edges = [count * edge // num_stretches for edge in range(num_stretches + 1)]
    indices = {0, count - 1}
    for column in columns:
        for begin, end in pairwise(edges):
            stretch = column[begin:end]
            if not np.isnan(stretch).all():
                indices |= {begin + int(np.nanargmin(stretch)), begin + int(np.nanargmax(stretch))}
    return sorted(indices)

"""Down-sampling of long curves that keeps their extremes."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from edgefl.core.types import Array

MAX_POINTS = 2000


def downsample_indices(values: Array, limit: int = MAX_POINTS) -> Array:
    """Returns the indices of at most `limit` + 2 values: the ends, and the extremes of each stretch.

    Args:
        values: [n] finite numbers.
        limit: even and at least 2; curves no longer than this keep every point.
    """
    if len(values) <= limit:
        return np.arange(len(values))
    edges = np.linspace(0, len(values), limit // 2 + 1).astype(np.int64)
    indices = {0, len(values) - 1}
    for start, end in pairwise(edges):
        stretch = values[start:end]
        indices |= {int(start + np.argmin(stretch)), int(start + np.argmax(stretch))}
    return np.array(sorted(indices))

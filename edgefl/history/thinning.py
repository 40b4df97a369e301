"""Fewer points of a long curve, without its extremes getting lost."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from edgefl.types import Array

MOST_POINTS = 2000


def thinned(values: Array, limit: int = MOST_POINTS) -> Array:
    """Returns the places of at most `limit` + 2 values: first, last, and of each stretch the lowest and the highest.

    Args:
        values: [n] finite numbers.
        limit: even and at least 2; curves no longer than this keep every point.
    """
    if len(values) <= limit:
        return np.arange(len(values))
    edges = np.linspace(0, len(values), limit // 2 + 1).astype(np.int64)
    places = {0, len(values) - 1}
    for begin, end in pairwise(edges):
        stretch = values[begin:end]
        places |= {int(begin + np.argmin(stretch)), int(begin + np.argmax(stretch))}
    return np.array(sorted(places))

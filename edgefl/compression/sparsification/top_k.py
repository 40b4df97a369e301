"""Selection of a tensor's largest entries by magnitude, without a full sort."""

from __future__ import annotations

import math

import numpy as np

from edgefl.compression.stages import compute_max_magnitude
from edgefl.core.types import Array

_MIN_SAMPLED_SIZE = 2**16
_SAMPLE_SIZE = 2**14


def find_top_k(flat: Array, count: int) -> Array:
    """Returns the ascending int64 indices of the `count` entries of [n] that are largest by magnitude.

    Among equals the lowest index wins.

    Raises:
        CodecError: an entry is NaN or infinite.
    """
    compute_max_magnitude("topk", flat)
    if count >= flat.size:
        return np.arange(flat.size)
    if count == 0:
        return np.arange(0)
    magnitudes = np.abs(flat)
    candidates = _find_candidates(magnitudes, count)
    searched = magnitudes if candidates is None else magnitudes[candidates]
    smallest = np.partition(searched, searched.size - count)[searched.size - count]
    above = np.flatnonzero(searched > smallest)
    equal = np.flatnonzero(searched == smallest)[: count - above.size]
    indices = np.sort(np.concatenate([above, equal]))
    return indices if candidates is None else candidates[indices]


def _find_candidates(magnitudes: Array, count: int) -> Array | None:
    """Returns the ascending indices of a few more than the `count` largest; None when not worthwhile.

    A sample estimates their magnitude. It only saves time: with too few candidates the result is None.
    """
    if magnitudes.size < _MIN_SAMPLED_SIZE:
        return None
    sample = magnitudes[:: magnitudes.size // _SAMPLE_SIZE]
    expected = count / magnitudes.size * sample.size
    rank = math.ceil(expected + 4 * math.sqrt(expected) + 8)
    if 2 * rank >= sample.size:
        return None
    floor = np.partition(sample, sample.size - rank)[sample.size - rank]
    candidates = np.flatnonzero(magnitudes >= floor)
    return candidates if candidates.size >= count else None

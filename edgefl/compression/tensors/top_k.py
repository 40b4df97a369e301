"""Which entries of a tensor are the largest by magnitude, without sorting them all."""

from __future__ import annotations

import math

import numpy as np

from edgefl.compression.stages import largest_magnitude
from edgefl.types import Array

_SAMPLED_FROM = 2**16
_SAMPLE = 2**14


def top_k(flat: Array, count: int) -> Array:
    """Returns the ascending int64 indices of the `count` entries of [n] that are largest by magnitude.

    Among equals the lowest index wins.

    Raises:
        CodecError: an entry is NaN or infinite.
    """
    largest_magnitude("topk", flat)
    if count >= flat.size:
        return np.arange(flat.size)
    if count == 0:
        return np.arange(0)
    magnitudes = np.abs(flat)
    candidates = _candidates(magnitudes, count)
    found = magnitudes if candidates is None else magnitudes[candidates]
    smallest = np.partition(found, found.size - count)[found.size - count]
    above = np.flatnonzero(found > smallest)
    equal = np.flatnonzero(found == smallest)[: count - above.size]
    places = np.sort(np.concatenate([above, equal]))
    return places if candidates is None else candidates[places]


def _candidates(magnitudes: Array, count: int) -> Array | None:
    """Returns the ascending indices of a few more than the `count` largest; None when that would not pay.

    A sample tells about how large they are. It only saves time: too few candidates are no candidates.
    """
    if magnitudes.size < _SAMPLED_FROM:
        return None
    sample = magnitudes[:: magnitudes.size // _SAMPLE]
    expected = count / magnitudes.size * sample.size
    rank = math.ceil(expected + 4 * math.sqrt(expected) + 8)
    if 2 * rank >= sample.size:
        return None
    floor = np.partition(sample, sample.size - rank)[sample.size - rank]
    candidates = np.flatnonzero(magnitudes >= floor)
    return candidates if candidates.size >= count else None

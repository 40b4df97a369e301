"""Masks of millions of values, chunk by chunk: all at once, NumPy takes an address of eight bytes for each of them.

A chunk's addresses stay in the cache, which is also several times faster than indexing with the mask.
"""

from __future__ import annotations

import numpy as np

from edgefl.types import Array

_CHUNK = 2**15


def picked(values: Array, mask: Array) -> Array:
    """Returns those of [n] values at which a [n] mask is true."""
    count = int(np.count_nonzero(mask))
    if count == mask.size:
        return values
    found, end = np.empty(count, dtype=values.dtype), 0
    for begin in range(0, mask.size, _CHUNK):
        places = np.flatnonzero(mask[begin : begin + _CHUNK])
        np.take(values[begin : begin + _CHUNK], places, out=found[end : end + places.size], mode="clip")
        end += places.size
    return found


def put(values: Array, mask: Array, out: Array) -> None:
    """Writes [k] values to those places of [n] at which a [n] mask with k true values is true."""
    if values.size == mask.size:
        out[...] = values
        return
    end = 0
    for begin in range(0, mask.size, _CHUNK):
        places = np.flatnonzero(mask[begin : begin + _CHUNK])
        out[begin : begin + _CHUNK][places] = values[end : end + places.size]
        end += places.size


def distances(mask: Array) -> Array:
    """Returns how far each true value of a [n] mask is behind the one before it, the first behind place -1."""
    found, end, last = np.empty(int(np.count_nonzero(mask)), dtype=_narrowest(mask.size)), 0, -1
    for begin in range(0, mask.size, _CHUNK):
        places = np.flatnonzero(mask[begin : begin + _CHUNK])
        if places.size:
            places += begin
            found[end] = places[0] - last
            np.subtract(places[1:], places[:-1], out=found[end + 1 : end + places.size], casting="same_kind")
            end, last = end + places.size, int(places[-1])
    return found


def looked_up(table: Array, places: Array) -> Array:
    """Returns `table[places]`."""
    found = np.empty(places.size, dtype=table.dtype)
    for begin in range(0, places.size, _CHUNK):
        np.take(table, places[begin : begin + _CHUNK], out=found[begin : begin + _CHUNK], mode="clip")
    return found


def _narrowest(size: int) -> type[np.signedinteger]:
    return np.int32 if size < 2**31 else np.int64

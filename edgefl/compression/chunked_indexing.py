"""Indexing of millions of values chunk by chunk.

NumPy needs eight bytes of address for each value; a chunk's addresses stay in the cache, which is also several times
faster than indexing with a mask.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from edgefl.core.types import Array

CHUNK = 2**15
"""Number of values whose addresses, or results in between, stay in the cache."""


def iterate_chunks(size: int, step: int = CHUNK) -> Iterator[slice]:
    """Yields the slices of [size] values by chunks, the last of which may be shorter."""
    return (slice(start, min(start + step, size)) for start in range(0, size, step))


def select_masked(values: Array, mask: Array) -> Array:
    """Returns the values of [n] where a [n] mask is true."""
    count = int(np.count_nonzero(mask))
    if count == mask.size:
        return values
    selected, end = np.empty(count, dtype=values.dtype), 0
    for chunk in iterate_chunks(mask.size):
        positions = np.flatnonzero(mask[chunk])
        np.take(values[chunk], positions, out=selected[end : end + positions.size], mode="clip")
        end += positions.size
    return selected


def scatter_masked(values: Array, mask: Array, out: Array) -> None:
    """Writes [k] values to the positions of [n] where a mask with k true values is true."""
    if values.size == mask.size:
        out[...] = values
        return
    end = 0
    for chunk in iterate_chunks(mask.size):
        positions = np.flatnonzero(mask[chunk])
        out[chunk][positions] = values[end : end + positions.size]
        end += positions.size


def compute_gaps(mask: Array) -> Array:
    """Returns the distances between neighbouring true values of a [n] mask, the first from -1."""
    gaps, end, last = np.empty(int(np.count_nonzero(mask)), dtype=_get_narrowest_dtype(mask.size)), 0, -1
    for chunk in iterate_chunks(mask.size):
        positions = np.flatnonzero(mask[chunk])
        if positions.size:
            positions += chunk.start
            gaps[end] = positions[0] - last
            np.subtract(positions[1:], positions[:-1], out=gaps[end + 1 : end + positions.size], casting="same_kind")
            end, last = end + positions.size, int(positions[-1])
    return gaps


def gather(table: Array, indices: Array) -> Array:
    """Returns `table[indices]`."""
    gathered = np.empty(indices.size, dtype=table.dtype)
    for chunk in iterate_chunks(indices.size):
        np.take(table, indices[chunk], out=gathered[chunk], mode="clip")
    return gathered


def _get_narrowest_dtype(size: int) -> type[np.signedinteger]:
    return np.int32 if size < 2**31 else np.int64

"""Runs of vectors that pass a value stage, and the sums of their products."""

from __future__ import annotations

import numpy as np
from numpy.random import Generator

from edgefl.compression.stages import ValueStage
from edgefl.compression.wire import Reader, little_endian_bytes
from edgefl.errors import CodecError
from edgefl.types import Array

LARGEST_WEIGHT = 1e30
"""What is larger the encoder refuses: sums of products grow, and a value stage may make vectors longer."""

_LARGEST = float(np.finfo(np.float32).max)


def passed(vectors: Array, values: ValueStage, rng: Generator) -> tuple[Array, list[Array]]:
    """Returns [k, n] float32 vectors as the receiver will have them, and the arrays to write."""
    parts = list(values.encode(vectors, rng))
    body = b"".join(little_endian_bytes(part) for part in parts)
    found = values.decode(Reader(memoryview(body)), vectors.size)
    return found.reshape(vectors.shape), parts


def read_vectors(reader: Reader, count: int, size: int, values: type[ValueStage]) -> Array:
    """Returns the [count, size] vectors that were written.

    Raises:
        CodecError: damaged, or a number is not finite, which would spread over a whole row or column.
    """
    found = values.decode(reader, count * size).reshape(count, size)
    if not np.all(np.isfinite(found)):
        raise CodecError("payload holds a vector that is not finite")
    return found


def directions(vectors: Array) -> Array:
    """Returns each row at length one, zero rows as they are; no square of a float32 is lost in float64."""
    exact = vectors.astype(np.float64)
    norms = np.linalg.norm(exact, axis=1, keepdims=True)
    exact /= np.where(norms > 0, norms, 1)
    return exact.astype(np.float32)


def sum_of_products(left: Array, weights: Array, right: Array) -> Array:
    """Returns the [m, n] sum of weight * left vector * right vector for [k, m] and [k, n] finite vectors.

    Raises:
        CodecError: an entry could be beyond float32.
    """
    lengths = np.abs(weights, dtype=np.float64)
    for vectors in (left, right):
        # At least one, so that no product of two of the three is beyond float32 either.
        lengths *= np.maximum(np.abs(vectors).max(axis=1), 1)
    bound = float(lengths.sum())
    if bound > _LARGEST:
        raise CodecError(f"vectors and their weights make numbers up to {bound:.6g}, beyond float32")
    product: Array = (left.T * weights) @ right
    return product

"""Lists of vectors through a value stage, and sums of their products."""

from __future__ import annotations

import numpy as np
from numpy.random import Generator

from edgefl.compression.stages import ValueStage
from edgefl.compression.wire import PayloadReader, to_little_endian
from edgefl.core.errors import CodecError
from edgefl.core.types import Array

MAX_WEIGHT = 1e30
"""Maximum weight in the encoder: sums of products grow, and a value stage may make vectors longer."""

_MAX_FLOAT32 = float(np.finfo(np.float32).max)


def quantise_vectors(vectors: Array, values: ValueStage, rng: Generator) -> tuple[Array, list[Array]]:
    """Returns [k, n] float32 vectors as decoded by the receiver, and the arrays to write."""
    parts = list(values.encode(vectors, rng))
    body = b"".join(to_little_endian(part) for part in parts)
    decoded = values.decode(PayloadReader(memoryview(body)), vectors.size)
    return decoded.reshape(vectors.shape), parts


def read_vectors(reader: PayloadReader, count: int, size: int, values: type[ValueStage]) -> Array:
    """Returns the [count, size] vectors that were written.

    Raises:
        CodecError: damaged, or a number is not finite, which would spread over a whole row or column.
    """
    vectors = values.decode(reader, count * size).reshape(count, size)
    if not np.all(np.isfinite(vectors)):
        raise CodecError("payload holds a vector that is not finite")
    return vectors


def normalise_rows(vectors: Array) -> Array:
    """Returns unit rows, zero rows unchanged; squares of float32 do not overflow in float64."""
    exact = vectors.astype(np.float64)
    norms = np.linalg.norm(exact, axis=1, keepdims=True)
    exact /= np.where(norms > 0, norms, 1)
    return exact.astype(np.float32)


def compute_sum_of_products(left: Array, weights: Array, right: Array) -> Array:
    """Returns the [m, n] sum of weight * left vector * right vector for [k, m] and [k, n] finite vectors.

    Raises:
        CodecError: an entry could overflow float32.
    """
    lengths = np.abs(weights, dtype=np.float64)
    for vectors in (left, right):
        # At least one, so that no product of two of the three overflows float32 either.
        lengths *= np.maximum(np.abs(vectors).max(axis=1), 1)
    bound = float(lengths.sum())
    if bound > _MAX_FLOAT32:
        raise CodecError(f"vectors and their weights make numbers up to {bound:.6g}, beyond float32")
    product: Array = (left.T * weights) @ right
    return product

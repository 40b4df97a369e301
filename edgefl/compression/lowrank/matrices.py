"""Tensors as matrices and back, for codecs that send a few pairs of vectors per matrix.

The rules, for a kernel of shape (outputs, inputs, height, width):

    kernel  (outputs * height, inputs * width): its ranks are the lowest and its sides the shortest
    out     (outputs, inputs * height * width), as in PowerSGD
    atomo   (outputs * inputs / 2, 2 * height * width), and n numbers as (n / 2, 2), as in ATOMO's
            code; odd sizes stay whole

A matrix is itself by all of them. Numbers of rules are on the wire and are never changed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from enum import IntEnum

import numpy as np
from numpy.random import Generator

from edgefl.compression.stages import ValueStage
from edgefl.compression.wire import PayloadReader, to_little_endian
from edgefl.core.errors import CodecError
from edgefl.core.types import Array


class MatrixRule(IntEnum):
    KERNEL = 0
    OUT = 1
    ATOMO = 2


def parse_rule(name: str, argument: str) -> MatrixRule:
    """Returns the rule of a stage's last argument, `kernel` by default.

    Raises:
        CodecError: no such rule.
    """
    names = {rule.name.lower(): rule for rule in MatrixRule}
    if (argument or "kernel") not in names:
        raise CodecError(f"codec stage {name!r} makes matrices by one of {', '.join(names)}, got {argument!r}")
    return names[argument or "kernel"]


def compute_matrix_shape(shape: tuple[int, ...], rule: MatrixRule) -> tuple[int, int]:
    """Returns the rows and columns of a tensor as a matrix."""
    if rule == MatrixRule.ATOMO:
        return _halve_shape(shape)
    if rule == MatrixRule.KERNEL and len(shape) > 3:
        return shape[0] * shape[2], shape[1] * math.prod(shape[3:])
    return (shape[0] if shape else 1), math.prod(shape[1:])


def to_matrix(array: Array, rule: MatrixRule) -> Array:
    """Returns a tensor as a row-major matrix, the same memory where that is possible.

    Products of matrices in another layout differ in the last bit, and so would the bytes.
    """
    is_kernel = rule == MatrixRule.KERNEL and array.ndim > 3
    ordered = np.ascontiguousarray(array.swapaxes(1, 2) if is_kernel else array)
    return ordered.reshape(compute_matrix_shape(array.shape, rule))


def from_matrix(matrix: Array, shape: tuple[int, ...], rule: MatrixRule) -> Array:
    """Returns the tensor of a matrix made by `to_matrix`."""
    if rule == MatrixRule.KERNEL and len(shape) > 3:
        return matrix.reshape(shape[0], shape[2], shape[1], *shape[3:]).swapaxes(1, 2)
    return matrix.reshape(shape)


def is_smaller_as_vectors(num_pairs: int, sides: tuple[int, int]) -> bool:
    """Whether `num_pairs` pairs of vectors, with a number each, are fewer numbers than the matrix."""
    return num_pairs * (sum(sides) + 1) < math.prod(sides)


def _halve_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    if len(shape) == 2:
        return shape[0], shape[1]
    rows, columns = math.prod(shape[:2]), math.prod(shape[2:])
    if len(shape) > 2 and columns == 1:
        return shape[0], shape[1]
    return (rows, columns) if rows % 2 else (rows // 2, 2 * columns)


MAX_WEIGHT = 1e30
"""Maximum weight in the encoder: sums of products grow, and a value stage may make vectors longer."""
DENSE_FORM, ENTRIES_FORM, VECTORS_FORM = 0, 1, 2
"""Forms of a parameter on the wire: whole, entries, and 2 + the rule's number for vectors."""

_MAX_FLOAT32 = float(np.finfo(np.float32).max)


def quantise_vectors(vectors: Array, values: ValueStage, rng: Generator) -> tuple[Array, list[Array]]:
    """Returns [k, n] float32 vectors as decoded by the receiver, and the arrays to write."""
    parts = list(values.encode(vectors, rng))
    body = b"".join(to_little_endian(part) for part in parts)
    decoded = values.decode(PayloadReader(memoryview(body)), vectors.size)
    return decoded.reshape(vectors.shape), parts


def encode_form(form: int) -> Array:
    return np.array([form], dtype=np.uint8)


def encode_dense_form(array: Array, values: ValueStage, rng: Generator) -> Iterator[Array]:
    """Yields the arrays to write for a parameter that vectors would not make smaller."""
    yield encode_form(DENSE_FORM)
    yield from values.encode(array, rng)


def parse_form(form: int, flags: int = 0) -> MatrixRule:
    """Returns the rule of a parameter written as vectors; `flags` are bits that may be set as well.

    Raises:
        CodecError: it is in none of the known forms.
    """
    number = (form & ~flags) - VECTORS_FORM
    if number not in list(MatrixRule):
        raise CodecError(f"payload holds a tensor in form {form}, which this edgefl does not know")
    return MatrixRule(number)


def require_magnitude(stage_name: str, largest: float) -> None:
    """Rejects numbers whose products could overflow.

    Raises:
        CodecError: they are too large.
    """
    if largest > MAX_WEIGHT:
        raise CodecError(f"{stage_name} carries magnitudes up to {MAX_WEIGHT:g}, got {largest:g}: use dense")


def read_pair_count(reader: PayloadReader, sides: tuple[int, int]) -> int:
    """Returns the number of pairs of vectors for a matrix of [m, n], 0 for a zero matrix.

    Raises:
        CodecError: damaged, or the vectors are not smaller than the matrix.
    """
    count = reader.read_varint(min(sides))
    if count and not is_smaller_as_vectors(count, sides):
        raise CodecError(f"payload holds {count} pairs of vectors for a matrix of {sides[0]} x {sides[1]}")
    return count


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

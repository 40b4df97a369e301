"""Low-rank stages: tensors as matrices and back, matrices as a few pairs of vectors; and PowerSGD.

The rules, for a kernel of shape (outputs, inputs, height, width):

    kernel  (outputs * height, inputs * width): its ranks are the lowest and its sides the shortest
    out     (outputs, inputs * height * width), as in PowerSGD
    atomo   (outputs * inputs / 2, 2 * height * width), and n numbers as (n / 2, 2), as in ATOMO's
            code; odd sizes stay whole

A matrix is itself by all of them. Numbers of rules are on the wire and are never changed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass
from enum import IntEnum
from typing import ClassVar, Self

import numpy as np
from numpy.random import Generator

from edgefl.compression.quantisation.rounding import Float32
from edgefl.compression.stages import (
    EachTensorStage,
    ValueStage,
    compute_max_magnitude,
    encode_lossy_tensors,
    parse_int_argument,
)
from edgefl.compression.wire import PayloadReader, encode_varint, to_little_endian
from edgefl.core.errors import CodecError
from edgefl.core.types import Array, ModelSpec, Tensors, TensorSpec

MAX_WEIGHT = 1e30
"""Maximum weight in the encoder: sums of products grow, and a value stage may make vectors longer."""
DENSE_FORM, ENTRIES_FORM, VECTORS_FORM = 0, 1, 2
"""Forms of a parameter on the wire: whole, entries, and 2 + the rule's number for vectors."""

_MAX_FLOAT32 = float(np.finfo(np.float32).max)

_MAX_RANK = 4096
_EXACT_FLAG = 128
_MAX_SKEW = 0.5
_MIN_PROJECTION = 2.0**-20


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


@dataclass(frozen=True, slots=True)
class PowerSgd(EachTensorStage):
    """`powersgd:r`: each float32 parameter as a matrix of rank r, found by one step of power iteration; biased.

    From the last update's r vectors Q come P = M Q, made orthonormal, and Q = M^T P; the receiver has P Q^T, which is
    M projected on P. The rest stays in the error-feedback residual, and Q in its memory: over the updates it turns to
    the largest singular vectors. Parameters that vectors would not make smaller pass the value stage whole.

    Written for each such parameter: a byte that names the form (0 whole, 2 + the rule's number vectors, 128 more
    where P passes no value stage); then the values; or the number of vectors and, if there are any, P and Q.

    Source: Vogels et al., PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization, NeurIPS
    2019, algorithm 1. Differs from the paper: each device has a Q of its own; both ends make P orthonormal once more
    after the value stage; vectors with no projection on the matrix are sampled again.

    Why it is a contraction: with orthonormal P the squared error of P R^T is |M - P P^T M|^2 + |R - M^T P|^2, where
    the first is |M|^2 - |M^T P|^2. A value stage that is a contraction keeps the second below |M^T P|^2, and that is
    over 0, since vectors without projection on M are sampled again.
    """

    is_unbiased: ClassVar[bool] = False
    is_contraction: ClassVar[bool] = True
    remembers: ClassVar[bool] = True

    rank: int
    rule: MatrixRule = MatrixRule.KERNEL

    @classmethod
    def parse(cls, argument: str) -> Self:
        rank, _, rule = argument.partition(":")
        return cls(rank=parse_int_argument("powersgd", rank, 1, _MAX_RANK), rule=parse_rule("powersgd", rule))

    def encode(
        self,
        tensors: Tensors,
        shapes: ModelSpec,
        values: ValueStage,
        rng: Generator,
        *,
        memory: MutableMapping[str, Array] | None = None,
    ) -> Iterator[Array]:
        warm_starts = {} if memory is None else memory

        def encode_tensor(spec: TensorSpec, array: Array) -> Iterator[Array]:
            largest = compute_max_magnitude("powersgd", array)
            if not is_smaller_as_vectors(self.rank, compute_matrix_shape(spec.shape, self.rule)):
                return encode_dense_form(array, values, rng)
            if largest == 0:  # vectors of an earlier matrix stay in memory
                return iter((encode_form(VECTORS_FORM + self.rule), encode_varint(0)))
            require_magnitude("powersgd", largest)
            return self._write_vectors(array, f"powersgd/{spec.name}", warm_starts, values, rng)

        return encode_lossy_tensors(tensors, shapes, encode_tensor)

    @staticmethod
    def decode_tensor(reader: PayloadReader, spec: TensorSpec, values: type[ValueStage]) -> Array:
        form = reader.read_bytes(1)[0]
        if form == DENSE_FORM:
            return values.decode(reader, spec.size).reshape(spec.shape)
        rule = parse_form(form, _EXACT_FLAG)
        sides = compute_matrix_shape(spec.shape, rule)
        count = read_pair_count(reader, sides)
        if not count:
            return np.zeros(spec.shape, dtype=np.float32)
        left = read_vectors(reader, count, sides[0], Float32 if form & _EXACT_FLAG else values)
        right = read_vectors(reader, count, sides[1], values)
        ones = np.ones(count, dtype=np.float32)
        return from_matrix(compute_sum_of_products(_orthonormalise(left), ones, right), spec.shape, rule)

    def _write_vectors(
        self, array: Array, key: str, memory: MutableMapping[str, Array], values: ValueStage, rng: Generator
    ) -> Iterator[Array]:
        matrix = to_matrix(array, self.rule)
        left = _orthonormalise(
            _compute_products(matrix, self._get_start_vectors(memory.get(key), matrix.shape[1], rng), rng)
        )
        sent_left, parts = quantise_vectors(left, values, rng)
        is_skewed = bool(np.linalg.norm(sent_left @ sent_left.T - np.eye(self.rank)) > _MAX_SKEW)
        if is_skewed:
            # Vectors rounded to a few signs cannot be made orthonormal with equal results on all machines.
            sent_left, parts = left, [left]
        right = _orthonormalise(sent_left) @ matrix
        memory[key] = right
        yield encode_form(VECTORS_FORM + self.rule + is_skewed * _EXACT_FLAG)
        yield encode_varint(self.rank)
        yield from parts
        yield from values.encode(right, rng)

    def _get_start_vectors(self, previous: Array | None, size: int, rng: Generator) -> Array:
        """Returns [r, size] vectors: those of the last update if they fit."""
        if previous is None or previous.shape != (self.rank, size) or previous.dtype != np.float32:
            return rng.standard_normal((self.rank, size), dtype=np.float32)
        return previous


def _compute_products(matrix: Array, start: Array, rng: Generator) -> Array:
    """Returns [r, m] products of the non-zero [m, n] matrix with [r, n] vectors; only directions count.

    Zero vectors and those without projection on the matrix are replaced: they would stay so for ever.
    """
    # Near one in magnitude, so that no product overflows float32.
    scaled: Array = matrix / np.abs(matrix).max()
    products: Array = normalise_rows(start) @ scaled.T
    is_lost = np.linalg.norm(products, axis=1) <= _MIN_PROJECTION * np.linalg.norm(scaled)
    if np.any(is_lost):
        samples = rng.standard_normal((int(is_lost.sum()), matrix.shape[1]), dtype=np.float32)
        products[is_lost] = normalise_rows(samples) @ scaled.T
    return products


def _orthonormalise(vectors: Array) -> Array:
    """Returns [r, m] orthonormal rows, r <= m, the same ones on every machine as far as rounding allows."""
    basis, triangle = np.linalg.qr(vectors.astype(np.float64).T)
    # Libraries differ in the signs.
    basis *= np.where(np.diag(triangle) < 0, -1, 1)
    rows: Array = np.ascontiguousarray(basis.T, dtype=np.float32)
    return rows

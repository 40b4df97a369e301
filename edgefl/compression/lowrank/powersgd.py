"""`powersgd:r`: each float32 parameter as a matrix of rank r, found by one step of power iteration; biased.

A parameter is made a matrix M (`matrices.py`). From the last update's r vectors Q come P = M Q, made orthonormal, and
Q = M^T P; the receiver has P Q^T, which is M projected on P. The rest stays in the error-feedback residual, and Q in
its memory: over the updates it turns to the largest singular vectors. Parameters that vectors would not make smaller
pass the value stage whole.

Written for each such parameter: a byte that names the form, 0 whole, 2 + the rule's number vectors, 128 more where P
passes no value stage; then the values; or the number of vectors and, if there are any, P and Q.

Source: Vogels et al., PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization, NeurIPS 2019,
algorithm 1. Differs from the paper: each device has a Q of its own; both ends make P orthonormal once more after the
value stage; vectors with no projection on the matrix are sampled again.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass
from typing import ClassVar, Self

import numpy as np
from numpy.random import Generator

from edgefl.compression.lowrank.factors import (
    MAX_WEIGHT,
    compute_sum_of_products,
    normalise_rows,
    quantise_vectors,
    read_vectors,
)
from edgefl.compression.lowrank.matrices import (
    MatrixRule,
    compute_matrix_shape,
    from_matrix,
    is_smaller_as_vectors,
    parse_rule,
    to_matrix,
)
from edgefl.compression.quantisation.floats import Float32
from edgefl.compression.stages import (
    StageKind,
    ValueStage,
    add_tensor_name_to_errors,
    compute_max_magnitude,
    is_lossy,
    parse_int_argument,
    read_exact,
    to_spec_array,
)
from edgefl.compression.wire import PayloadReader, encode_varint
from edgefl.core.errors import CodecError
from edgefl.core.types import Array, ModelSpec, Tensor, Tensors, TensorSpec

_MAX_RANK = 4096
_DENSE_FORM, _VECTORS_FORM, _EXACT_FLAG = 0, 2, 128
_MAX_SKEW = 0.5
_MIN_PROJECTION = 2.0**-20


@dataclass(frozen=True, slots=True)
class PowerSgd:
    """Low-rank stage with one rank for all matrices.

    Why it is a contraction: with orthonormal P the squared error of P R^T is |M - P P^T M|^2 + |R - M^T P|^2, where
    the first is |M|^2 - |M^T P|^2. A value stage that is a contraction keeps the second below |M^T P|^2, and that is
    over 0, since vectors without projection on M are sampled again.
    """

    kind: ClassVar[StageKind] = StageKind.TENSORS
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
        for spec in shapes:
            array = to_spec_array(spec, tensors[spec.name])
            if not is_lossy(spec):
                yield array
                continue
            with add_tensor_name_to_errors(spec):
                largest = compute_max_magnitude("powersgd", array)
                if not is_smaller_as_vectors(self.rank, compute_matrix_shape(spec.shape, self.rule)):
                    yield np.array([_DENSE_FORM], dtype=np.uint8)
                    yield from values.encode(array, rng)
                elif largest == 0:
                    yield from self._write_zero()
                else:
                    yield from self._write_vectors(array, f"powersgd/{spec.name}", warm_starts, values, rng)

    @staticmethod
    def decode(reader: PayloadReader, shapes: ModelSpec, values: type[ValueStage]) -> dict[str, Tensor]:
        return {spec.name: _read_tensor(reader, spec, values) for spec in shapes}

    def _write_zero(self) -> Iterator[Array]:
        """Yields the code of a zero matrix; vectors of an earlier one stay in memory."""
        yield np.array([_VECTORS_FORM + self.rule], dtype=np.uint8)
        yield encode_varint(0)

    def _write_vectors(
        self, array: Array, key: str, memory: MutableMapping[str, Array], values: ValueStage, rng: Generator
    ) -> Iterator[Array]:
        largest = float(np.abs(array).max())
        if largest > MAX_WEIGHT:
            raise CodecError(f"powersgd carries magnitudes up to {MAX_WEIGHT:g}, got {largest:g}: use dense")
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
        yield np.array([_VECTORS_FORM + self.rule + is_skewed * _EXACT_FLAG], dtype=np.uint8)
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


def _read_tensor(reader: PayloadReader, spec: TensorSpec, values: type[ValueStage]) -> Array:
    if not is_lossy(spec):
        return read_exact(reader, spec, spec.size).reshape(spec.shape)
    form = reader.read_bytes(1)[0]
    if form == _DENSE_FORM:
        return values.decode(reader, spec.size).reshape(spec.shape)
    number = (form & ~_EXACT_FLAG) - _VECTORS_FORM
    if number not in list(MatrixRule):
        raise CodecError(f"payload holds a tensor in form {form}, which this edgefl does not know")
    stages = (Float32 if form & _EXACT_FLAG else values, values)
    return _read_vectors(reader, spec, MatrixRule(number), stages)


def _read_vectors(
    reader: PayloadReader, spec: TensorSpec, rule: MatrixRule, stages: tuple[type[ValueStage], type[ValueStage]]
) -> Array:
    sides = compute_matrix_shape(spec.shape, rule)
    count = reader.read_varint(min(sides))
    if not count:
        return np.zeros(spec.shape, dtype=np.float32)
    if not is_smaller_as_vectors(count, sides):
        raise CodecError(f"payload holds {count} pairs of vectors for a matrix of {sides[0]} x {sides[1]}")
    left, right = (read_vectors(reader, count, side, stage) for side, stage in zip(sides, stages, strict=True))
    ones = np.ones(count, dtype=np.float32)
    return from_matrix(compute_sum_of_products(_orthonormalise(left), ones, right), spec.shape, rule)

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

from edgefl.compression.lowrank.matrices import (
    DENSE_FORM,
    VECTORS_FORM,
    MatrixRule,
    compute_matrix_shape,
    compute_sum_of_products,
    encode_dense_form,
    encode_form,
    from_matrix,
    is_smaller_as_vectors,
    normalise_rows,
    parse_form,
    parse_rule,
    quantise_vectors,
    read_pair_count,
    read_vectors,
    require_magnitude,
    to_matrix,
)
from edgefl.compression.quantisation.rounding import Float32
from edgefl.compression.stages import (
    EachTensorStage,
    ValueStage,
    compute_max_magnitude,
    encode_lossy_tensors,
    parse_int_argument,
)
from edgefl.compression.wire import PayloadReader, encode_varint
from edgefl.core.types import Array, ModelSpec, Tensors, TensorSpec

_MAX_RANK = 4096
_EXACT_FLAG = 128
_MAX_SKEW = 0.5
_MIN_PROJECTION = 2.0**-20


@dataclass(frozen=True, slots=True)
class PowerSgd(EachTensorStage):
    """Low-rank stage with one rank for all matrices.

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

"""`powersgd:r`: each float32 parameter as a matrix of rank r, found by one step of power iteration; biased.

A parameter is made a matrix M (`matrices.py`). From r vectors Q that the last update left behind come P = M Q, made
orthonormal, and Q = M^T P; the receiver has P Q^T, which is M projected on P. What is left out waits in the error
feedback, and Q in its memory: over the updates it turns to the largest singular vectors. What vectors would not make
smaller passes the value stage whole.

Written for each such parameter: a byte that names the form, 0 whole, 2 + the rule's number vectors, 128 more where P
passes no value stage; then the values; or the number of vectors and, if there are any, P and Q.

Source: Vogels et al., PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization, NeurIPS 2019,
algorithm 1. Differs from the paper: each device has a Q of its own; both ends make P orthonormal once more after the
value stage; vectors that find nothing of the matrix are drawn again.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass
from typing import ClassVar, Self

import numpy as np
from numpy.random import Generator

from edgefl.compression.stages import (
    StageKind,
    ValueStage,
    exact_array,
    is_lossy,
    largest_magnitude,
    naming,
    read_exact,
    whole_number,
)
from edgefl.compression.tensors.factors import LARGEST_WEIGHT, directions, passed, read_vectors, sum_of_products
from edgefl.compression.tensors.matrices import Rule, as_matrix, from_matrix, matrix_shape, parse_rule, pays
from edgefl.compression.values.floats import Float32
from edgefl.compression.wire import Reader, varint
from edgefl.errors import CodecError
from edgefl.types import Array, Shapes, Tensor, Tensors, TensorSpec

_MAX_RANK = 4096
_WHOLE, _VECTORS, _EXACT = 0, 2, 128
_MOST_SKEWED = 0.5
_FINDS_NOTHING = 2.0**-20


@dataclass(frozen=True, slots=True)
class PowerSgd:
    """The rank is the same for all matrices.

    Why it is a contraction: with orthonormal P the squared error of P R^T is |M - P P^T M|^2 + |R - M^T P|^2, where
    the first is |M|^2 - |M^T P|^2. A value stage that is a contraction keeps the second below |M^T P|^2, and that is
    over 0, since vectors that find nothing of M are drawn again.
    """

    kind: ClassVar[StageKind] = StageKind.TENSORS
    is_unbiased: ClassVar[bool] = False
    is_contraction: ClassVar[bool] = True
    remembers: ClassVar[bool] = True

    rank: int
    rule: Rule = Rule.KERNEL

    @classmethod
    def parse(cls, argument: str) -> Self:
        rank, _, rule = argument.partition(":")
        return cls(rank=whole_number("powersgd", rank, 1, _MAX_RANK), rule=parse_rule("powersgd", rule))

    def encode(
        self,
        tensors: Tensors,
        shapes: Shapes,
        values: ValueStage,
        rng: Generator,
        *,
        memory: MutableMapping[str, Array] | None = None,
    ) -> Iterator[Array]:
        kept = {} if memory is None else memory
        for spec in shapes:
            array = exact_array(spec, tensors[spec.name])
            if not is_lossy(spec):
                yield array
                continue
            with naming(spec):
                largest = largest_magnitude("powersgd", array)
                if not pays(self.rank, matrix_shape(spec.shape, self.rule)):
                    yield np.array([_WHOLE], dtype=np.uint8)
                    yield from values.encode(array, rng)
                elif largest == 0:
                    yield from self._nothing()
                else:
                    yield from self._write(array, f"powersgd/{spec.name}", kept, values, rng)

    @staticmethod
    def decode(reader: Reader, shapes: Shapes, values: type[ValueStage]) -> dict[str, Tensor]:
        return {spec.name: _read_tensor(reader, spec, values) for spec in shapes}

    def _nothing(self) -> Iterator[Array]:
        """Yields what says that a matrix is zero; vectors of an earlier one stay in memory."""
        yield np.array([_VECTORS + self.rule], dtype=np.uint8)
        yield varint(0)

    def _write(
        self, array: Array, key: str, memory: MutableMapping[str, Array], values: ValueStage, rng: Generator
    ) -> Iterator[Array]:
        largest = float(np.abs(array).max())
        if largest > LARGEST_WEIGHT:
            raise CodecError(f"powersgd carries magnitudes up to {LARGEST_WEIGHT:g}, got {largest:g}: use dense")
        matrix = as_matrix(array, self.rule)
        left = _orthonormal(_products(matrix, self._start(memory.get(key), matrix.shape[1], rng), rng))
        found, parts = passed(left, values, rng)
        is_skewed = bool(np.linalg.norm(found @ found.T - np.eye(self.rank)) > _MOST_SKEWED)
        if is_skewed:
            # Of a sign or two a vector little is left that could be made orthonormal alike everywhere.
            found, parts = left, [left]
        right = _orthonormal(found) @ matrix
        memory[key] = right
        yield np.array([_VECTORS + self.rule + is_skewed * _EXACT], dtype=np.uint8)
        yield varint(self.rank)
        yield from parts
        yield from values.encode(right, rng)

    def _start(self, kept: Array | None, size: int, rng: Generator) -> Array:
        """Returns [r, size] vectors: those of the last update if they fit."""
        if kept is None or kept.shape != (self.rank, size) or kept.dtype != np.float32:
            return rng.standard_normal((self.rank, size), dtype=np.float32)
        return kept


def _products(matrix: Array, start: Array, rng: Generator) -> Array:
    """Returns the [r, m] products of the [m, n] matrix, not zero, with [r, n] vectors; only directions count.

    Vectors that are zero, or that the matrix has nothing of, are replaced: they would stay so for ever.
    """
    # Near one in magnitude, so that no product is beyond float32.
    scaled: Array = matrix / np.abs(matrix).max()
    found: Array = directions(start) @ scaled.T
    finds_nothing = np.linalg.norm(found, axis=1) <= _FINDS_NOTHING * np.linalg.norm(scaled)
    if np.any(finds_nothing):
        drawn = rng.standard_normal((int(finds_nothing.sum()), matrix.shape[1]), dtype=np.float32)
        found[finds_nothing] = directions(drawn) @ scaled.T
    return found


def _orthonormal(vectors: Array) -> Array:
    """Returns [r, m] orthonormal rows, r <= m, the same ones on every machine as far as rounding allows."""
    basis, triangle = np.linalg.qr(vectors.astype(np.float64).T)
    # Libraries differ in the signs.
    basis *= np.where(np.diag(triangle) < 0, -1, 1)
    rows: Array = np.ascontiguousarray(basis.T, dtype=np.float32)
    return rows


def _read_tensor(reader: Reader, spec: TensorSpec, values: type[ValueStage]) -> Array:
    if not is_lossy(spec):
        return read_exact(reader, spec, spec.size).reshape(spec.shape)
    form = reader.take(1)[0]
    if form == _WHOLE:
        return values.decode(reader, spec.size).reshape(spec.shape)
    number = (form & ~_EXACT) - _VECTORS
    if number not in list(Rule):
        raise CodecError(f"payload holds a tensor in form {form}, which this edgefl does not know")
    stages = (Float32 if form & _EXACT else values, values)
    return _read_vectors(reader, spec, Rule(number), stages)


def _read_vectors(
    reader: Reader, spec: TensorSpec, rule: Rule, stages: tuple[type[ValueStage], type[ValueStage]]
) -> Array:
    sides = matrix_shape(spec.shape, rule)
    count = reader.varint(min(sides))
    if not count:
        return np.zeros(spec.shape, dtype=np.float32)
    if not pays(count, sides):
        raise CodecError(f"payload holds {count} pairs of vectors for a matrix of {sides[0]} x {sides[1]}")
    left, right = (read_vectors(reader, count, side, stage) for side, stage in zip(sides, stages, strict=True))
    ones = np.ones(count, dtype=np.float32)
    return from_matrix(sum_of_products(_orthonormal(left), ones, right), spec.shape, rule)

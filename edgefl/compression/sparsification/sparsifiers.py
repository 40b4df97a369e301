"""The sent entries of tensors: all (`dense`), the largest (`topk`), large (`threshold`), random (`randk`), or a part.

The stages but `dense` decode to `SparseTensor`s. `delta` sends changed entries of a model, which `delta.py` finds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import ClassVar, Self

import numpy as np
from numpy.random import Generator

from edgefl.compression.entropy.indices import read_indices, write_indices
from edgefl.compression.stages import (
    EachTensorStage,
    StageKind,
    StageWithoutArgument,
    ValueStage,
    add_tensor_name_to_errors,
    compute_max_magnitude,
    is_lossy,
    parse_decimal_argument,
    parse_int_argument,
    read_exact,
    to_spec_values,
)
from edgefl.compression.wire import PayloadReader
from edgefl.core.errors import CodecError
from edgefl.core.types import MAX_PARTS, Array, ModelSpec, SparseTensor, Tensor, Tensors, TensorSpec

_MIN_SAMPLED_SIZE = 2**16
_SAMPLE_SIZE = 2**14

_MIN_FRACTION = Decimal("1e-12")
_MIN_THRESHOLD, _MAX_FLOAT32 = float(np.finfo(np.float32).smallest_subnormal), float(np.finfo(np.float32).max)


class Dense(StageWithoutArgument, EachTensorStage):
    """All entries in order. Decoded tensors are read-only views of the body where no cast is needed."""

    name: ClassVar[str] = "dense"
    is_unbiased: ClassVar[bool] = True
    is_contraction: ClassVar[bool] = True

    def encode_tensor(self, spec: TensorSpec, array: Array, values: ValueStage, rng: Generator) -> Iterable[Array]:  # noqa: ARG002 interface of tensor stages
        return values.encode(array, rng)

    @staticmethod
    def decode_tensor(reader: PayloadReader, spec: TensorSpec, values: type[ValueStage]) -> Array:
        return values.decode(reader, spec.size).reshape(spec.shape)


def find_top_k(flat: Array, count: int) -> Array:
    """Returns the ascending int64 indices of the `count` entries of [n] that are largest by magnitude.

    Among equals the lowest index wins.

    Raises:
        CodecError: an entry is NaN or infinite.
    """
    compute_max_magnitude("topk", flat)
    if count >= flat.size:
        return np.arange(flat.size)
    if count == 0:
        return np.arange(0)
    magnitudes = np.abs(flat)
    candidates = _find_candidates(magnitudes, count)
    searched = magnitudes if candidates is None else magnitudes[candidates]
    smallest = np.partition(searched, searched.size - count)[searched.size - count]
    above = np.flatnonzero(searched > smallest)
    equal = np.flatnonzero(searched == smallest)[: count - above.size]
    indices = np.sort(np.concatenate([above, equal]))
    return indices if candidates is None else candidates[indices]


def _find_candidates(magnitudes: Array, count: int) -> Array | None:
    """Returns the ascending indices of a few more than the `count` largest; None when not worthwhile.

    A sample estimates their magnitude. It only saves time: with too few candidates the result is None.
    """
    if magnitudes.size < _MIN_SAMPLED_SIZE:
        return None
    sample = magnitudes[:: magnitudes.size // _SAMPLE_SIZE]
    expected = count / magnitudes.size * sample.size
    rank = math.ceil(expected + 4 * math.sqrt(expected) + 8)
    if 2 * rank >= sample.size:
        return None
    floor = np.partition(sample, sample.size - rank)[sample.size - rank]
    candidates = np.flatnonzero(magnitudes >= floor)
    return candidates if candidates.size >= count else None


class _Sparsifier(EachTensorStage):
    """Base of stages that send some entries of each float32 parameter; a subclass selects them."""

    __slots__ = ()

    codes_indices: ClassVar[bool] = True

    def encode_tensor(self, spec: TensorSpec, array: Array, values: ValueStage, rng: Generator) -> Iterator[Array]:
        indices, selected_values = self._select(array.reshape(-1), rng)
        yield from write_indices(indices, spec.size)
        yield from values.encode(selected_values, rng)

    @staticmethod
    def decode_tensor(reader: PayloadReader, spec: TensorSpec, values: type[ValueStage]) -> SparseTensor:
        indices = read_indices(reader, spec.size)
        return SparseTensor(indices=indices, values=values.decode(reader, indices.size), shape=spec.shape)

    def _select(self, flat: Array, rng: Generator) -> tuple[Array, Array]:
        """Returns the indices, in ascending order, and their values."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class _FractionSparsifier(_Sparsifier):
    """Base of stages that keep max(1, floor(fraction * n)) entries of each tensor."""

    name: ClassVar[str]

    fraction: Fraction

    @classmethod
    def parse(cls, argument: str) -> Self:
        return cls(fraction=_parse_fraction(cls.name, argument))


@dataclass(frozen=True, slots=True)
class TopK(_FractionSparsifier):
    """Keeps max(1, floor(fraction * n)) entries of each tensor, the largest by magnitude; the lowest index wins ties.

    Source: Hardy et al., Distributed Deep Learning on Edge-devices: Feasibility via Adaptive Compression, NCA 2017,
    the selection of AdaComp.
    """

    name: ClassVar[str] = "topk"
    is_unbiased: ClassVar[bool] = False
    is_contraction: ClassVar[bool] = True

    def _select(self, flat: Array, rng: Generator) -> tuple[Array, Array]:  # noqa: ARG002 interface of selections
        indices = find_top_k(flat, count_kept(self.fraction, flat.size))
        return indices, flat[indices]


@dataclass(frozen=True, slots=True)
class Threshold(_Sparsifier):
    """Keeps the entries whose magnitude is at least `min_magnitude`; none when all are smaller."""

    is_unbiased: ClassVar[bool] = False
    is_contraction: ClassVar[bool] = True

    min_magnitude: float

    @classmethod
    def parse(cls, argument: str) -> Self:
        smallest = parse_decimal_argument(
            "threshold",
            argument,
            Decimal(_MIN_THRESHOLD),
            Decimal(_MAX_FLOAT32),
            f"a number over 0 that float32 has, {_MIN_THRESHOLD:.3g} to {_MAX_FLOAT32:.3g}",
        )
        return cls(min_magnitude=float(smallest))

    def _select(self, flat: Array, rng: Generator) -> tuple[Array, Array]:  # noqa: ARG002 interface of selections
        compute_max_magnitude("threshold", flat)
        indices = np.flatnonzero(np.abs(flat) >= self.min_magnitude)
        return indices, flat[indices]


@dataclass(frozen=True, slots=True)
class RandK(_FractionSparsifier):
    """Keeps max(1, floor(fraction * n)) random entries of each tensor, times n over their number: unbiased."""

    name: ClassVar[str] = "randk"
    is_unbiased: ClassVar[bool] = True
    is_contraction: ClassVar[bool] = False

    def _select(self, flat: Array, rng: Generator) -> tuple[Array, Array]:
        count = count_kept(self.fraction, flat.size)
        largest = compute_max_magnitude("randk", flat)
        scale = flat.size / max(count, 1)
        if largest * scale > _MAX_FLOAT32:
            raise CodecError(f"randk multiplies by {scale:.6g}, too much for {largest:.6g}: use topk")
        indices = np.sort(rng.choice(flat.size, count, replace=False, shuffle=False)) if count else np.arange(0)
        return indices, flat[indices] * np.float32(scale)


@dataclass(frozen=True, slots=True)
class Slice(EachTensorStage):
    """`slice:k:r`: part k of r, in a row, of each float32 parameter: the sum of all parts is the value.

    Written are k and r, and the values. Of n entries part k has those from n (k - 1) // r to n k // r.

    Source: `ndc` of Parallel-SGD, where each of r holders of a block sends a part of it.
    """

    is_unbiased: ClassVar[bool] = False
    is_contraction: ClassVar[bool] = False

    part: int
    num_parts: int

    @classmethod
    def parse(cls, argument: str) -> Self:
        part, _, num_parts = argument.partition(":")
        count = parse_int_argument("slice count", num_parts, 1, MAX_PARTS)
        return cls(part=parse_int_argument("slice", part, 1, count), num_parts=count)

    def encode_tensor(self, spec: TensorSpec, array: Array, values: ValueStage, rng: Generator) -> Iterator[Array]:
        compute_max_magnitude("slice", array)
        start, stop = _find_part(spec.size, self.part, self.num_parts)
        yield np.array([self.part - 1, self.num_parts - 1], dtype=np.uint8)
        yield from values.encode(array.reshape(-1)[start:stop], rng)

    @staticmethod
    def decode_tensor(reader: PayloadReader, spec: TensorSpec, values: type[ValueStage]) -> SparseTensor:
        part, num_parts = (number + 1 for number in reader.read_bytes(2))
        if part > num_parts:
            raise CodecError(f"payload holds part {part} of {num_parts}")
        start, stop = _find_part(spec.size, part, num_parts)
        found = values.decode(reader, stop - start)
        return SparseTensor(indices=np.arange(start, stop), values=found, shape=spec.shape)


def _find_part(size: int, part: int, num_parts: int) -> tuple[int, int]:
    """Returns where part 1 to `num_parts` of `size` entries begins and ends."""
    return size * (part - 1) // num_parts, size * part // num_parts


def count_kept(fraction: Fraction, size: int) -> int:
    """Returns the number of entries of `size` in a fraction: at least one, unless there are none."""
    return min(size, max(1, int(fraction * size)))


def _parse_fraction(name: str, argument: str) -> Fraction:
    """Returns the exact fraction as typed: 0.29 of 100 entries are 29, in floating point 28."""
    return Fraction(
        parse_decimal_argument(name, argument, _MIN_FRACTION, Decimal(1), "a fraction over 0 and at most 1")
    )


class SparseDelta(StageWithoutArgument):
    """Some entries of every shared tensor, of any type, with their present values; only `delta.py` makes them."""

    name: ClassVar[str] = "delta"
    kind: ClassVar[StageKind] = StageKind.TENSORS
    is_unbiased: ClassVar[bool] = True
    is_contraction: ClassVar[bool] = True
    codes_indices: ClassVar[bool] = True

    def encode(self, tensors: Tensors, shapes: ModelSpec, values: ValueStage, rng: Generator) -> Iterator[Array]:
        for spec in shapes:
            sparse = tensors[spec.name]
            if not isinstance(sparse, SparseTensor):
                raise CodecError(f"tensor {spec.name!r}: a delta is made of changed entries, got all of them")
            yield from write_indices(sparse.indices, spec.size)
            sent_values = to_spec_values(spec, sparse.values)
            with add_tensor_name_to_errors(spec):
                yield from values.encode(sent_values, rng) if is_lossy(spec) else (sent_values,)

    @staticmethod
    def decode(reader: PayloadReader, shapes: ModelSpec, values: type[ValueStage]) -> dict[str, Tensor]:
        return {spec.name: _read_changed(reader, spec, values) for spec in shapes}


def select_changed_entries(spec: TensorSpec, tensor: Array, indices: Array) -> SparseTensor:
    """Returns the entries at flat `indices` (any order, repeats allowed), with their present values.

    Raises:
        CodecError: the tensor's shape is not the task's, or an index is out of range.
    """
    if tensor.shape != spec.shape:
        raise CodecError(f"tensor {spec.name!r} must have the shape {spec.shape}, got {tensor.shape}")
    positions = np.asarray(indices, dtype=np.int64).reshape(-1)
    if np.any(np.diff(positions) <= 0):
        positions = np.unique(positions)
    if positions.size and not 0 <= int(positions[0]) <= int(positions[-1]) < spec.size:
        raise CodecError(f"tensor {spec.name!r}: changed indices must lie in 0 to {spec.size - 1}")
    return SparseTensor(indices=positions, values=tensor.reshape(-1)[positions], shape=spec.shape)


def _read_changed(reader: PayloadReader, spec: TensorSpec, values: type[ValueStage]) -> SparseTensor:
    indices = read_indices(reader, spec.size)
    changed_values = values.decode(reader, indices.size) if is_lossy(spec) else read_exact(reader, spec, indices.size)
    return SparseTensor(indices=indices, values=changed_values, shape=spec.shape)

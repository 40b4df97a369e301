"""Sparsifiers of float32 parameters: the largest entries (`topk`), those over a threshold, or random ones (`randk`).

They decode to `SparseTensor`s. All other tensors travel whole and exactly.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from typing import ClassVar, Protocol, Self

import numpy as np
from numpy.random import Generator

from edgefl.compression.entropy.indices import read_indices, write_indices
from edgefl.compression.sparsification.top_k import find_top_k
from edgefl.compression.stages import (
    StageKind,
    ValueStage,
    add_tensor_name_to_errors,
    compute_max_magnitude,
    is_lossy,
    read_exact,
    to_spec_array,
)
from edgefl.compression.wire import PayloadReader
from edgefl.core.errors import CodecError
from edgefl.core.types import Array, ModelSpec, SparseTensor, Tensor, Tensors

_MIN_FRACTION = Decimal("1e-12")
_MIN_THRESHOLD, _MAX_THRESHOLD = float(np.finfo(np.float32).smallest_subnormal), float(np.finfo(np.float32).max)


class EntrySelector(Protocol):
    """Selector of a flat parameter's sent entries, and their values."""

    def __call__(self, flat: Array, rng: Generator) -> tuple[Array, Array]: ...


class _Sparsifier:
    """Base of stages that send some entries of each float32 parameter; a subclass selects them."""

    __slots__ = ()

    kind: ClassVar[StageKind] = StageKind.TENSORS
    codes_indices: ClassVar[bool] = True

    def encode(self, tensors: Tensors, shapes: ModelSpec, values: ValueStage, rng: Generator) -> Iterator[Array]:
        return _write_selected(self._select, tensors, shapes, values, rng)

    @staticmethod
    def decode(reader: PayloadReader, shapes: ModelSpec, values: type[ValueStage]) -> dict[str, Tensor]:
        return _read_selected(reader, shapes, values)

    def _select(self, flat: Array, rng: Generator) -> tuple[Array, Array]:
        """Returns the indices, in ascending order, and their values."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class TopK(_Sparsifier):
    """Keeps max(1, floor(fraction * n)) entries of each tensor, the largest by magnitude; the lowest index wins ties.

    Source: Hardy et al., Distributed Deep Learning on Edge-devices: Feasibility via Adaptive Compression, NCA 2017,
    the selection of AdaComp.
    """

    is_unbiased: ClassVar[bool] = False
    is_contraction: ClassVar[bool] = True

    fraction: Fraction

    @classmethod
    def parse(cls, argument: str) -> Self:
        return cls(fraction=_parse_fraction("topk", argument))

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
        try:
            smallest = float(argument)
        except ValueError:
            smallest = -1.0
        if not _MIN_THRESHOLD <= smallest <= _MAX_THRESHOLD:
            raise CodecError(
                "codec stage 'threshold' needs a number over 0 that float32 has, "
                f"{_MIN_THRESHOLD:.3g} to {_MAX_THRESHOLD:.3g}, got threshold:{argument}"
            )
        return cls(min_magnitude=smallest)

    def _select(self, flat: Array, rng: Generator) -> tuple[Array, Array]:  # noqa: ARG002 interface of selections
        compute_max_magnitude("threshold", flat)
        indices = np.flatnonzero(np.abs(flat) >= self.min_magnitude)
        return indices, flat[indices]


@dataclass(frozen=True, slots=True)
class RandK(_Sparsifier):
    """Keeps max(1, floor(fraction * n)) random entries of each tensor, times n over their number: unbiased."""

    is_unbiased: ClassVar[bool] = True
    is_contraction: ClassVar[bool] = False

    fraction: Fraction

    @classmethod
    def parse(cls, argument: str) -> Self:
        return cls(fraction=_parse_fraction("randk", argument))

    def _select(self, flat: Array, rng: Generator) -> tuple[Array, Array]:
        count = count_kept(self.fraction, flat.size)
        largest = compute_max_magnitude("randk", flat)
        scale = flat.size / max(count, 1)
        if largest * scale > float(np.finfo(np.float32).max):
            raise CodecError(f"randk multiplies by {scale:.6g}, too much for {largest:.6g}: use topk")
        indices = np.sort(rng.choice(flat.size, count, replace=False, shuffle=False)) if count else np.arange(0)
        return indices, flat[indices] * np.float32(scale)


def count_kept(fraction: Fraction, size: int) -> int:
    """Returns the number of entries of `size` in a fraction: at least one, unless there are none."""
    return min(size, max(1, int(fraction * size)))


def _write_selected(
    select: EntrySelector, tensors: Tensors, shapes: ModelSpec, values: ValueStage, rng: Generator
) -> Iterator[Array]:
    for spec in shapes:
        array = to_spec_array(spec, tensors[spec.name])
        if not is_lossy(spec):
            yield array
            continue
        with add_tensor_name_to_errors(spec):
            indices, selected_values = select(array.reshape(-1), rng)
            yield from write_indices(indices, spec.size)
            yield from values.encode(selected_values, rng)


def _read_selected(reader: PayloadReader, shapes: ModelSpec, values: type[ValueStage]) -> dict[str, Tensor]:
    decoded: dict[str, Tensor] = {}
    for spec in shapes:
        if is_lossy(spec):
            indices = read_indices(reader, spec.size)
            decoded[spec.name] = SparseTensor(
                indices=indices, values=values.decode(reader, indices.size), shape=spec.shape
            )
        else:
            decoded[spec.name] = read_exact(reader, spec, spec.size).reshape(spec.shape)
    return decoded


def _parse_fraction(name: str, argument: str) -> Fraction:
    """Returns the exact fraction as typed: 0.29 of 100 entries are 29, in floating point 28."""
    try:
        fraction = Decimal(argument)
        is_right = _MIN_FRACTION <= fraction <= 1
    except InvalidOperation:  # the comparison rejects a NaN
        is_right = False
    if not is_right:
        raise CodecError(f"codec stage {name!r} needs a fraction over 0 and at most 1, got {name}:{argument}")
    return Fraction(fraction)

"""Some entries of each float32 parameter: the largest (`topk`), those over a threshold, or random ones (`randk`).

They decode to `SparseTensor`s. Everything that is not a float32 parameter travels whole and exactly.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from typing import ClassVar, Protocol, Self

import numpy as np
from numpy.random import Generator

from edgefl.compression.coding.indices import read_indices, write_indices
from edgefl.compression.stages import (
    StageKind,
    ValueStage,
    exact_array,
    is_lossy,
    largest_magnitude,
    naming,
    read_exact,
)
from edgefl.compression.tensors.top_k import top_k
from edgefl.compression.wire import Reader
from edgefl.errors import CodecError
from edgefl.types import Array, Shapes, SparseTensor, Tensor, Tensors

_SMALLEST_FRACTION = Decimal("1e-12")
_TINIEST, _LARGEST = float(np.finfo(np.float32).smallest_subnormal), float(np.finfo(np.float32).max)


class Selection(Protocol):
    """Which entries of a flat parameter travel, and with what values."""

    def __call__(self, flat: Array, rng: Generator) -> tuple[Array, Array]: ...


class _Selection:
    """A stage that sends some entries of each float32 parameter; a subclass says which, and with what values."""

    __slots__ = ()

    kind: ClassVar[StageKind] = StageKind.TENSORS
    codes_indices: ClassVar[bool] = True

    def encode(self, tensors: Tensors, shapes: Shapes, values: ValueStage, rng: Generator) -> Iterator[Array]:
        return _write_selected(self._select, tensors, shapes, values, rng)

    @staticmethod
    def decode(reader: Reader, shapes: Shapes, values: type[ValueStage]) -> dict[str, Tensor]:
        return _read_selected(reader, shapes, values)

    def _select(self, flat: Array, rng: Generator) -> tuple[Array, Array]:
        """Returns the places, in ascending order, and the values there."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class TopK(_Selection):
    """Keeps max(1, floor(fraction * n)) entries of each tensor, the largest by magnitude; the lowest index wins ties.

    Source: Hardy et al., Distributed Deep Learning on Edge-devices: Feasibility via Adaptive Compression, NCA 2017,
    the selection of AdaComp.
    """

    is_unbiased: ClassVar[bool] = False
    is_contraction: ClassVar[bool] = True

    fraction: Fraction

    @classmethod
    def parse(cls, argument: str) -> Self:
        return cls(fraction=_fraction("topk", argument))

    def _select(self, flat: Array, rng: Generator) -> tuple[Array, Array]:  # noqa: ARG002 the seam of all selections
        indices = top_k(flat, num_kept(self.fraction, flat.size))
        return indices, flat[indices]


@dataclass(frozen=True, slots=True)
class Threshold(_Selection):
    """Keeps the entries whose magnitude is at least `smallest`; none when all are smaller."""

    is_unbiased: ClassVar[bool] = False
    is_contraction: ClassVar[bool] = True

    smallest: float

    @classmethod
    def parse(cls, argument: str) -> Self:
        try:
            smallest = float(argument)
        except ValueError:
            smallest = -1.0
        if not _TINIEST <= smallest <= _LARGEST:
            raise CodecError(
                f"codec stage 'threshold' needs a number over 0 that float32 has, {_TINIEST:.3g} to {_LARGEST:.3g}, "
                f"got threshold:{argument}"
            )
        return cls(smallest=smallest)

    def _select(self, flat: Array, rng: Generator) -> tuple[Array, Array]:  # noqa: ARG002 the seam of all selections
        largest_magnitude("threshold", flat)
        indices = np.flatnonzero(np.abs(flat) >= self.smallest)
        return indices, flat[indices]


@dataclass(frozen=True, slots=True)
class RandK(_Selection):
    """Keeps max(1, floor(fraction * n)) random entries of each tensor, times n over their number: unbiased."""

    is_unbiased: ClassVar[bool] = True
    is_contraction: ClassVar[bool] = False

    fraction: Fraction

    @classmethod
    def parse(cls, argument: str) -> Self:
        return cls(fraction=_fraction("randk", argument))

    def _select(self, flat: Array, rng: Generator) -> tuple[Array, Array]:
        count = num_kept(self.fraction, flat.size)
        largest = largest_magnitude("randk", flat)
        scale = flat.size / max(count, 1)
        if largest * scale > float(np.finfo(np.float32).max):
            raise CodecError(f"randk multiplies by {scale:.6g}, too much for {largest:.6g}: use topk")
        indices = np.sort(rng.choice(flat.size, count, replace=False, shuffle=False)) if count else np.arange(0)
        return indices, flat[indices] * np.float32(scale)


def num_kept(fraction: Fraction, size: int) -> int:
    """Returns how many of `size` entries a fraction keeps: at least one, unless there are none."""
    return min(size, max(1, int(fraction * size)))


def _write_selected(
    select: Selection, tensors: Tensors, shapes: Shapes, values: ValueStage, rng: Generator
) -> Iterator[Array]:
    for spec in shapes:
        array = exact_array(spec, tensors[spec.name])
        if not is_lossy(spec):
            yield array
            continue
        with naming(spec):
            indices, kept = select(array.reshape(-1), rng)
            yield from write_indices(indices, spec.size)
            yield from values.encode(kept, rng)


def _read_selected(reader: Reader, shapes: Shapes, values: type[ValueStage]) -> dict[str, Tensor]:
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


def _fraction(name: str, argument: str) -> Fraction:
    """Returns the exact fraction that was typed: 0.29 of 100 entries are 29, in floating point they were 28."""
    try:
        fraction = Decimal(argument)
        is_right = _SMALLEST_FRACTION <= fraction <= 1
    except InvalidOperation:  # a NaN is found by the comparison
        is_right = False
    if not is_right:
        raise CodecError(f"codec stage {name!r} needs a fraction over 0 and at most 1, got {name}:{argument}")
    return Fraction(fraction)

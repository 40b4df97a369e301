"""Values as floating-point numbers of 32 (exact) or 16 bits: `fp32` when a spec names none, `fp16`, `bf16`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import ClassVar, Self

import numpy as np
from numpy.random import Generator

from edgefl.compression.stages import StageKind, require_no_argument
from edgefl.compression.wire import PayloadReader
from edgefl.core.errors import CodecError
from edgefl.core.types import Array

_FLOAT32 = np.dtype("<f4")
_UINT16 = np.dtype("<u2")
# A chunk's numbers stay in the cache.
_CHUNK = 2**15
_MAX_BFLOAT16 = 3.3895313892515355e38


class Float32:
    """The exact default value stage; it has no number because it is never in a header."""

    kind: ClassVar[StageKind] = StageKind.VALUES
    is_finite_only: ClassVar[bool] = False
    is_unbiased = True
    is_contraction = True

    @classmethod
    def parse(cls, argument: str) -> Self:
        require_no_argument("fp32", argument)
        return cls()

    def error_bound(self, values: Array) -> Array:
        return np.zeros(values.shape)

    def encode(self, values: Array, rng: Generator) -> Iterator[Array]:  # noqa: ARG002 interface of value stages
        yield values

    @staticmethod
    def decode(reader: PayloadReader, size: int) -> Array:
        return reader.read_array(_FLOAT32, size)


class Float16:
    """Rounds to IEEE half precision: 11 significant bits, and steps of 2**-24 below 2**-14."""

    kind: ClassVar[StageKind] = StageKind.VALUES
    is_finite_only: ClassVar[bool] = False
    is_unbiased = False
    is_contraction = True

    @classmethod
    def parse(cls, argument: str) -> Self:
        require_no_argument("fp16", argument)
        return cls()

    def error_bound(self, values: Array) -> Array:
        return np.abs(values, dtype=np.float64) * 2.0**-11 + 2.0**-25

    def encode(self, values: Array, rng: Generator) -> Iterator[Array]:  # noqa: ARG002 interface of value stages
        halves, flat = _round_in_chunks(_round_to_float16, values)
        _check_range("fp16", 65504, flat, is_special=(halves & 0x7C00) == 0x7C00)
        yield halves

    @staticmethod
    def decode(reader: PayloadReader, size: int) -> Array:
        halves, table = reader.read_array(_UINT16, size), _make_float16_table()
        values = np.empty(size, dtype=np.float32)
        # `take` makes indices of eight bytes, so not of all halves at once; clipping has no effect but avoids a copy.
        for start in range(0, size, _CHUNK):
            table.take(halves[start : start + _CHUNK], out=values[start : start + _CHUNK], mode="clip")
        return values


class BFloat16:
    """Rounds to the upper half of a float32, to the nearest, ties to even.

    8 significant bits at the full range.
    """

    kind: ClassVar[StageKind] = StageKind.VALUES
    is_finite_only: ClassVar[bool] = False
    is_unbiased = False
    is_contraction = True

    @classmethod
    def parse(cls, argument: str) -> Self:
        require_no_argument("bf16", argument)
        return cls()

    def error_bound(self, values: Array) -> Array:
        return np.abs(values, dtype=np.float64) * 2.0**-8 + 2.0**-134

    def encode(self, values: Array, rng: Generator) -> Iterator[Array]:  # noqa: ARG002 interface of value stages
        halves, flat = _round_in_chunks(_round_to_bfloat16, values)
        _check_range("bf16", _MAX_BFLOAT16, flat, is_special=(halves & 0x7FFF) == 0x7F80)
        yield halves

    @staticmethod
    def decode(reader: PayloadReader, size: int) -> Array:
        bits = reader.read_array(_UINT16, size).astype(np.uint32)
        bits <<= 16
        return bits.view(np.float32)


def _round_to_float16(values: Array) -> Array:
    """Returns the bits of each number as IEEE half precision, to the nearest, ties to even.

    Equal to `astype`, but twenty times faster on numbers below 2**-14, frequent in updates.
    """
    bits = values.view(np.uint32)
    magnitudes = bits & 0x7FFFFFFF
    # The exponent's bias changes by 112, and the 13 dropped bits decide whether to round up.
    halves = (magnitudes + (((magnitudes >> 13) & 1) + np.uint32(0xC8000FFF))) >> 13
    # Added to 0.5 a small number leaves its rounded value in the lowest bits: their unit is 2**-24 there.
    is_small = magnitudes < 0x38800000
    small = (np.where(is_small, magnitudes, np.uint32(0)).view(np.float32) + np.float32(0.5)).view(
        np.uint32
    ) - 0x3F000000
    halves = np.where(is_small, small, np.minimum(halves, 0x7C00))
    halves = np.where(magnitudes > 0x7F800000, np.uint32(0x7E00), halves)
    return (halves | ((bits >> 16) & 0x8000)).astype(_UINT16)


def _round_to_bfloat16(values: Array) -> Array:
    """Returns the upper half of each number's bits, to the nearest, ties to even."""
    bits = values.view(np.uint32)
    upper = bits >> 16
    halves: Array = ((bits + (upper & 1) + np.uint32(0x7FFF)) >> 16).astype(_UINT16)
    is_nan = np.isnan(values)
    if np.any(is_nan):
        # Rounding could carry a NaN into infinity or around to zero; a set top bit of the fraction keeps it one.
        halves = np.where(is_nan, upper | 0x40, halves).astype(_UINT16)
    return halves


@cache
def _make_float16_table() -> Array:
    """Returns the float32 of every half by its bits: ten times faster than `astype` below 2**-14."""
    return np.arange(2**16, dtype=np.uint16).view(np.float16).astype(np.float32)


def _round_in_chunks(round_chunk: Callable[[Array], Array], values: Array) -> tuple[Array, Array]:
    """Returns the halves of all values, [n] uint16, and the values as [n] float32."""
    flat = np.ascontiguousarray(values, dtype=np.float32).reshape(-1)
    halves = np.empty(flat.size, dtype=_UINT16)
    for start in range(0, flat.size, _CHUNK):
        halves[start : start + _CHUNK] = round_chunk(flat[start : start + _CHUNK])
    return halves, flat


def _check_range(name: str, limit: float, flat: Array, *, is_special: Array) -> None:
    """Rejects overflowed values: an infinity would spread through the model unnoticed.

    Raises:
        CodecError: there is one.
    """
    if np.any(is_special) and np.any(np.isfinite(flat[is_special])):
        largest = np.max(np.abs(flat[np.isfinite(flat)]))
        raise CodecError(f"{name} carries magnitudes up to {limit:.6g}, got {largest:.6g}: use dense")

"""Values rounded to the nearest: floating-point numbers (`fp32` if a spec names none, `fp16`, `bf16`) and `int8`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import ClassVar, Self

import numpy as np
from numpy.random import Generator

from edgefl.compression.chunked_indexing import iterate_chunks
from edgefl.compression.stages import FLOAT32, StageKind, StageWithoutArgument, compute_max_magnitude
from edgefl.compression.wire import PayloadReader, encode_varint
from edgefl.core.errors import CodecError
from edgefl.core.types import Array

_UINT16 = np.dtype("<u2")


class Float32(StageWithoutArgument):
    """The exact default value stage; it has no number because it is never in a header."""

    name: ClassVar[str] = "fp32"
    kind: ClassVar[StageKind] = StageKind.VALUES
    is_finite_only: ClassVar[bool] = False
    is_unbiased: ClassVar[bool] = True
    is_contraction: ClassVar[bool] = True

    def encode(self, values: Array, rng: Generator) -> Iterator[Array]:  # noqa: ARG002 interface of value stages
        yield values

    @staticmethod
    def decode(reader: PayloadReader, size: int) -> Array:
        return reader.read_array(FLOAT32, size)


class _HalfFloat(StageWithoutArgument):
    """Base of 16-bit floats: rounds to the nearest, ties to even.

    A number that would overflow is a CodecError: an infinity would spread through the model unnoticed.
    """

    kind: ClassVar[StageKind] = StageKind.VALUES
    is_finite_only: ClassVar[bool] = False
    is_unbiased: ClassVar[bool] = False
    is_contraction: ClassVar[bool] = True

    largest: ClassVar[float]
    infinity: ClassVar[int]

    def encode(self, values: Array, rng: Generator) -> Iterator[Array]:  # noqa: ARG002 interface of value stages
        flat = np.ascontiguousarray(values, dtype=np.float32).reshape(-1)
        halves = np.empty(flat.size, dtype=_UINT16)
        for chunk in iterate_chunks(flat.size):
            halves[chunk] = self.round_chunk(flat[chunk])
        # NaN has the bits of an infinity, and more.
        is_special = (halves & self.infinity) == self.infinity
        if np.any(is_special) and np.any(np.isfinite(flat[is_special])):
            found = np.max(np.abs(flat[np.isfinite(flat)]))
            raise CodecError(f"{self.name} carries magnitudes up to {self.largest:.6g}, got {found:.6g}: use dense")
        yield halves

    @staticmethod
    def round_chunk(values: Array) -> Array:
        """Returns the bits of each number, [n] uint16."""
        raise NotImplementedError


class Float16(_HalfFloat):
    """Rounds to IEEE half precision: 11 significant bits, and steps of 2**-24 below 2**-14."""

    name: ClassVar[str] = "fp16"
    largest: ClassVar[float] = 65504
    infinity: ClassVar[int] = 0x7C00

    @staticmethod
    def decode(reader: PayloadReader, size: int) -> Array:
        halves, table = reader.read_array(_UINT16, size), _make_float16_table()
        values = np.empty(size, dtype=np.float32)
        # `take` makes indices of eight bytes, so not of all halves at once; clipping has no effect but avoids a copy.
        for chunk in iterate_chunks(size):
            table.take(halves[chunk], out=values[chunk], mode="clip")
        return values

    @staticmethod
    def round_chunk(values: Array) -> Array:
        """Returns the bits of each number, as `astype` but twenty times faster below 2**-14, frequent in updates."""
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


class BFloat16(_HalfFloat):
    """Rounds to the upper half of a float32: 8 significant bits at the full range."""

    name: ClassVar[str] = "bf16"
    largest: ClassVar[float] = 3.3895313892515355e38
    infinity: ClassVar[int] = 0x7F80

    @staticmethod
    def decode(reader: PayloadReader, size: int) -> Array:
        bits = reader.read_array(_UINT16, size).astype(np.uint32)
        bits <<= 16
        return bits.view(np.float32)

    @staticmethod
    def round_chunk(values: Array) -> Array:
        """Returns the upper half of each number's bits."""
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


_INT8 = np.dtype(np.int8)
_MAX_STEP = np.float32(127)


@dataclass(frozen=True, slots=True)
class Int8:
    """Rounds to the nearest 127th of the largest magnitude of the tensor, or of its slice along the first axis.

    Where only some entries of a tensor travel there are no slices, and `int8:channel` is `int8`.
    """

    kind: ClassVar[StageKind] = StageKind.VALUES
    is_finite_only: ClassVar[bool] = True
    is_unbiased: ClassVar[bool] = False
    is_contraction: ClassVar[bool] = True

    per_channel: bool = False

    @classmethod
    def parse(cls, argument: str) -> Self:
        if argument not in ("", "channel"):
            raise CodecError(f"codec stage 'int8' takes no argument or 'channel', got int8:{argument}")
        return cls(per_channel=argument == "channel")

    def encode(self, values: Array, rng: Generator) -> Iterator[Array]:  # noqa: ARG002 interface of value stages
        compute_max_magnitude("int8", values)
        rows = self._split_rows(values)
        scales = np.maximum(rows.max(axis=1, initial=0), -rows.min(axis=1, initial=0))
        yield encode_varint(len(scales))
        yield scales
        # Divided first: for denormal numbers 127 / scale overflows float32.
        steps = rows / np.where(scales > 0, scales, 1)[:, None]
        steps *= _MAX_STEP
        yield np.rint(steps, out=steps).astype(_INT8)

    @staticmethod
    def decode(reader: PayloadReader, size: int) -> Array:
        num_scales = reader.read_varint(max(size, 1))
        scales = reader.read_array(FLOAT32, num_scales)
        if not num_scales or size % num_scales or not np.all(np.isfinite(scales)):
            raise CodecError(f"payload holds {num_scales} scales for {size} values, or one that is not finite")
        steps = reader.read_array(_INT8, size)
        if np.any(steps < -_MAX_STEP):
            raise CodecError(f"payload holds the step {int(steps.min())}, at least -{_MAX_STEP:g} is right")
        rows = steps.astype(np.float32).reshape(num_scales, -1)
        rows /= _MAX_STEP
        rows *= scales[:, None]
        return rows.reshape(-1)

    def _split_rows(self, values: Array) -> Array:
        num_rows = len(values) if self.per_channel and values.ndim > 1 and values.size else 1
        return values.reshape(num_rows, -1)

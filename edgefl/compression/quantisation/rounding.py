"""Values rounded to the nearest: floats (`fp32` if a spec names none, `fp16`, `bf16`), `int8`, and signs.

One bit a value have `sign`, with one scale for both sides of zero, and `onebit`, with a mean for each side. Both are
biased, so best behind error feedback. With one scale an update is a vote and its weight, as counted by the strategy
`signsgd`. Two means are the best that one bit can do, since tensors are seldom symmetric about zero (biases, what
follows a ReLU), and buckets follow the sizes of values within a tensor.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import ClassVar, Self

import numpy as np
from numpy.random import Generator

from edgefl.compression.chunked_indexing import CHUNK, iterate_chunks
from edgefl.compression.entropy.golomb import pack_bits, read_binary_values, read_narrow_bits
from edgefl.compression.stages import (
    FLOAT32,
    UNEXPECTED_SCALE,
    FiniteValueStage,
    StageKind,
    StageWithoutArgument,
    compute_max_magnitude,
    parse_int_argument,
    read_finite,
)
from edgefl.compression.wire import PayloadReader, encode_varint
from edgefl.core.errors import CodecError
from edgefl.core.types import Array

_UINT16 = np.dtype("<u2")

_INT8 = np.dtype(np.int8)
_MAX_STEP = np.float32(127)

_MAX_BUCKET = 2**20


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


@dataclass(frozen=True, slots=True)
class Int8(FiniteValueStage):
    """Rounds to the nearest 127th of the largest magnitude of the tensor, or of its slice along the first axis.

    Where only some entries of a tensor travel there are no slices, and `int8:channel` is `int8`.
    """

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


class ScaledSign(StageWithoutArgument, FiniteValueStage):
    """Signs and one scale; zero counts as positive: with one bit there is no third case.

    Source: Karimireddy et al., Error Feedback Fixes SignSGD and other Gradient Compression Schemes, ICML 2019.
    """

    name: ClassVar[str] = "sign"
    is_unbiased: ClassVar[bool] = False
    is_contraction: ClassVar[bool] = True

    def encode(self, values: Array, rng: Generator) -> Iterator[Array]:  # noqa: ARG002 interface of value stages
        compute_max_magnitude("sign", values)
        scale = np.abs(values).mean(dtype=np.float64) if values.size else 0.0
        yield np.array([scale], dtype=FLOAT32)
        yield pack_bits(values.reshape(-1) < 0, 1)

    @staticmethod
    def decode(reader: PayloadReader, size: int) -> Array:
        scale = read_finite(reader, 1, UNEXPECTED_SCALE)
        return read_binary_values(reader, size, scale[0], -scale[0])


@dataclass(frozen=True, slots=True)
class OneBitSgd(FiniteValueStage):
    """One bit a value; zero counts as positive. `onebit:512`: two means per 512 values, else per tensor.

    Source: Seide et al., 1-Bit Stochastic Gradient Descent, INTERSPEECH 2014, section 3; error feedback is from that
    paper too.
    """

    is_unbiased: ClassVar[bool] = False
    is_contraction: ClassVar[bool] = True

    bucket: int = 0

    @classmethod
    def parse(cls, argument: str) -> Self:
        return cls(bucket=parse_int_argument("onebit", argument, 2, _MAX_BUCKET) if argument else 0)

    def encode(self, values: Array, rng: Generator) -> Iterator[Array]:  # noqa: ARG002 interface of value stages
        compute_max_magnitude("onebit", values)
        flat = values.reshape(-1)
        yield encode_varint(self.bucket)
        yield _compute_means(flat, self.bucket)
        yield pack_bits(flat < 0, 1)

    @staticmethod
    def decode(reader: PayloadReader, size: int) -> Array:
        bucket = reader.read_varint(_MAX_BUCKET)
        num_means = 2 * (max(1, -(-size // bucket)) if bucket else 1)
        means = read_finite(reader, num_means, "a mean that is not finite").reshape(-1, 2)
        if len(means) == 1:
            return read_binary_values(reader, size, means[0, 0], means[0, 1])
        is_negative = read_narrow_bits(reader, size, 1)
        values = np.empty(size, dtype=np.float32)
        num_whole = size - size % bucket
        _write_means(
            means[: num_whole // bucket],
            is_negative[:num_whole].reshape(-1, bucket),
            values[:num_whole].reshape(-1, bucket),
        )
        _write_means(means[-1:], is_negative[num_whole:].reshape(1, -1), values[num_whole:].reshape(1, -1))
        return values


def _write_means(means: Array, is_negative: Array, out: Array) -> None:
    """Writes each row's first mean where its bits are 0, and the second where they are 1."""
    bits = np.ascontiguousarray(means, dtype=np.float32).view(np.uint32)
    for rows in iterate_chunks(len(out), max(1, CHUNK // max(1, out.shape[1]))):
        # Bits of one number turn into those of the other: several times faster than a choice for each value.
        flips = bits[rows, :1] ^ bits[rows, 1:]
        np.bitwise_xor(is_negative[rows] * flips, bits[rows, :1], out=out[rows].view(np.uint32))


def _compute_means(flat: Array, bucket: int) -> Array:
    """Returns the means of non-negative and of negative values, a row per bucket; 0 of none."""
    if not bucket or not flat.size:
        return _compute_row_means(flat.reshape(1, -1))
    num_whole = flat.size - flat.size % bucket
    rows = [
        _compute_row_means(flat[:num_whole].reshape(-1, bucket)),
        _compute_row_means(flat[num_whole:].reshape(1, -1)),
    ]
    return np.concatenate(rows if num_whole < flat.size else rows[:1])


def _compute_row_means(rows: Array) -> Array:
    num_below = np.count_nonzero(rows < 0, axis=1)
    counts = np.stack([rows.shape[1] - num_below, num_below], axis=1)
    sums = np.stack(
        [
            np.add.reduce(np.maximum(rows, 0), axis=1, dtype=np.float64),
            np.add.reduce(np.minimum(rows, 0), axis=1, dtype=np.float64),
        ],
        axis=1,
    )
    means: Array = (sums / np.maximum(counts, 1)).astype(FLOAT32)
    return means

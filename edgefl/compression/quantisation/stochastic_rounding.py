"""Values rounded at random, so that their mean is kept: `qsgd`, `terngrad` and `natural`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import ClassVar, Self

import numpy as np
from numpy.random import Generator

from edgefl.compression.chunked_indexing import CHUNK, gather, iterate_chunks, scatter_masked, select_masked
from edgefl.compression.entropy.golomb import negate_where, pack_bits, read_narrow_bits
from edgefl.compression.entropy.indices import read_mask, write_mask
from edgefl.compression.entropy.levels import read_labels, read_levels, write_labels, write_levels
from edgefl.compression.stages import (
    FLOAT32,
    UNEXPECTED_SCALE,
    FiniteValueStage,
    StageWithoutArgument,
    compute_max_magnitude,
    parse_int_argument,
    read_finite,
)
from edgefl.compression.wire import PayloadReader, encode_varint
from edgefl.core.errors import CodecError
from edgefl.core.types import Array

DEFAULT_BUCKET = 512
_MAX_BITS = 8
_MAX_BUCKET = 2**20
_MAX_FLOAT32 = np.finfo(np.float32).max

DEFAULT_CLIP = 2.5

MAX_MAGNITUDE = 2.0**127
_MIN_EXPONENT, _NUM_EXPONENTS = -149, 277
_FRACTION_BITS = 23
_EXPONENT_BIAS = 127
_FRACTION_MASK = 2**_FRACTION_BITS - 1


@dataclass(frozen=True, slots=True)
class Qsgd(FiniteValueStage):
    """Rounds each value at random to one of 2**bits - 1 levels of its bucket's norm.

    Buckets are `bucket` values in the order of the tensor; the last one may be shorter. The expected squared
    error of a bucket of n values is at most min(n / L**2, sqrt(n) / L) times its squared norm, with L = 2**bits -
    1.

    Source: Alistarh et al., QSGD: Communication-Efficient SGD via Gradient Quantization and Encoding, NeurIPS
    2017, section 3. Differs from the paper: levels are coded as in `levels.py` and not with Elias codes.
    """

    codes_indices: ClassVar[bool] = True
    is_unbiased: ClassVar[bool] = True

    bits: int
    bucket: int = DEFAULT_BUCKET

    @classmethod
    def parse(cls, argument: str) -> Self:
        bits, _, bucket = argument.partition(":")
        return cls(
            bits=parse_int_argument("qsgd", bits, 1, _MAX_BITS),
            bucket=parse_int_argument("qsgd bucket", bucket, 1, _MAX_BUCKET) if bucket else DEFAULT_BUCKET,
        )

    @property
    def is_contraction(self) -> bool:
        highest = (1 << self.bits) - 1
        return min(self.bucket / highest**2, math.sqrt(self.bucket) / highest) < 1

    def encode(self, values: Array, rng: Generator) -> Iterator[Array]:
        compute_max_magnitude("qsgd", values)
        highest = 2**self.bits - 1
        flat, width = values.reshape(-1), max(1, min(self.bucket, values.size))
        norms = np.empty(-(-flat.size // width), dtype=np.float32)
        levels = np.empty((norms.size, width), dtype=np.int8 if highest < 2**7 else np.int16)
        for rows in iterate_chunks(norms.size, max(1, CHUNK // width)):
            buckets = _split_buckets(flat[rows.start * width : rows.stop * width], width)
            norms[rows] = _compute_norms(buckets)
            levels[rows] = _compute_levels(buckets, norms[rows], highest, rng)
        yield np.array([self.bits], dtype=np.uint8)
        yield encode_varint(self.bucket)
        yield norms
        yield from write_levels(levels.reshape(-1)[: values.size], highest)

    @staticmethod
    def decode(reader: PayloadReader, size: int) -> Array:
        bits, bucket = reader.read_bytes(1)[0], reader.read_varint(_MAX_BUCKET)
        if not (1 <= bits <= _MAX_BITS and bucket):
            raise CodecError(f"payload holds qsgd levels of {bits} bits in buckets of {bucket}")
        norms = read_finite(reader, -(-size // bucket), "a qsgd norm that is not finite")
        highest = 2**bits - 1
        levels = read_levels(reader, size, highest)
        levels /= np.float32(highest)
        if len(norms) <= 1:
            return np.multiply(levels, norms, out=levels)
        num_whole = size - size % bucket
        levels[:num_whole].reshape(-1, bucket)[...] *= norms[: num_whole // bucket, None]
        levels[num_whole:] *= norms[-1]
        return levels


def _split_buckets(flat: Array, width: int) -> Array:
    """Returns the values as rows of one bucket each, the last filled up with zeros."""
    missing = -flat.size % width
    padded = np.concatenate([flat, np.zeros(missing, dtype=flat.dtype)]) if missing else flat
    return padded.reshape(-1, width)


def _compute_levels(buckets: Array, norms: Array, highest: int, rng: Generator) -> Array:
    """Returns signed levels from -highest to highest, as float32."""
    exact = np.abs(buckets)
    # At most 1 before it is multiplied: the norm was rounded up.
    exact /= np.where(norms > 0, norms, 1)[:, None]
    exact *= np.float32(highest)
    levels = np.floor(exact)
    exact -= levels
    levels += rng.random(exact.shape, dtype=np.float32) < exact
    return np.copysign(levels, buckets, out=levels)


def _compute_norms(buckets: Array) -> Array:
    """Returns the Euclidean norm of each row, rounded up, so that no value is larger than its norm.

    Raises:
        CodecError: one overflows float32.
    """
    exact = np.sqrt(np.einsum("ij,ij->i", buckets, buckets, dtype=np.float64))
    if np.any(exact > _MAX_FLOAT32):
        raise CodecError(f"qsgd carries norms up to {_MAX_FLOAT32:.6g}, got {exact.max():.6g}: use dense")
    norms = exact.astype(np.float32)
    rounded_up: Array = np.where(norms < exact, np.nextafter(norms, _MAX_FLOAT32), norms)
    return rounded_up


@dataclass(frozen=True, slots=True)
class TernGrad(FiniteValueStage):
    """Rounds each value at random to -s, 0 or s, the largest magnitude.

    Clips each tensor to `clip` standard deviations first; `terngrad:inf` clips nothing and is unbiased. Without
    clipping the expected squared error is s * (sum of magnitudes) - (squared norm).

    Source: Wen et al., TernGrad: Ternary Gradients to Reduce Communication in Distributed Deep Learning, NeurIPS
    2017, section 3. Differs from the paper: the deviation that values are clipped at is taken about zero, or a
    tensor of equal numbers would vanish; and s is each device's own.
    """

    codes_indices: ClassVar[bool] = True
    is_contraction: ClassVar[bool] = False

    clip: float = DEFAULT_CLIP

    @classmethod
    def parse(cls, argument: str) -> Self:
        try:
            clip = float(argument or DEFAULT_CLIP)
        except ValueError:
            clip = 0.0
        if not clip >= 1:
            raise CodecError(f"codec stage 'terngrad' clips at 1 or more deviations, or inf, got terngrad:{argument}")
        return cls(clip=clip)

    @property
    def is_unbiased(self) -> bool:
        return self.clip == float("inf")

    def encode(self, values: Array, rng: Generator) -> Iterator[Array]:
        scale = self._compute_scale(values)
        flat = values.reshape(-1)
        levels = np.empty(flat.size, dtype=np.int8)
        for chunk in iterate_chunks(flat.size):
            _sample_levels(flat[chunk], scale, rng, levels[chunk])
        yield np.array([scale], dtype=FLOAT32)
        yield from write_levels(levels, 1)

    @staticmethod
    def decode(reader: PayloadReader, size: int) -> Array:
        scale = read_finite(reader, 1, UNEXPECTED_SCALE)
        return read_levels(reader, size, 1) * scale

    def _compute_scale(self, values: Array) -> np.float32:
        largest = compute_max_magnitude("terngrad", values)
        if not values.size or self.is_unbiased:
            return np.float32(largest)
        squares = np.einsum("i,i->", *(values.reshape(-1),) * 2, dtype=np.float64)
        deviation = float(np.sqrt(squares / values.size))
        return np.float32(min(largest, self.clip * deviation))


def _sample_levels(values: Array, scale: np.float32, rng: Generator, levels: Array) -> None:
    """Writes each value's sign to `levels` with probability magnitude / scale; else zero."""
    chances = np.abs(values)
    chances /= scale if scale > 0 else np.float32(1)
    is_kept = rng.random(values.size, dtype=np.float32) < chances
    np.copysign(is_kept, values, out=chances)
    levels[:] = chances


class NaturalCompression(StageWithoutArgument, FiniteValueStage):
    """Sends signs and exponents: |v| becomes 2**e with chance 2 - |v| / 2**e, else 2**(e + 1); zeros stay zeros.

    The expected squared error is at most an eighth of the squared norm. Written are the mask of non-zero values,
    their signs, the largest exponent, and the distance of the others below it.

    Source: Horváth et al., Natural Compression for Distributed Deep Learning, 2019, definition 1. Differs from
    the paper: exponents do not take eight bits each, they are coded near their entropy.
    """

    name: ClassVar[str] = "natural"
    codes_indices: ClassVar[bool] = True
    is_unbiased: ClassVar[bool] = True
    is_contraction: ClassVar[bool] = True

    def encode(self, values: Array, rng: Generator) -> Iterator[Array]:
        largest = compute_max_magnitude("natural", values)
        if largest > MAX_MAGNITUDE:
            raise CodecError(f"natural carries magnitudes up to {MAX_MAGNITUDE:.6g}, got {largest:.6g}: use dense")
        flat = np.ascontiguousarray(values, dtype=np.float32).reshape(-1)
        is_there = flat != 0
        yield from write_mask(is_there)
        non_zero = flat if np.all(is_there) else select_masked(flat, is_there)
        if not non_zero.size:
            return
        yield pack_bits(non_zero < 0, 1)
        exponents = round_exponents(non_zero, rng)
        top = int(exponents.max())
        yield encode_varint(top)
        yield from write_labels(np.subtract(np.int16(top), exponents, out=exponents))

    @staticmethod
    def decode(reader: PayloadReader, size: int) -> Array:
        is_there = read_mask(reader, size)
        count = int(np.count_nonzero(is_there))
        if not count:
            return np.zeros(size, dtype=np.float32)
        is_negative = read_narrow_bits(reader, count, 1)
        top = reader.read_varint(_NUM_EXPONENTS - 1)
        non_zero = gather(_make_powers_table()[: top + 1][::-1].copy(), read_labels(reader, count, top))
        negate_where(non_zero, is_negative)
        if count == size:
            return non_zero
        values = np.zeros(size, dtype=np.float32)
        scatter_masked(non_zero, is_there, values)
        return values


def round_exponents(values: Array, rng: Generator) -> Array:
    """Returns the exponents of [n] float32 values, none of them zero, rounded at random, each plus 149: [n] int16."""
    exponents = np.empty(values.size, dtype=np.int16)
    for chunk in iterate_chunks(values.size):
        exponents[chunk] = _round_chunk(values[chunk].view(np.uint32) & 0x7FFFFFFF, rng)
    return exponents


def _round_chunk(bits: Array, rng: Generator) -> Array:
    # A denormal number is a fraction without a leading one: read as an integer it has the right exponent.
    is_denormal = bits < 1 << _FRACTION_BITS
    if np.any(is_denormal):
        as_normal = bits[is_denormal].astype(np.float32).view(np.uint32)
        bits[is_denormal] = as_normal
    offsets = np.where(is_denormal, np.int16(-_EXPONENT_BIAS), np.int16(-_EXPONENT_BIAS - _MIN_EXPONENT))
    # The chance is the fraction itself, of 23 bits; a draw has 24, so rounding up has exactly that chance.
    up = rng.random(bits.size, dtype=np.float32) < (bits & _FRACTION_MASK).astype(np.float32) * np.float32(2.0**-23)
    exponents: Array = (bits >> _FRACTION_BITS).astype(np.int16) + offsets + up
    return exponents


@cache
def _make_powers_table() -> Array:
    """Returns 2**-149 to 2**127."""
    return np.ldexp(np.float32(1), np.arange(_MIN_EXPONENT, _MIN_EXPONENT + _NUM_EXPONENTS)).astype(np.float32)

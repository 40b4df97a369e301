"""`natural`: each value rounded at random to one of the two powers of two beside it; unbiased.

Source: Horváth et al., Natural Compression for Distributed Deep Learning, 2019, definition 1. Differs from the paper:
exponents do not take eight bits each, they are coded near their entropy.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import ClassVar, Self

import numpy as np
from numpy.random import Generator

from edgefl.compression.entropy.chunked_indexing import gather, scatter_masked, select_masked
from edgefl.compression.entropy.golomb_rice import negate_where, pack_bits, read_narrow_bits
from edgefl.compression.entropy.indices import read_mask, write_mask
from edgefl.compression.entropy.labels import read_labels, write_labels
from edgefl.compression.stages import StageKind, compute_max_magnitude, require_no_argument
from edgefl.compression.wire import PayloadReader, encode_varint
from edgefl.core.errors import CodecError
from edgefl.core.types import Array

MAX_MAGNITUDE = 2.0**127
_MIN_EXPONENT, _NUM_EXPONENTS = -149, 277
_FRACTION_BITS = 23
_EXPONENT_BIAS = 127
_FRACTION_MASK = 2**_FRACTION_BITS - 1
# A chunk's numbers stay in the cache.
_CHUNK = 2**15


class NaturalCompression:
    """Sends signs and exponents: |v| becomes 2**e with chance 2 - |v| / 2**e, else 2**(e + 1); zeros stay zeros.

    The expected squared error is at most an eighth of the squared norm. Written are the mask of non-zero values,
    their signs, the largest exponent, and the distance of the others below it.
    """

    kind: ClassVar[StageKind] = StageKind.VALUES
    is_finite_only: ClassVar[bool] = True
    codes_indices: ClassVar[bool] = True
    is_unbiased = True
    is_contraction = True

    @classmethod
    def parse(cls, argument: str) -> Self:
        require_no_argument("natural", argument)
        return cls()

    def error_bound(self, values: Array) -> Array:
        return np.abs(values, dtype=np.float64)

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
    for start in range(0, values.size, _CHUNK):
        bits = values[start : start + _CHUNK].view(np.uint32) & 0x7FFFFFFF
        exponents[start : start + _CHUNK] = _round_chunk(bits, rng)
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

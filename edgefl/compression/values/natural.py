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

from edgefl.compression.coding.indices import read_mask, write_mask
from edgefl.compression.coding.labels import read_labels, write_labels
from edgefl.compression.coding.masks import looked_up, picked, put
from edgefl.compression.coding.rice import negate, pack_bits, read_narrow_bits
from edgefl.compression.stages import StageKind, largest_magnitude, no_argument
from edgefl.compression.wire import Reader, varint
from edgefl.errors import CodecError
from edgefl.types import Array

LARGEST = 2.0**127
_LOWEST, _NUM_EXPONENTS = -149, 277
_FRACTION_BITS = 23
_BIAS = 127
_FRACTION = 2**_FRACTION_BITS - 1
# The steps of a chunk find its numbers in the cache.
_CHUNK = 2**15


class Natural:
    """Sends signs and exponents: |v| becomes 2**e with chance 2 - |v| / 2**e, else 2**(e + 1); zeros stay zeros.

    The expected squared error is at most an eighth of the squared norm. Written are which values are not zero, their
    signs, the largest exponent, and by how much the others are below it.
    """

    kind: ClassVar[StageKind] = StageKind.VALUES
    refuses_non_finite: ClassVar[bool] = True
    codes_indices: ClassVar[bool] = True
    is_unbiased = True
    is_contraction = True

    @classmethod
    def parse(cls, argument: str) -> Self:
        no_argument("natural", argument)
        return cls()

    def error_bound(self, values: Array) -> Array:
        return np.abs(values, dtype=np.float64)

    def encode(self, values: Array, rng: Generator) -> Iterator[Array]:
        largest = largest_magnitude("natural", values)
        if largest > LARGEST:
            raise CodecError(f"natural carries magnitudes up to {LARGEST:.6g}, got {largest:.6g}: use dense")
        flat = np.ascontiguousarray(values, dtype=np.float32).reshape(-1)
        is_there = flat != 0
        yield from write_mask(is_there)
        found = flat if np.all(is_there) else picked(flat, is_there)
        if not found.size:
            return
        yield pack_bits(found < 0, 1)
        exponents = rounded_exponents(found, rng)
        top = int(exponents.max())
        yield varint(top)
        yield from write_labels(np.subtract(np.int16(top), exponents, out=exponents))

    @staticmethod
    def decode(reader: Reader, size: int) -> Array:
        is_there = read_mask(reader, size)
        count = int(np.count_nonzero(is_there))
        if not count:
            return np.zeros(size, dtype=np.float32)
        is_negative = read_narrow_bits(reader, count, 1)
        top = reader.varint(_NUM_EXPONENTS - 1)
        found = looked_up(_powers()[: top + 1][::-1].copy(), read_labels(reader, count, top))
        negate(found, is_negative)
        if count == size:
            return found
        values = np.zeros(size, dtype=np.float32)
        put(found, is_there, values)
        return values


def rounded_exponents(values: Array, rng: Generator) -> Array:
    """Returns the exponents of [n] float32 values, none of them zero, rounded at random, each plus 149: [n] int16."""
    exponents = np.empty(values.size, dtype=np.int16)
    for begin in range(0, values.size, _CHUNK):
        bits = values[begin : begin + _CHUNK].view(np.uint32) & 0x7FFFFFFF
        exponents[begin : begin + _CHUNK] = _rounded(bits, rng)
    return exponents


def _rounded(bits: Array, rng: Generator) -> Array:
    # A denormal number is a fraction without a leading one: as a whole number it has the exponent that is looked for.
    is_denormal = bits < 1 << _FRACTION_BITS
    if np.any(is_denormal):
        as_normal = bits[is_denormal].astype(np.float32).view(np.uint32)
        bits[is_denormal] = as_normal
    offsets = np.where(is_denormal, np.int16(-_BIAS), np.int16(-_BIAS - _LOWEST))
    # The chance is the fraction itself, of 23 bits; a draw has 24, so rounding up has exactly that chance.
    up = rng.random(bits.size, dtype=np.float32) < (bits & _FRACTION).astype(np.float32) * np.float32(2.0**-23)
    exponents: Array = (bits >> _FRACTION_BITS).astype(np.int16) + offsets + up
    return exponents


@cache
def _powers() -> Array:
    """Returns 2**-149 to 2**127."""
    return np.ldexp(np.float32(1), np.arange(_LOWEST, _LOWEST + _NUM_EXPONENTS)).astype(np.float32)

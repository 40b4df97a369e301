"""Levels times one scale, found by turns: `alternating`, Parallel-SGD's own quantisers."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import ClassVar, Self

import numpy as np
from numpy.random import Generator

from edgefl.compression.chunked_indexing import gather, iterate_chunks
from edgefl.compression.entropy.golomb import negate_where
from edgefl.compression.entropy.levels import read_levels, write_levels
from edgefl.compression.stages import (
    FLOAT32,
    UNEXPECTED_SCALE,
    FiniteValueStage,
    compute_max_magnitude,
    parse_int_argument,
    read_finite,
)
from edgefl.compression.wire import PayloadReader
from edgefl.core.errors import CodecError
from edgefl.core.types import Array

MIN_BITS, MAX_BITS = 2, 8
_RANDOM, _TANGENT = "random", "tan"
_TERNARY_START, _NUM_REFINEMENTS = 0.7, 3
_MAX_FLOAT32 = float(np.finfo(np.float32).max)


@dataclass(frozen=True, slots=True)
class Alternating(FiniteValueStage):
    """`alternating:b[:random][:tan]`: each tensor as a scale times signed levels, 2**(b - 1) - 1 for each sign.

    By turns the levels b are those nearest to x / a, and the scale a = <b, x> / <b, b> is the best for these levels.
    Levels are whole numbers, or with `tan` 1 / tan(k pi / (4 m)) for k = m to 1: m levels that are the farther apart
    the larger they are, so that one large value does not spoil the small ones. What is beyond the largest level takes
    that.

    With `random` a value takes one of the two levels beside it, so that the mean of many draws is the clipped value:
    the expected squared error of a value between the levels l and u is (u a - |x|) (|x| - l a).
    `alternating:2:random` is Parallel-SGD's TQN, and more bits are what a worker of its LAQ sends.

    Written are the bits, 1 for `tan`, the scale as float32, and the levels.

    Source: Xu et al., Alternating Multi-bit Quantization for Recurrent Neural Networks, ICLR 2018, and Hou, Yao and
    Kwok, Loss-aware Binarization of Deep Networks, ICLR 2017, for the turns; the tangents are Parallel-SGD's.
    Differs: the first scale is the best of three after one turn, from what suits a normal distribution to what clips
    nothing, and not 0.7 whatever the size of the values.

    Why it is a contraction unless random: zero is a level, so no error is larger than its value; and a is a mean of
    the values over their levels, so at most the largest value, which therefore never takes the level zero.
    """

    codes_indices: ClassVar[bool] = True
    is_unbiased: ClassVar[bool] = False

    bits: int
    is_random: bool = False
    has_tangents: bool = False

    @classmethod
    def parse(cls, argument: str) -> Self:
        bits, *options = argument.split(":")
        unknown = [option for option in options if option not in (_RANDOM, _TANGENT)]
        if unknown or len(set(options)) < len(options):
            raise CodecError(
                f"codec stage 'alternating' takes {_RANDOM} and {_TANGENT}, once each, got alternating:{argument:.40}"
            )
        return cls(
            bits=parse_int_argument("alternating", bits, MIN_BITS, MAX_BITS),
            is_random=_RANDOM in options,
            has_tangents=_TANGENT in options,
        )

    @property
    def is_contraction(self) -> bool:
        return not self.is_random

    def encode(self, values: Array, rng: Generator) -> Iterator[Array]:
        largest = compute_max_magnitude("alternating", values)
        flat, table = values.reshape(-1), make_level_table(self.bits, self.has_tangents)
        numbers, scale = np.zeros(flat.size, dtype=np.int8), 0.0
        if largest:
            scale = self.find_scale(flat, largest, table, rng)
        sent = np.float32(min(scale, _MAX_FLOAT32))
        require_float32_range("alternating", float(sent) * table[-1])
        if sent:
            for chunk in iterate_chunks(flat.size):
                numbers[chunk] = self.assign_levels(flat[chunk], float(sent), table, rng)
        yield np.array([self.bits, self.has_tangents], dtype=np.uint8)
        yield np.array([sent], dtype=FLOAT32)
        yield from write_levels(numbers, len(table) - 1)

    @staticmethod
    def decode(reader: PayloadReader, size: int) -> Array:
        bits, has_tangents = reader.read_bytes(2)
        if not (MIN_BITS <= bits <= MAX_BITS and has_tangents <= 1):
            raise CodecError(f"payload holds alternating levels of {bits} bits and kind {has_tangents}")
        scale = read_finite(reader, 1, UNEXPECTED_SCALE)[0]
        table = make_level_table(bits, bool(has_tangents))
        if abs(float(scale)) * table[-1] > _MAX_FLOAT32:
            raise CodecError(f"payload holds the scale {scale} of levels up to {table[-1]:.6g}, beyond float32")
        levels = read_levels(reader, size, len(table) - 1)
        if not has_tangents:
            levels *= scale
            return levels
        values = gather((table * float(scale)).astype(np.float32), np.abs(levels).astype(np.uint8))
        negate_where(values, (levels < 0).view(np.uint8))
        return values

    def find_scale(
        self, flat: Array, largest: float, table: Array, rng: Generator, weights: Array | None = None
    ) -> float:
        """Returns the scale of the values, the largest of which is not zero; random ternary levels take one turn.

        Args:
            flat: [n] values.
            largest: the largest magnitude.
            table: of `make_level_table`.
            rng: for levels at random.
            weights: [n] by which the squared error of each value counts, at least 0, not all zero; None: all alike.
        """
        first = _compute_first_scale(flat, table, weights)
        if self.is_random and len(table) == 2:
            return self._refine_scale(flat, first, table, rng, weights)[1]
        last = largest / float(table[-1])
        _, scale = max(
            self._refine_scale(flat, start, table, rng, weights) for start in (first, math.sqrt(first * last), last)
        )
        for _ in range(_NUM_REFINEMENTS - 1):
            scale = self._refine_scale(flat, scale, table, rng, weights)[1]
        return scale

    def _refine_scale(
        self, flat: Array, scale: float, table: Array, rng: Generator, weights: Array | None
    ) -> tuple[float, float]:
        """Returns by how much a scale lowers the squared error from that of zeros, and the scale.

        It is the best one for the levels by another scale; that one if all levels are zero.
        """
        product = square = 0.0
        for chunk in iterate_chunks(flat.size):
            levels = table[np.abs(self.assign_levels(flat[chunk], scale, table, rng))]
            weighted = levels if weights is None else levels * weights[chunk]
            product += float(weighted @ np.abs(flat[chunk], dtype=np.float64))
            square += float(weighted @ levels)
        return (product**2 / square, product / square) if product else (0.0, scale)

    def assign_levels(self, values: Array, scale: float, table: Array, rng: Generator) -> Array:
        """Returns the signed places of [n] values in the table of levels, as int8."""
        ratios = np.abs(values, dtype=np.float64)
        ratios /= scale
        np.minimum(ratios, table[-1], out=ratios)
        if self.is_random:
            below = np.minimum(np.searchsorted(table, ratios, side="right") - 1, len(table) - 2)
            chances = (ratios - table[below]) / np.diff(table)[below]
            places = below + (rng.random(values.size) < chances)
        else:
            places = np.searchsorted((table[1:] + table[:-1]) / 2, ratios)
        signed: Array = np.copysign(places, values).astype(np.int8)
        return signed


@cache
def make_level_table(bits: int, has_tangents: bool) -> Array:
    """Returns zero and the positive levels, ascending, float64; not to be written to."""
    count = 2 ** (bits - 1) - 1
    steps = np.arange(count, 0, -1)
    positive = 1 / np.tan(steps * np.pi / (4 * count)) if has_tangents else np.arange(1, count + 1)
    table = np.concatenate([[0.0], positive])
    table.flags.writeable = False
    return table


def require_float32_range(stage_name: str, largest: float) -> None:
    """Rejects levels times a scale that float32 does not hold.

    Raises:
        CodecError: it does not.
    """
    if largest > _MAX_FLOAT32:
        raise CodecError(f"{stage_name} makes numbers up to {largest:.6g}, beyond float32: use dense")


def _compute_first_scale(flat: Array, table: Array, weights: Array | None) -> float:
    """Returns a scale whose largest level is where that of a normal distribution should be, about."""
    square, total = 0.0, float(flat.size) if weights is None else float(weights.sum(dtype=np.float64))
    for chunk in iterate_chunks(flat.size):
        squares = np.square(flat[chunk], dtype=np.float64)
        square += float(squares.sum() if weights is None else squares @ weights[chunk])
    factor = _TERNARY_START if len(table) == 2 else 1.2 * math.sqrt(2 * math.log(len(table)))
    return factor * math.sqrt(square / total) / float(table[-1])

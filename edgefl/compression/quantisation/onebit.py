"""`onebit`: one bit a value, and for each side of zero the mean of the values there.

Source: Seide et al., 1-Bit Stochastic Gradient Descent, INTERSPEECH 2014, section 3; biased, and meant for use behind
error feedback, which is from that paper too. Not the same as `sign`, which has one scale for both sides: two means
are the best that one bit can do, since tensors are seldom symmetric about zero (biases, what follows a ReLU), and
buckets follow the sizes of values within a tensor. `sign` is for majority votes, where only the sign counts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Self

import numpy as np
from numpy.random import Generator

from edgefl.compression.entropy.golomb_rice import pack_bits, read_binary_values, read_narrow_bits
from edgefl.compression.stages import StageKind, compute_max_magnitude, parse_int_argument
from edgefl.compression.wire import PayloadReader, encode_varint
from edgefl.core.errors import CodecError
from edgefl.core.types import Array

_FLOAT32 = np.dtype("<f4")
_MAX_BUCKET = 2**20
# A chunk's numbers stay in the cache.
_CHUNK = 2**15


@dataclass(frozen=True, slots=True)
class OneBitSgd:
    """One bit a value; zero counts as positive. `onebit:512`: two means per 512 values, else per tensor."""

    kind: ClassVar[StageKind] = StageKind.VALUES
    is_finite_only: ClassVar[bool] = True
    is_unbiased: ClassVar[bool] = False
    is_contraction: ClassVar[bool] = True

    bucket: int = 0

    @classmethod
    def parse(cls, argument: str) -> Self:
        return cls(bucket=parse_int_argument("onebit", argument, 2, _MAX_BUCKET) if argument else 0)

    def error_bound(self, values: Array) -> Array:
        flat = values.reshape(-1)
        means = _compute_means(flat, self.bucket).astype(np.float64)
        decoded = np.repeat(means, self.bucket or max(1, flat.size), axis=0)[: flat.size]
        nearest = np.where(flat < 0, decoded[:, 1], decoded[:, 0])
        bounds: Array = (np.abs(flat - nearest) + np.abs(nearest) * 2.0**-20 + 2.0**-149).reshape(values.shape)
        return bounds

    def encode(self, values: Array, rng: Generator) -> Iterator[Array]:  # noqa: ARG002 interface of value stages
        compute_max_magnitude("onebit", values)
        flat = values.reshape(-1)
        yield encode_varint(self.bucket)
        yield _compute_means(flat, self.bucket)
        yield pack_bits(flat < 0, 1)

    @staticmethod
    def decode(reader: PayloadReader, size: int) -> Array:
        bucket = reader.read_varint(_MAX_BUCKET)
        means = reader.read_array(_FLOAT32, 2 * (max(1, -(-size // bucket)) if bucket else 1)).reshape(-1, 2)
        if not np.all(np.isfinite(means)):
            raise CodecError("payload holds a mean that is not finite")
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
    step = max(1, _CHUNK // max(1, out.shape[1]))
    for start in range(0, len(out), step):
        rows = slice(start, start + step)
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
    means: Array = (sums / np.maximum(counts, 1)).astype(_FLOAT32)
    return means

"""One bit a value: `sign` with one scale for both sides of zero, `onebit` with a mean for each side.

Both are biased, so best behind error feedback. With one scale an update is a vote and its weight, as counted by the
strategy `signsgd`. Two means are the best that one bit can do, since tensors are seldom symmetric about zero (biases,
what follows a ReLU), and buckets follow the sizes of values within a tensor.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Self

import numpy as np
from numpy.random import Generator

from edgefl.compression.chunked_indexing import CHUNK, iterate_chunks
from edgefl.compression.entropy.golomb import pack_bits, read_binary_values, read_narrow_bits
from edgefl.compression.stages import (
    FLOAT32,
    UNEXPECTED_SCALE,
    StageKind,
    StageWithoutArgument,
    compute_max_magnitude,
    parse_int_argument,
    read_finite,
)
from edgefl.compression.wire import PayloadReader, encode_varint
from edgefl.core.types import Array


class ScaledSign(StageWithoutArgument):
    """Signs and one scale; zero counts as positive: with one bit there is no third case.

    Source: Karimireddy et al., Error Feedback Fixes SignSGD and other Gradient Compression Schemes, ICML 2019.
    """

    name: ClassVar[str] = "sign"
    kind: ClassVar[StageKind] = StageKind.VALUES
    is_finite_only: ClassVar[bool] = True
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


_MAX_BUCKET = 2**20


@dataclass(frozen=True, slots=True)
class OneBitSgd:
    """One bit a value; zero counts as positive. `onebit:512`: two means per 512 values, else per tensor.

    Source: Seide et al., 1-Bit Stochastic Gradient Descent, INTERSPEECH 2014, section 3; error feedback is from that
    paper too.
    """

    kind: ClassVar[StageKind] = StageKind.VALUES
    is_finite_only: ClassVar[bool] = True
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

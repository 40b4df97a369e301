"""`qsgd:b`: each value rounded at random to one of 2**b - 1 levels of its bucket's norm; unbiased.

Source: Alistarh et al., QSGD: Communication-Efficient SGD via Gradient Quantization and Encoding, NeurIPS 2017,
section 3. Differs from the paper: levels are coded as in `levels.py` and not with Elias codes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Self

import numpy as np
from numpy.random import Generator

from edgefl.compression.entropy.levels import read_levels, write_levels
from edgefl.compression.stages import StageKind, compute_max_magnitude, parse_int_argument
from edgefl.compression.wire import PayloadReader, encode_varint
from edgefl.core.errors import CodecError
from edgefl.core.types import Array

DEFAULT_BUCKET = 512
_MAX_BITS = 8
_MAX_BUCKET = 2**20
# A chunk's numbers stay in the cache.
_CHUNK = 2**15
_FLOAT32 = np.dtype("<f4")
_MAX_FLOAT32 = np.finfo(np.float32).max


@dataclass(frozen=True, slots=True)
class Qsgd:
    """Buckets of `bucket` values in the order of the tensor; the last one may be shorter.

    The expected squared error of a bucket of n values is at most min(n / L**2, sqrt(n) / L) times its squared norm,
    with L = 2**bits - 1.
    """

    kind: ClassVar[StageKind] = StageKind.VALUES
    is_finite_only: ClassVar[bool] = True
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

    def error_bound(self, values: Array) -> Array:
        """Returns one level of each value's bucket: random rounding moves a value by less than that."""
        norms = _compute_norms(_split_buckets(values.reshape(-1), max(1, min(self.bucket, values.size)))).astype(
            np.float64
        )
        step = np.repeat(norms, self.bucket)[: values.size] / (2**self.bits - 1)
        bounds: Array = (step * (1 + 2.0**-20) + 2.0**-149).reshape(values.shape)
        return bounds

    def encode(self, values: Array, rng: Generator) -> Iterator[Array]:
        compute_max_magnitude("qsgd", values)
        highest = 2**self.bits - 1
        flat, width = values.reshape(-1), max(1, min(self.bucket, values.size))
        norms = np.empty(-(-flat.size // width), dtype=np.float32)
        levels = np.empty((norms.size, width), dtype=np.int8 if highest < 2**7 else np.int16)
        step = max(1, _CHUNK // width)
        for start in range(0, norms.size, step):
            rows, buckets = (
                slice(start, start + step),
                _split_buckets(flat[start * width : (start + step) * width], width),
            )
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
        norms = reader.read_array(_FLOAT32, -(-size // bucket))
        if not np.all(np.isfinite(norms)):
            raise CodecError("payload holds a qsgd norm that is not finite")
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

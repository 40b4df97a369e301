"""Values as integers from -127 to 127 times a scale, per tensor (`int8`) or per row (`int8:channel`)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Self

import numpy as np
from numpy.random import Generator

from edgefl.compression.stages import StageKind, compute_max_magnitude
from edgefl.compression.wire import PayloadReader, encode_varint
from edgefl.core.errors import CodecError
from edgefl.core.types import Array

_FLOAT32 = np.dtype("<f4")
_INT8 = np.dtype(np.int8)
_MAX_STEP = np.float32(127)
# Two roundings of float32 come on top of half a step.
_RELATIVE_BOUND = 0.5 / 127 + 2.0**-22


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

    def error_bound(self, values: Array) -> Array:
        rows = self._split_rows(values)
        bounds = np.abs(rows, dtype=np.float64).max(axis=1, initial=0, keepdims=True) * _RELATIVE_BOUND + 2.0**-149
        return np.broadcast_to(bounds, rows.shape).reshape(values.shape)

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
        scales = reader.read_array(_FLOAT32, num_scales)
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

"""`sign`: one bit a value, with the mean magnitude as their scale; biased, so best behind error feedback.

The scale is one for both sides of zero, so that what travels is a vote and its weight: what the strategy `signsgd`
counts. Where the values are to come back as near as one bit can bring them, `onebit` has two means.

Source: Karimireddy et al., Error Feedback Fixes SignSGD and other Gradient Compression Schemes, ICML 2019.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Self

import numpy as np
from numpy.random import Generator

from edgefl.compression.coding.rice import pack_bits, read_either
from edgefl.compression.stages import StageKind, largest_magnitude, no_argument
from edgefl.compression.wire import Reader
from edgefl.errors import CodecError
from edgefl.types import Array

_FLOAT32 = np.dtype("<f4")


class Sign:
    """A zero counts as positive: with one bit there is no third case."""

    kind: ClassVar[StageKind] = StageKind.VALUES
    refuses_non_finite: ClassVar[bool] = True
    is_unbiased = False
    is_contraction = True

    @classmethod
    def parse(cls, argument: str) -> Self:
        no_argument("sign", argument)
        return cls()

    def error_bound(self, values: Array) -> Array:
        magnitudes: Array = np.abs(values, dtype=np.float64)
        scale = float(magnitudes.mean()) if values.size else 0.0
        magnitudes -= scale
        return np.abs(magnitudes) + scale * 2.0**-20 + 2.0**-149

    def encode(self, values: Array, rng: Generator) -> Iterator[Array]:  # noqa: ARG002 the seam of all value stages
        largest_magnitude("sign", values)
        scale = np.abs(values).mean(dtype=np.float64) if values.size else 0.0
        yield np.array([scale], dtype=_FLOAT32)
        yield pack_bits(values.reshape(-1) < 0, 1)

    @staticmethod
    def decode(reader: Reader, size: int) -> Array:
        scale = reader.array(_FLOAT32, 1)
        if not np.all(np.isfinite(scale)):
            raise CodecError(f"payload holds the scale {scale[0]}, expected a finite number")
        return read_either(reader, size, scale[0], -scale[0])

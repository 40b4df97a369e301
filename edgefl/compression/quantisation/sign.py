"""`sign`: one bit a value, with the mean magnitude as their scale; biased, so best behind error feedback.

Both sides of zero share one scale, so that an update is a vote and its weight, as counted by the strategy `signsgd`.
For the best approximation with one bit use `onebit`, which has two means.

Source: Karimireddy et al., Error Feedback Fixes SignSGD and other Gradient Compression Schemes, ICML 2019.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Self

import numpy as np
from numpy.random import Generator

from edgefl.compression.entropy.golomb_rice import pack_bits, read_binary_values
from edgefl.compression.stages import StageKind, compute_max_magnitude, require_no_argument
from edgefl.compression.wire import PayloadReader
from edgefl.core.errors import CodecError
from edgefl.core.types import Array

_FLOAT32 = np.dtype("<f4")


class ScaledSign:
    """Signs and one scale; zero counts as positive: with one bit there is no third case."""

    kind: ClassVar[StageKind] = StageKind.VALUES
    is_finite_only: ClassVar[bool] = True
    is_unbiased = False
    is_contraction = True

    @classmethod
    def parse(cls, argument: str) -> Self:
        require_no_argument("sign", argument)
        return cls()

    def error_bound(self, values: Array) -> Array:
        magnitudes: Array = np.abs(values, dtype=np.float64)
        scale = float(magnitudes.mean()) if values.size else 0.0
        magnitudes -= scale
        return np.abs(magnitudes) + scale * 2.0**-20 + 2.0**-149

    def encode(self, values: Array, rng: Generator) -> Iterator[Array]:  # noqa: ARG002 interface of value stages
        compute_max_magnitude("sign", values)
        scale = np.abs(values).mean(dtype=np.float64) if values.size else 0.0
        yield np.array([scale], dtype=_FLOAT32)
        yield pack_bits(values.reshape(-1) < 0, 1)

    @staticmethod
    def decode(reader: PayloadReader, size: int) -> Array:
        scale = reader.read_array(_FLOAT32, 1)
        if not np.all(np.isfinite(scale)):
            raise CodecError(f"payload holds the scale {scale[0]}, expected a finite number")
        return read_binary_values(reader, size, scale[0], -scale[0])

"""`terngrad`: random rounding of each value to -s, 0 or s, the largest magnitude; unbiased but for clipping.

Source: Wen et al., TernGrad: Ternary Gradients to Reduce Communication in Distributed Deep Learning, NeurIPS 2017,
section 3. Differs from the paper: the deviation that values are clipped at is taken about zero, or a tensor of equal
numbers would vanish; and s is each device's own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Self

import numpy as np
from numpy.random import Generator

from edgefl.compression.entropy.levels import read_levels, write_levels
from edgefl.compression.stages import StageKind, compute_max_magnitude
from edgefl.compression.wire import PayloadReader
from edgefl.core.errors import CodecError
from edgefl.core.types import Array

DEFAULT_CLIP = 2.5
_CHUNK = 2**15
_FLOAT32 = np.dtype("<f4")


@dataclass(frozen=True, slots=True)
class TernGrad:
    """Clips each tensor to `clip` standard deviations first; `terngrad:inf` clips nothing and is unbiased.

    Without clipping the expected squared error is s * (sum of magnitudes) - (squared norm).
    """

    kind: ClassVar[StageKind] = StageKind.VALUES
    is_finite_only: ClassVar[bool] = True
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

    def error_bound(self, values: Array) -> Array:
        scale = float(self._compute_scale(values))
        return np.maximum(np.abs(values, dtype=np.float64), scale) * (1 + 2.0**-20)

    def encode(self, values: Array, rng: Generator) -> Iterator[Array]:
        scale = self._compute_scale(values)
        flat = values.reshape(-1)
        levels = np.empty(flat.size, dtype=np.int8)
        for start in range(0, flat.size, _CHUNK):
            _sample_levels(flat[start : start + _CHUNK], scale, rng, levels[start : start + _CHUNK])
        yield np.array([scale], dtype=_FLOAT32)
        yield from write_levels(levels, 1)

    @staticmethod
    def decode(reader: PayloadReader, size: int) -> Array:
        scale = reader.read_array(_FLOAT32, 1)
        if not np.all(np.isfinite(scale)):
            raise CodecError(f"payload holds the scale {scale[0]}, expected a finite number")
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

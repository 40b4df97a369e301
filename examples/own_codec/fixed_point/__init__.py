"""A codec stage: numbers as whole multiples of a step, two bytes each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Self

import numpy as np
from numpy.random import Generator

from edgefl.compression.stages import StageKind, compute_max_magnitude
from edgefl.compression.wire import PayloadReader
from edgefl.core.errors import CodecError
from edgefl.core.types import Array

LARGEST = 32767


@dataclass(frozen=True, slots=True)
class FixedPoint:
    """Rounds to the nearest whole multiple of `step`; what is too large becomes the largest there is."""

    kind: ClassVar[StageKind] = StageKind.VALUES
    is_unbiased: ClassVar[bool] = False
    is_contraction: ClassVar[bool] = True  # the error of a value is never larger than the value: works behind ef
    is_finite_only: ClassVar[bool] = True

    step: float

    @classmethod
    def parse(cls, argument: str) -> Self:
        try:
            step = float(argument)
        except ValueError:
            step = 0.0
        if not 1e-30 < step < 1e30:
            raise CodecError(f"codec stage 'fixed' needs a step above 0, got fixed:{argument}")
        return cls(step=float(np.float32(step)))  # as it travels

    def encode(self, values: Array, rng: Generator) -> Iterator[Array]:
        compute_max_magnitude("fixed", values)
        yield np.array([self.step], dtype="<f4")
        multiples = np.rint(values.astype(np.float64) / self.step)
        yield np.clip(multiples, -LARGEST, LARGEST).astype("<i2")

    @staticmethod
    def decode(reader: PayloadReader, size: int) -> Array:
        step = reader.read_array(np.dtype("<f4"), 1)
        if not np.isfinite(step).all():
            raise CodecError("payload holds a step that is not finite")
        return reader.read_array(np.dtype("<i2"), size).astype(np.float32) * step

"""Levels times a scale that is the more exact the more the loss depends on an entry: `laq`, Parallel-SGD's LAQ."""

from __future__ import annotations

import math
from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass
from typing import ClassVar, Self

import numpy as np
from numpy.random import Generator

from edgefl.compression.chunked_indexing import iterate_chunks
from edgefl.compression.entropy.levels import read_levels, write_levels
from edgefl.compression.quantisation.alternating import (
    MAX_BITS,
    MIN_BITS,
    Alternating,
    make_level_table,
    require_float32_range,
)
from edgefl.compression.stages import (
    UNEXPECTED_SCALE,
    EachTensorStage,
    ValueStage,
    compute_max_magnitude,
    encode_lossy_tensors,
    parse_int_argument,
)
from edgefl.compression.wire import PayloadReader, to_little_endian
from edgefl.core.errors import CodecError
from edgefl.core.types import Array, ModelSpec, Tensors, TensorSpec

DECAY = 0.9
"""Share of the old second moment that is kept, as in Parallel-SGD."""


@dataclass(frozen=True, slots=True)
class LossAware(EachTensorStage):
    """`laq:b`: each float32 parameter as a scale times the nearest of 2**(b - 1) - 1 levels for each sign.

    Levels and scale are found by turns as by `alternating`, but the scale is a = <b * x, d> / <b * b, d>: the best
    one where the squared error of an entry counts by d = sqrt(v), the diagonal by which Adam estimates the curvature
    of the loss. v <- 0.9 v + 0.1 x * x, entry by entry, is kept with the residual by the error feedback, not sent.

    Written for each such parameter: the bits, the scale by the value stage, and the levels.

    Source: Hou and Kwok, Loss-aware Weight Quantization of Deep Networks, ICLR 2018, and Parallel-SGD's LAQ. Differs:
    there the server keeps v and quantises the weights that it replies; here the device does so with what it sends.
    And levels are the nearest ones, since those of random draws are no contraction.

    Why it is a contraction: as `alternating`; a is a mean of values over their levels with these weights, too, so
    the largest value never takes the level zero.
    """

    is_unbiased: ClassVar[bool] = False
    is_contraction: ClassVar[bool] = True
    remembers: ClassVar[bool] = True
    codes_indices: ClassVar[bool] = True

    bits: int

    @classmethod
    def parse(cls, argument: str) -> Self:
        return cls(bits=parse_int_argument("laq", argument, MIN_BITS, MAX_BITS))

    def encode(
        self,
        tensors: Tensors,
        shapes: ModelSpec,
        values: ValueStage,
        rng: Generator,
        *,
        memory: MutableMapping[str, Array] | None = None,
    ) -> Iterator[Array]:
        roots = {} if memory is None else memory

        def encode_tensor(spec: TensorSpec, array: Array) -> Iterator[Array]:
            largest, key = compute_max_magnitude("laq", array), f"laq/{spec.name}"
            flat = array.reshape(-1)
            roots[key] = update_root(roots.get(key), flat)
            return self._write_levels(flat, largest, roots[key], values, rng)

        return encode_lossy_tensors(tensors, shapes, encode_tensor)

    @staticmethod
    def decode_tensor(reader: PayloadReader, spec: TensorSpec, values: type[ValueStage]) -> Array:
        bits = reader.read_bytes(1)[0]
        if not MIN_BITS <= bits <= MAX_BITS:
            raise CodecError(f"payload holds loss-aware levels of {bits} bits, {MIN_BITS} to {MAX_BITS} are read")
        table = make_level_table(bits, False)
        scale = values.decode(reader, 1)[0]
        if not np.isfinite(scale):
            raise CodecError(f"payload holds {UNEXPECTED_SCALE.format(scale)}")
        require_float32_range("laq", abs(float(scale)) * table[-1])
        levels = read_levels(reader, spec.size, len(table) - 1)
        levels *= scale
        return levels.reshape(spec.shape)

    def _write_levels(
        self, flat: Array, largest: float, root: Array, values: ValueStage, rng: Generator
    ) -> Iterator[Array]:
        quantiser, table = Alternating(self.bits), make_level_table(self.bits, False)
        # The squares of the smallest numbers are too small for single precision: then all entries count alike.
        weights = root if root.any() else None
        scale = quantiser.find_scale(flat, largest, table, rng, weights) if largest else 0.0
        require_float32_range("laq", scale * table[-1])
        parts = list(values.encode(np.array([scale], dtype=np.float32), rng))
        body = b"".join(to_little_endian(part) for part in parts)
        # Levels go by the scale that the receiver has.
        sent = float(values.decode(PayloadReader(memoryview(body)), 1)[0])
        require_float32_range("laq", sent * table[-1])
        numbers = np.zeros(flat.size, dtype=np.int8)
        for chunk in iterate_chunks(flat.size if sent else 0):
            numbers[chunk] = quantiser.assign_levels(flat[chunk], sent, table, rng)
        yield np.array([self.bits], dtype=np.uint8)
        yield from parts
        yield from write_levels(numbers, len(table) - 1)


def update_root(previous: Array | None, values: Array) -> Array:
    """Returns sqrt(v), [n] float32, after v <- 0.9 v + 0.1 x * x; one that does not fit stands for v = 0."""
    new = values * np.float32(math.sqrt(1 - DECAY))
    if previous is None or previous.shape != values.shape or previous.dtype != np.float32:
        return np.abs(new, out=new)
    old = previous * np.float32(math.sqrt(DECAY))
    # Without squares, which single precision does not hold.
    return np.hypot(old, new, out=old)

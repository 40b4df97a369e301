"""`atomo:s`: entries of each float32 parameter at random, the larger the likelier; unbiased.

Of the unbiased codecs that keep s entries of a tensor on average it has the least variance. An entry that chance
has chosen decodes to plus or minus the level of its tensor, so it takes a place and a sign; entries above the level
always travel, and their values pass the value stage.

Written for each such parameter: the places of all kept entries; which of them are certain, as places among them; the
level and the signs of the others, if there are any; the values of the certain ones, if there are any.

Source: Wang et al., ATOMO: Communication-efficient Learning via Atomic Sparsification, NeurIPS 2018, section 3.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Self

import numpy as np
from numpy.random import Generator

from edgefl.compression.coding.indices import read_indices, write_indices
from edgefl.compression.coding.rice import pack_bits, read_bits
from edgefl.compression.stages import (
    StageKind,
    ValueStage,
    exact_array,
    is_lossy,
    largest_magnitude,
    naming,
    read_exact,
)
from edgefl.compression.tensors.atomo_rule import draw, parse_budget, single_level
from edgefl.compression.wire import Reader
from edgefl.errors import CodecError
from edgefl.types import Array, Shapes, SparseTensor, Tensor, Tensors

_FLOAT32 = np.dtype("<f4")


@dataclass(frozen=True, slots=True)
class Atomo:
    """A budget below 1 is the share of a tensor's entries expected to travel, at least one, and else their number."""

    kind: ClassVar[StageKind] = StageKind.TENSORS
    is_unbiased: ClassVar[bool] = True
    is_contraction: ClassVar[bool] = False
    codes_indices: ClassVar[bool] = True

    budget: float

    @classmethod
    def parse(cls, argument: str) -> Self:
        return cls(budget=parse_budget("atomo", argument))

    def encode(self, tensors: Tensors, shapes: Shapes, values: ValueStage, rng: Generator) -> Iterator[Array]:
        for spec in shapes:
            array = exact_array(spec, tensors[spec.name])
            if not is_lossy(spec):
                yield array
                continue
            with naming(spec):
                largest_magnitude("atomo", array)
                budget = self.budget if self.budget >= 1 else max(1.0, self.budget * spec.size)
                yield from write_entries(array.reshape(-1), budget, values, rng)

    @staticmethod
    def decode(reader: Reader, shapes: Shapes, values: type[ValueStage]) -> dict[str, Tensor]:
        decoded: dict[str, Tensor] = {}
        for spec in shapes:
            if is_lossy(spec):
                indices, kept = read_entries(reader, spec.size, values)
                decoded[spec.name] = SparseTensor(indices=indices, values=kept, shape=spec.shape)
            else:
                decoded[spec.name] = read_exact(reader, spec, spec.size).reshape(spec.shape)
        return decoded


def write_entries(flat: Array, budget: float, values: ValueStage, rng: Generator) -> Iterator[Array]:
    """Yields the arrays to write for [n] finite float32 entries of which `budget` are kept on average.

    Raises:
        CodecError: the level is beyond float32, or the value stage cannot carry a value.
    """
    magnitudes = np.abs(flat)
    level = single_level(magnitudes, budget)
    certain, chosen = draw(magnitudes, float(level), rng)
    kept = np.sort(np.concatenate([certain, chosen]))
    yield from write_indices(kept, flat.size)
    if kept.size:
        yield from write_indices(np.searchsorted(kept, certain), kept.size)
    if chosen.size:
        yield np.array([level], dtype=_FLOAT32)
        yield pack_bits(flat[chosen] < 0, 1)
    if certain.size:
        yield from values.encode(flat[certain], rng)


def read_entries(reader: Reader, size: int, values: type[ValueStage]) -> tuple[Array, Array]:
    """Returns the ascending indices below `size` and the values that `write_entries` wrote.

    Raises:
        CodecError: damaged.
    """
    kept = read_indices(reader, size)
    certain = read_indices(reader, kept.size) if kept.size else kept
    is_chosen = np.ones(kept.size, dtype=np.bool_)
    is_chosen[certain] = False
    found = np.empty(kept.size, dtype=np.float32)
    if certain.size < kept.size:
        level = _read_level(reader)
        signs = read_bits(reader, kept.size - certain.size, 1)
        found[is_chosen] = np.where(signs, -level, level)
    if certain.size:
        found[certain] = values.decode(reader, certain.size)
    return kept, found


def _read_level(reader: Reader) -> np.float32:
    level = np.float32(reader.array(_FLOAT32, 1)[0])
    if not np.isfinite(level):
        raise CodecError(f"payload holds the level {level}, expected a finite number")
    return level

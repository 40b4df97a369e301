"""`atomo:s`: random entries of each float32 parameter, the larger the likelier; unbiased.

Of the unbiased codecs that keep s entries of a tensor on average it has the least variance. A randomly
chosen entry decodes to plus or minus the level of its tensor, so it takes an index and a sign; entries above the
level always travel, and their values pass the value stage.

Written for each such parameter: the indices of all kept entries; the certain ones, as indices among them; the
level and the signs of the others, if there are any; the values of the certain ones, if there are any.

Source: Wang et al., ATOMO: Communication-efficient Learning via Atomic Sparsification, NeurIPS 2018, section 3.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Self

import numpy as np
from numpy.random import Generator

from edgefl.compression.entropy.golomb_rice import pack_bits, read_bits
from edgefl.compression.entropy.indices import read_indices, write_indices
from edgefl.compression.sparsification.atomo_sampling import compute_float32_level, parse_budget, sample_atoms
from edgefl.compression.stages import (
    StageKind,
    ValueStage,
    add_tensor_name_to_errors,
    compute_max_magnitude,
    is_lossy,
    read_exact,
    to_spec_array,
)
from edgefl.compression.wire import PayloadReader
from edgefl.core.errors import CodecError
from edgefl.core.types import Array, ModelSpec, SparseTensor, Tensor, Tensors

_FLOAT32 = np.dtype("<f4")


@dataclass(frozen=True, slots=True)
class Atomo:
    """ATOMO's sparsifier.

    A budget below 1 is the expected share of a tensor's sent entries, at least one, and else their number.
    """

    kind: ClassVar[StageKind] = StageKind.TENSORS
    is_unbiased: ClassVar[bool] = True
    is_contraction: ClassVar[bool] = False
    codes_indices: ClassVar[bool] = True

    budget: float

    @classmethod
    def parse(cls, argument: str) -> Self:
        return cls(budget=parse_budget("atomo", argument))

    def encode(self, tensors: Tensors, shapes: ModelSpec, values: ValueStage, rng: Generator) -> Iterator[Array]:
        for spec in shapes:
            array = to_spec_array(spec, tensors[spec.name])
            if not is_lossy(spec):
                yield array
                continue
            with add_tensor_name_to_errors(spec):
                compute_max_magnitude("atomo", array)
                budget = self.budget if self.budget >= 1 else max(1.0, self.budget * spec.size)
                yield from write_entries(array.reshape(-1), budget, values, rng)

    @staticmethod
    def decode(reader: PayloadReader, shapes: ModelSpec, values: type[ValueStage]) -> dict[str, Tensor]:
        decoded: dict[str, Tensor] = {}
        for spec in shapes:
            if is_lossy(spec):
                indices, entries = read_entries(reader, spec.size, values)
                decoded[spec.name] = SparseTensor(indices=indices, values=entries, shape=spec.shape)
            else:
                decoded[spec.name] = read_exact(reader, spec, spec.size).reshape(spec.shape)
        return decoded


def write_entries(flat: Array, budget: float, values: ValueStage, rng: Generator) -> Iterator[Array]:
    """Yields the arrays to write for [n] finite float32 entries; `budget` are kept on average.

    Raises:
        CodecError: the level overflows float32, or the value stage cannot encode a value.
    """
    magnitudes = np.abs(flat)
    level = compute_float32_level(magnitudes, budget)
    certain_atoms, chance_atoms = sample_atoms(magnitudes, float(level), rng)
    atoms = np.sort(np.concatenate([certain_atoms, chance_atoms]))
    yield from write_indices(atoms, flat.size)
    if atoms.size:
        yield from write_indices(np.searchsorted(atoms, certain_atoms), atoms.size)
    if chance_atoms.size:
        yield np.array([level], dtype=_FLOAT32)
        yield pack_bits(flat[chance_atoms] < 0, 1)
    if certain_atoms.size:
        yield from values.encode(flat[certain_atoms], rng)


def read_entries(reader: PayloadReader, size: int, values: type[ValueStage]) -> tuple[Array, Array]:
    """Returns the ascending indices below `size` and the values that `write_entries` wrote.

    Raises:
        CodecError: damaged.
    """
    atoms = read_indices(reader, size)
    certain_atoms = read_indices(reader, atoms.size) if atoms.size else atoms
    is_chosen = np.ones(atoms.size, dtype=np.bool_)
    is_chosen[certain_atoms] = False
    entries = np.empty(atoms.size, dtype=np.float32)
    if certain_atoms.size < atoms.size:
        level = _read_level(reader)
        signs = read_bits(reader, atoms.size - certain_atoms.size, 1)
        entries[is_chosen] = np.where(signs, -level, level)
    if certain_atoms.size:
        entries[certain_atoms] = values.decode(reader, certain_atoms.size)
    return atoms, entries


def _read_level(reader: PayloadReader) -> np.float32:
    level = np.float32(reader.read_array(_FLOAT32, 1)[0])
    if not np.isfinite(level):
        raise CodecError(f"payload holds the level {level}, expected a finite number")
    return level

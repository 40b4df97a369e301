"""ATOMO: random entries or singular vectors of each float32 parameter, the larger the likelier; unbiased.

A tensor is a sum of orthonormal atoms (its entries, or its singular vectors) with weights. Atom i is kept with
probability p_i and then counts 1 / p_i times its weight, so the expectation is the tensor and the expected squared
norm is the sum of weight_i**2 / p_i. Under the budget sum(p) = s the best are p_i = min(1, |weight_i| / t): kept
atoms that are not certain decode to the magnitude t, the same for all, so such an entry takes an index and a sign.
Entries above the level t always travel, and their values pass the value stage.

Written for each such parameter: the indices of all kept entries; the certain ones, as indices among them; the
level and the signs of the others, if there are any; the values of the certain ones, if there are any.

Source: Wang et al., ATOMO: Communication-efficient Learning via Atomic Sparsification, NeurIPS 2018, section 3.
Differs from the authors' program: the budget of capped atoms goes to the others, and there is no redraw of an empty
sample (that biases); atoms are drawn systematically, which keeps each one's probability.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from typing import ClassVar, Self

import numpy as np
from numpy.random import Generator

from edgefl.compression.chunked_indexing import CHUNK, iterate_chunks
from edgefl.compression.entropy.golomb import pack_bits, read_bits
from edgefl.compression.entropy.indices import read_indices, write_indices
from edgefl.compression.low_rank import require_magnitude
from edgefl.compression.stages import (
    FLOAT32,
    EachTensorStage,
    ValueStage,
    compute_max_magnitude,
    parse_decimal_argument,
    read_finite,
)
from edgefl.compression.wire import PayloadReader
from edgefl.core.errors import CodecError
from edgefl.core.types import Array, SparseTensor, Tensor, TensorSpec

# Number of magnitudes converted to float64 at a time.
_CHUNK = 2**18
_MIN_BUDGET, _MAX_BUDGET = Decimal("1e-12"), Decimal("1e12")
_MAX_FLOAT32 = float(np.finfo(np.float32).max)

_MIN_RELATIVE_COEFFICIENT = 2.0**-22
_MAX_COSINES = 2**16
"""Longest axis that is transformed in one piece."""


def compute_level(magnitudes: Array, budget: float) -> float:
    """Returns the magnitude t whose probabilities have the least variance within the budget.

    The capped atoms are the largest, and at most budget - 1 others: of the others only the sum matters. With a budget
    for all atoms that are not zero, t is the smallest of them; 1 when all are zero.

    Args:
        magnitudes: [n] finite, non-negative, any order.
        budget: expected number of kept atoms, 0 < budget.
    """
    num_atoms = int(np.count_nonzero(magnitudes))
    if budget >= num_atoms:
        return float(np.min(magnitudes, initial=np.inf, where=magnitudes > 0)) if num_atoms else 1.0
    partitioned = np.partition(magnitudes, magnitudes.size - math.ceil(budget))
    largest = np.sort(partitioned[magnitudes.size - math.ceil(budget) :].astype(np.float64))
    remaining_sum = float(partitioned[: magnitudes.size - largest.size].sum(dtype=np.float64))
    # Summed from the smallest up: taking prefixes from the total would leave nothing of small atoms.
    sums = (remaining_sum + np.cumsum(largest))[::-1]
    budgets = budget - np.arange(largest.size)
    first_uncapped = int(np.argmax(largest[::-1] * budgets <= sums))
    return float(sums[first_uncapped] / budgets[first_uncapped])


def compute_float32_level(magnitudes: Array, budget: float) -> np.float32:
    """Returns `level` as the float32 that travels, rounded up, so that its probabilities are exact.

    Raises:
        CodecError: it overflows float32.
    """
    exact = compute_level(magnitudes, budget)
    if exact > _MAX_FLOAT32:
        raise CodecError(f"atomo multiplies up to {exact:.6g}, beyond float32: use topk, or a larger budget")
    rounded = np.float32(exact)
    return rounded if float(rounded) >= exact else np.nextafter(rounded, np.float32(np.inf))


def compute_probabilities(magnitudes: Array, level: float) -> Array:
    """Returns the keep-probability of each atom, float64."""
    chances = magnitudes.astype(np.float64)
    chances /= level
    return np.minimum(chances, 1, out=chances)


def compute_expected_square(magnitudes: Array, level: float) -> float:
    """Returns the expected squared norm of the kept sum; its variance is that less the full squared norm."""
    squares = 0.0
    for chunk in iterate_chunks(magnitudes.size, _CHUNK):
        exact = magnitudes[chunk].astype(np.float64)
        squares += float((exact * np.maximum(exact, level)).sum())
    return squares


def sample_atoms(magnitudes: Array, level: float, rng: Generator) -> tuple[Array, Array]:
    """Returns the ascending indices of kept atoms, the certain and the randomly chosen ones.

    Each is kept with probability min(1, magnitude / level).

    Systematic sampling: the probabilities of the uncertain atoms lie one behind the other on a line, and those are
    kept that cover a mark; marks are 1 apart and the first is drawn uniformly from [0, 1). So each atom is kept with
    exactly its probability, and the number of kept ones is the budget, rounded up or down. In floating point the
    length of an atom on the line is off by half a unit in the last place of all the line's length, 2**-53 of it.
    """
    first = rng.random()
    certain_parts, chosen_parts = [np.arange(0)], [np.arange(0)]
    offset = 0.0
    for chunk in iterate_chunks(magnitudes.size, _CHUNK):
        chances = compute_probabilities(magnitudes[chunk], level)
        is_certain = chances == 1
        certain_parts.append(chunk.start + np.flatnonzero(is_certain))
        chances[is_certain] = 0
        chances[0] += offset
        ends = np.cumsum(chances, out=chances)
        marks = first + np.arange(max(0, math.ceil(offset - first)), math.ceil(ends[-1] - first) + 1)
        marks = marks[(marks >= offset) & (marks < ends[-1])]
        # The first end behind a mark; an atom without length has the end of the one before it and is never selected.
        chosen_parts.append(chunk.start + np.unique(np.searchsorted(ends, marks, side="right")))
        offset = float(ends[-1])
    return np.concatenate(certain_parts), np.concatenate(chosen_parts)


def parse_budget(name: str, argument: str) -> float:
    """Returns the budget of a stage's argument.

    Raises:
        CodecError: no number over 0.
    """
    return float(parse_decimal_argument(name, argument, _MIN_BUDGET, _MAX_BUDGET, "a number over 0"))


@dataclass(frozen=True, slots=True)
class Atomo(EachTensorStage):
    """ATOMO's sparsifier.

    A budget below 1 is the expected share of a tensor's sent entries, at least one, and else their number.
    """

    is_unbiased: ClassVar[bool] = True
    is_contraction: ClassVar[bool] = False
    codes_indices: ClassVar[bool] = True

    name: ClassVar[str] = "atomo"

    budget: float

    @classmethod
    def parse(cls, argument: str) -> Self:
        return cls(budget=parse_budget(cls.name, argument))

    def encode_tensor(self, spec: TensorSpec, array: Array, values: ValueStage, rng: Generator) -> Iterator[Array]:
        compute_max_magnitude(self.name, array)
        budget = self.budget if self.budget >= 1 else max(1.0, self.budget * spec.size)
        yield from write_entries(array.reshape(-1), budget, values, rng)

    @staticmethod
    def decode_tensor(reader: PayloadReader, spec: TensorSpec, values: type[ValueStage]) -> Tensor:
        return read_entries(reader, spec, values)


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
        yield np.array([level], dtype=FLOAT32)
        yield pack_bits(flat[chance_atoms] < 0, 1)
    if certain_atoms.size:
        yield from values.encode(flat[certain_atoms], rng)


def read_entries(reader: PayloadReader, spec: TensorSpec, values: type[ValueStage]) -> SparseTensor:
    """Returns the entries that `write_entries` wrote.

    Raises:
        CodecError: damaged.
    """
    atoms = read_indices(reader, spec.size)
    certain_atoms = read_indices(reader, atoms.size) if atoms.size else atoms
    is_chosen = np.ones(atoms.size, dtype=np.bool_)
    is_chosen[certain_atoms] = False
    entries = np.empty(atoms.size, dtype=np.float32)
    if certain_atoms.size < atoms.size:
        level = read_finite(reader, 1, "the level {}, expected a finite number")[0]
        signs = read_bits(reader, atoms.size - certain_atoms.size, 1)
        entries[is_chosen] = np.where(signs, -level, level)
    if certain_atoms.size:
        entries[certain_atoms] = values.decode(reader, certain_atoms.size)
    return SparseTensor(indices=atoms, values=entries, shape=spec.shape)


class AtomoDct(Atomo):
    """ATOMO with Fourier atoms: `atomo` on the coefficients of the discrete cosine transform of each parameter.

    Atoms are products of a cosine for each axis. They are orthonormal, so the expected squared norm is that of
    `atomo` for the coefficients. Better than entries where neighbours are alike (pixels of a kernel). An
    axis longer than 65,536 is cut into pieces with cosines of their own; coefficients below the rounding error
    never travel.

    Source: Wang et al., ATOMO, NeurIPS 2018, which names Fourier atoms as a next step; Ahmed, Natarajan and Rao,
    Discrete Cosine Transform, IEEE Transactions on Computers 1974.
    """

    __slots__ = ()

    name: ClassVar[str] = "atomo-dct"

    def encode_tensor(self, spec: TensorSpec, array: Array, values: ValueStage, rng: Generator) -> Iterator[Array]:
        require_magnitude(self.name, compute_max_magnitude(self.name, array))
        coefficients = transform_cosines(array)
        squares = np.einsum("i,i->", *(coefficients.reshape(-1),) * 2, dtype=np.float64)
        noise = _MIN_RELATIVE_COEFFICIENT * math.sqrt(float(squares) / max(1, spec.size))
        coefficients[np.abs(coefficients) <= noise] = 0
        return Atomo.encode_tensor(self, spec, coefficients, values, rng)

    @staticmethod
    def decode_tensor(reader: PayloadReader, spec: TensorSpec, values: type[ValueStage]) -> Tensor:
        coefficients = read_entries(reader, spec, values)
        bound = float(np.abs(coefficients.values, dtype=np.float64).sum())
        if not bound <= _MAX_FLOAT32:
            raise CodecError(f"coefficients make numbers up to {bound:.6g}, beyond float32")
        return transform_cosines(coefficients.dense(), is_inverse=True)


def transform_cosines(array: Array, *, is_inverse: bool = False) -> Array:
    """Returns the orthonormal discrete cosine transform (type II) along every axis, or its inverse; float32."""
    for axis in range(array.ndim if array.size else 0):
        lines = np.moveaxis(array, axis, -1)
        rows = np.array(lines, dtype=np.float32, order="C").reshape(-1, lines.shape[-1])
        for columns in iterate_chunks(rows.shape[1], _MAX_COSINES):
            for part in iterate_chunks(len(rows), max(1, CHUNK // (columns.stop - columns.start))):
                rows[part, columns] = _transform_rows(rows[part, columns].astype(np.float64), is_inverse=is_inverse)
        array = np.moveaxis(rows.reshape(lines.shape), -1, axis)
    return np.array(array, dtype=np.float32, order="C")


def _transform_rows(rows: Array, *, is_inverse: bool) -> Array:
    """Returns the transform of each row of [k, n] float64, by a Fourier transform of n reordered numbers.

    Source: Makhoul, A Fast Cosine Transform in One and Two Dimensions, IEEE Transactions on Acoustics, Speech, and
    Signal Processing 1980.
    """
    size = rows.shape[1]
    scales = np.full(size, math.sqrt(2 / size))
    scales[0] = math.sqrt(1 / size)
    # Even places ascending, then odd ones descending.
    order = np.concatenate([np.arange(0, size, 2), np.arange(1, size, 2)[::-1]])
    turns = np.exp(-0.5j * np.pi / size * np.arange(size // 2 + 1))
    found = np.empty_like(rows)
    if is_inverse:
        scaled = rows / scales
        spectrum = scaled[:, : size // 2 + 1].astype(np.complex128)
        spectrum[:, 1:] -= 1j * scaled[:, : size - size // 2 - 1 : -1]
        found[:, order] = np.fft.irfft(spectrum / turns, size)
        return found
    spectrum = np.fft.rfft(rows[:, order]) * turns
    found[:, : size // 2 + 1] = spectrum.real
    found[:, : size // 2 : -1] = -spectrum.imag[:, 1 : (size + 1) // 2]
    found *= scales
    return found

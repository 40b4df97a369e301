"""`atomo-svd:s`: singular vectors of each float32 parameter at random, the larger the likelier; unbiased.

A parameter is made a matrix (`matrices.py`), and s of its singular triples travel on average: two vectors, which pass
the value stage, and the exact weight sigma / p. Where as many bytes of entries have the smaller expected error, they
travel in place of the vectors, as `atomo.py` has it: ATOMO's indicator, which compares nuclear norm * sqrt(m + n)
with the sum of magnitudes, is this comparison for entries that cost as much as a number of a vector and for
probabilities that are not capped. What vectors would not make smaller passes the value stage whole.

Written for each such parameter: a byte that names the form, 0 whole, 1 entries, 2 + the rule's number vectors; then
the values; or the entries; or the number of triples and, if there are any, their weights, left and right vectors.

Source: Wang et al., ATOMO: Communication-efficient Learning via Atomic Sparsification, NeurIPS 2018.
Differs from the paper: how the tensors are made matrices, and bytes are counted as they travel.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Self

import numpy as np
from numpy.random import Generator

from edgefl.compression.stages import (
    StageKind,
    ValueStage,
    exact_array,
    is_lossy,
    largest_magnitude,
    naming,
    read_exact,
)
from edgefl.compression.tensors.atomo import read_entries, write_entries
from edgefl.compression.tensors.atomo_rule import expected_square, level, parse_budget
from edgefl.compression.tensors.factors import LARGEST_WEIGHT, directions, passed
from edgefl.compression.tensors.matrices import Rule, as_matrix, from_matrix, matrix_shape, parse_rule, pays
from edgefl.compression.tensors.triples import Spectrum, read_triples, spectrum_of, triples, write_triples
from edgefl.compression.wire import Reader
from edgefl.errors import CodecError
from edgefl.types import Array, Shapes, SparseTensor, Tensor, Tensors, TensorSpec

WIDEST_KERNEL, WIDEST = 1024, 2048
"""Smaller sides of matrices over which kernels are made matrices by `out`, and over which entries travel: the time to
decompose a matrix grows with the third power, and 1536 takes 3 s where 512 takes 0.1 s."""

_WHOLE, _ENTRIES, _TRIPLES = 0, 1, 2
_SAMPLE, _HALVINGS = 2**14, 16


@dataclass(frozen=True, slots=True)
class AtomoSvd:
    """Expects `budget` triples of each matrix to travel; those that make up a smaller part than rounding never do."""

    kind: ClassVar[StageKind] = StageKind.TENSORS
    is_unbiased: ClassVar[bool] = True
    is_contraction: ClassVar[bool] = False
    codes_indices: ClassVar[bool] = True

    budget: float
    rule: Rule = Rule.KERNEL

    @classmethod
    def parse(cls, argument: str) -> Self:
        budget, _, rule = argument.partition(":")
        return cls(budget=parse_budget("atomo-svd", budget), rule=parse_rule("atomo-svd", rule))

    def encode(self, tensors: Tensors, shapes: Shapes, values: ValueStage, rng: Generator) -> Iterator[Array]:
        for spec in shapes:
            array = exact_array(spec, tensors[spec.name])
            if not is_lossy(spec):
                yield array
                continue
            with naming(spec):
                largest = largest_magnitude("atomo-svd", array)
                yield from self._write(array, largest, values, rng)

    @staticmethod
    def decode(reader: Reader, shapes: Shapes, values: type[ValueStage]) -> dict[str, Tensor]:
        return {spec.name: _read_tensor(reader, spec, values) for spec in shapes}

    def _write(self, array: Array, largest: float, values: ValueStage, rng: Generator) -> Iterator[Array]:
        rule = self._rule(array.shape)
        sides = matrix_shape(array.shape, rule)
        if not pays(math.ceil(self.budget), sides):
            yield np.array([_WHOLE], dtype=np.uint8)
            yield from values.encode(array, rng)
            return
        if largest > LARGEST_WEIGHT:
            raise CodecError(f"atomo-svd carries magnitudes up to {LARGEST_WEIGHT:g}, got {largest:g}: use dense")
        matrix = as_matrix(array, rule)
        spectrum = spectrum_of(matrix) if min(sides) <= WIDEST else None
        entries = self._entries(array, matrix, spectrum, values)
        if entries is not None:
            yield np.array([_ENTRIES], dtype=np.uint8)
            yield from write_entries(array.reshape(-1), entries, values, rng)
        elif spectrum is not None:
            yield np.array([_TRIPLES + rule], dtype=np.uint8)
            yield from write_triples(matrix, spectrum, self.budget, values, rng)

    def _entries(self, array: Array, matrix: Array, spectrum: Spectrum | None, values: ValueStage) -> float | None:
        """Returns how many entries are about as many bytes as the triples; None where triples are the better choice.

        What decides must not depend on what chance chooses later, or the choice would bias the result.
        """
        kept = np.arange(math.ceil(self.budget))
        if spectrum is not None:
            kept = kept[: np.count_nonzero(spectrum.weights)]
            if not kept.size:
                return None
        price = _price(values, _lines(matrix, kept) if spectrum is None else triples(matrix, spectrum, kept)[1:])
        magnitudes = np.abs(array).reshape(-1)
        entries = _entries_for(8 * self.budget * (price.bytes_per_triple + 4), magnitudes, price.bits)
        if spectrum is None:
            return entries
        # Both vectors of a triple are rounded, and of the entries those that are certain.
        at_level = level(spectrum.weights, self.budget)
        square = expected_square(spectrum.weights, at_level) * (1 + price.noise) ** 2
        return entries if _square_of_entries(magnitudes, entries, price.noise) < square else None

    def _rule(self, shape: tuple[int, ...]) -> Rule:
        is_wide = min(matrix_shape(shape, self.rule)) > WIDEST_KERNEL
        return Rule.OUT if self.rule == Rule.KERNEL and is_wide else self.rule


def _lines(matrix: Array, kept: Array) -> tuple[Array, Array]:
    """Returns columns and rows of a matrix at length one: in place of singular vectors where these take too long."""
    return directions(matrix.T[kept]), directions(matrix[kept])


class _Price(NamedTuple):
    """What a value stage costs and loses on vectors: bytes, bits a number, squared error to squared norm."""

    bytes_per_triple: float
    bits: float
    noise: float


def _price(values: ValueStage, vectors: tuple[Array, Array]) -> _Price:
    """Returns what the value stage does to a left and a right run of vectors; chance is the same on every device."""
    rng = np.random.default_rng(0)
    left, right = (passed(run, values, rng) for run in vectors)
    num_bytes = sum(part.nbytes for part in (*left[1], *right[1]))
    lost = sum(float(np.square(found - run).sum()) for (found, _), run in zip((left, right), vectors, strict=True))
    squares = sum(float(np.square(run).sum()) for run in vectors)
    size = sum(run.size for run in vectors)
    return _Price(num_bytes / len(vectors[0]), 8 * num_bytes / size, lost / squares if squares else 0.0)


def _entries_for(num_bits: float, magnitudes: Array, bits_of_value: float) -> float:
    """Returns how many entries take so many bits, their places at their entropy; a sample of them tells."""
    sample = magnitudes[:: -(-magnitudes.size // _SAMPLE)]
    least, most = 0.0, float(sample.size)
    for _ in range(_HALVINGS):
        middle = (least + most) / 2
        bits = _bits_of_entries(sample, middle, bits_of_value) * magnitudes.size / sample.size
        least, most = (middle, most) if bits < num_bits else (least, middle)
    return max(1.0, most * magnitudes.size / sample.size)


def _bits_of_entries(magnitudes: Array, budget: float, bits_of_value: float) -> float:
    certain = int(np.count_nonzero(magnitudes >= level(magnitudes, budget)))
    # An uncertain entry has a sign; one that always travels has a value, and a place among the others.
    return _entropy(budget, magnitudes.size) + budget - certain + certain * bits_of_value + _entropy(certain, budget)


def _entropy(count: float, size: float) -> float:
    """Returns the bits of a random set of `count` among `size`."""
    share = count / size
    if not 0 < share < 1:
        return 0.0
    return -size * (share * math.log2(share) + (1 - share) * math.log2(1 - share))


def _square_of_entries(magnitudes: Array, budget: float, noise: float) -> float:
    at_level = level(magnitudes, budget)
    certain = magnitudes[magnitudes >= at_level]
    return expected_square(magnitudes, at_level) + noise * float(np.square(certain, dtype=np.float64).sum())


def _read_tensor(reader: Reader, spec: TensorSpec, values: type[ValueStage]) -> Tensor:
    if not is_lossy(spec):
        return read_exact(reader, spec, spec.size).reshape(spec.shape)
    form = reader.take(1)[0]
    if form == _WHOLE:
        return values.decode(reader, spec.size).reshape(spec.shape)
    if form == _ENTRIES:
        indices, kept = read_entries(reader, spec.size, values)
        return SparseTensor(indices=indices, values=kept, shape=spec.shape)
    if form - _TRIPLES not in list(Rule):
        raise CodecError(f"payload holds a tensor in form {form}, which this edgefl does not know")
    rule = Rule(form - _TRIPLES)
    return from_matrix(read_triples(reader, matrix_shape(spec.shape, rule), values), spec.shape, rule)

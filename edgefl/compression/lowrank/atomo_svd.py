"""`atomo-svd:s`: random singular vectors of each float32 parameter, the larger the likelier; unbiased.

A parameter is made a matrix (`matrices.py`), and s of its singular triples travel on average: two vectors, which pass
the value stage, and the exact weight sigma / p. Where as many bytes of entries have the smaller expected error, they
travel in place of the vectors, as in `atomo.py`: ATOMO's indicator, which compares nuclear norm * sqrt(m + n)
with the sum of magnitudes, is this comparison for entries that cost as much as a number of a vector and for
probabilities that are not capped. Parameters that vectors would not make smaller pass the value stage whole.

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

from edgefl.compression.lowrank.factors import MAX_WEIGHT, normalise_rows, quantise_vectors
from edgefl.compression.lowrank.matrices import (
    MatrixRule,
    compute_matrix_shape,
    from_matrix,
    is_smaller_as_vectors,
    parse_rule,
    to_matrix,
)
from edgefl.compression.lowrank.singular_triples import (
    Spectrum,
    compute_spectrum,
    compute_triples,
    read_triples,
    write_triples,
)
from edgefl.compression.sparsification.atomo import read_entries, write_entries
from edgefl.compression.sparsification.atomo_sampling import compute_expected_square, compute_level, parse_budget
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
from edgefl.core.types import Array, ModelSpec, SparseTensor, Tensor, Tensors, TensorSpec

MAX_KERNEL_SIDE, MAX_DECOMPOSED_SIDE = 1024, 2048
"""Smaller sides of matrices over which kernels are made matrices by `out`, and over which entries travel: the time to
decompose a matrix grows with the third power, and 1536 takes 3 s where 512 takes 0.1 s."""

_DENSE_FORM, _ENTRIES_FORM, _TRIPLES_FORM = 0, 1, 2
_SAMPLE_SIZE, _BISECTION_STEPS = 2**14, 16


@dataclass(frozen=True, slots=True)
class AtomoSvd:
    """Sends `budget` triples of each matrix on average; those below the rounding error never."""

    kind: ClassVar[StageKind] = StageKind.TENSORS
    is_unbiased: ClassVar[bool] = True
    is_contraction: ClassVar[bool] = False
    codes_indices: ClassVar[bool] = True

    budget: float
    rule: MatrixRule = MatrixRule.KERNEL

    @classmethod
    def parse(cls, argument: str) -> Self:
        budget, _, rule = argument.partition(":")
        return cls(budget=parse_budget("atomo-svd", budget), rule=parse_rule("atomo-svd", rule))

    def encode(self, tensors: Tensors, shapes: ModelSpec, values: ValueStage, rng: Generator) -> Iterator[Array]:
        for spec in shapes:
            array = to_spec_array(spec, tensors[spec.name])
            if not is_lossy(spec):
                yield array
                continue
            with add_tensor_name_to_errors(spec):
                largest = compute_max_magnitude("atomo-svd", array)
                yield from self._write_tensor(array, largest, values, rng)

    @staticmethod
    def decode(reader: PayloadReader, shapes: ModelSpec, values: type[ValueStage]) -> dict[str, Tensor]:
        return {spec.name: _read_tensor(reader, spec, values) for spec in shapes}

    def _write_tensor(self, array: Array, largest: float, values: ValueStage, rng: Generator) -> Iterator[Array]:
        rule = self._select_rule(array.shape)
        sides = compute_matrix_shape(array.shape, rule)
        if not is_smaller_as_vectors(math.ceil(self.budget), sides):
            yield np.array([_DENSE_FORM], dtype=np.uint8)
            yield from values.encode(array, rng)
            return
        if largest > MAX_WEIGHT:
            raise CodecError(f"atomo-svd carries magnitudes up to {MAX_WEIGHT:g}, got {largest:g}: use dense")
        matrix = to_matrix(array, rule)
        spectrum = compute_spectrum(matrix) if min(sides) <= MAX_DECOMPOSED_SIDE else None
        entries = self._compute_entry_budget(array, matrix, spectrum, values)
        if entries is not None:
            yield np.array([_ENTRIES_FORM], dtype=np.uint8)
            yield from write_entries(array.reshape(-1), entries, values, rng)
        elif spectrum is not None:
            yield np.array([_TRIPLES_FORM + rule], dtype=np.uint8)
            yield from write_triples(matrix, spectrum, self.budget, values, rng)

    def _compute_entry_budget(
        self, array: Array, matrix: Array, spectrum: Spectrum | None, values: ValueStage
    ) -> float | None:
        """Returns the number of entries with about the triples' bytes; None where triples are better.

        The decision must not depend on later random choices, or it would bias the result.
        """
        triples = np.arange(math.ceil(self.budget))
        if spectrum is not None:
            triples = triples[: np.count_nonzero(spectrum.weights)]
            if not triples.size:
                return None
        price = _compute_vector_cost(
            values,
            _normalise_lines(matrix, triples) if spectrum is None else compute_triples(matrix, spectrum, triples)[1:],
        )
        magnitudes = np.abs(array).reshape(-1)
        entries = _find_entry_budget(
            8 * self.budget * (price.bytes_per_triple + 4), magnitudes, price.bits_per_number
        )
        if spectrum is None:
            return entries
        # Both vectors of a triple are rounded, and of the entries those that are certain.
        at_level = compute_level(spectrum.weights, self.budget)
        square = compute_expected_square(spectrum.weights, at_level) * (1 + price.noise) ** 2
        return entries if _compute_entry_square(magnitudes, entries, price.noise) < square else None

    def _select_rule(self, shape: tuple[int, ...]) -> MatrixRule:
        is_wide = min(compute_matrix_shape(shape, self.rule)) > MAX_KERNEL_SIDE
        return MatrixRule.OUT if self.rule == MatrixRule.KERNEL and is_wide else self.rule


def _normalise_lines(matrix: Array, indices: Array) -> tuple[Array, Array]:
    """Returns unit columns and rows of a matrix: instead of singular vectors where these take too long."""
    return normalise_rows(matrix.T[indices]), normalise_rows(matrix[indices])


class _VectorCost(NamedTuple):
    """Cost of a value stage on vectors: bytes, bits a number, squared error to squared norm."""

    bytes_per_triple: float
    bits_per_number: float
    noise: float


def _compute_vector_cost(values: ValueStage, vectors: tuple[Array, Array]) -> _VectorCost:
    """Returns the value stage's cost on left and right vectors; the seed is equal on all devices."""
    rng = np.random.default_rng(0)
    left, right = (quantise_vectors(run, values, rng) for run in vectors)
    num_bytes = sum(part.nbytes for part in (*left[1], *right[1]))
    squared_error = sum(
        float(np.square(quantised - run).sum()) for (quantised, _), run in zip((left, right), vectors, strict=True)
    )
    squares = sum(float(np.square(run).sum()) for run in vectors)
    size = sum(run.size for run in vectors)
    return _VectorCost(num_bytes / len(vectors[0]), 8 * num_bytes / size, squared_error / squares if squares else 0.0)


def _find_entry_budget(num_bits: float, magnitudes: Array, bits_of_value: float) -> float:
    """Returns the number of entries with `num_bytes`, indices at their entropy; estimated on a sample."""
    sample = magnitudes[:: -(-magnitudes.size // _SAMPLE_SIZE)]
    low, high = 0.0, float(sample.size)
    for _ in range(_BISECTION_STEPS):
        budget = (low + high) / 2
        bits = _compute_entry_bits(sample, budget, bits_of_value) * magnitudes.size / sample.size
        low, high = (budget, high) if bits < num_bits else (low, budget)
    return max(1.0, high * magnitudes.size / sample.size)


def _compute_entry_bits(magnitudes: Array, budget: float, bits_of_value: float) -> float:
    num_certain = int(np.count_nonzero(magnitudes >= compute_level(magnitudes, budget)))
    # An uncertain entry has a sign; one that always travels has a value, and an index among the others.
    return (
        _compute_entropy(budget, magnitudes.size)
        + budget
        - num_certain
        + num_certain * bits_of_value
        + _compute_entropy(num_certain, budget)
    )


def _compute_entropy(count: float, size: float) -> float:
    """Returns the bits of a random set of `count` among `size`."""
    share = count / size
    if not 0 < share < 1:
        return 0.0
    return -size * (share * math.log2(share) + (1 - share) * math.log2(1 - share))


def _compute_entry_square(magnitudes: Array, budget: float, noise: float) -> float:
    at_level = compute_level(magnitudes, budget)
    certain_magnitudes = magnitudes[magnitudes >= at_level]
    return compute_expected_square(magnitudes, at_level) + noise * float(
        np.square(certain_magnitudes, dtype=np.float64).sum()
    )


def _read_tensor(reader: PayloadReader, spec: TensorSpec, values: type[ValueStage]) -> Tensor:
    if not is_lossy(spec):
        return read_exact(reader, spec, spec.size).reshape(spec.shape)
    form = reader.read_bytes(1)[0]
    if form == _DENSE_FORM:
        return values.decode(reader, spec.size).reshape(spec.shape)
    if form == _ENTRIES_FORM:
        indices, entries = read_entries(reader, spec.size, values)
        return SparseTensor(indices=indices, values=entries, shape=spec.shape)
    if form - _TRIPLES_FORM not in list(MatrixRule):
        raise CodecError(f"payload holds a tensor in form {form}, which this edgefl does not know")
    rule = MatrixRule(form - _TRIPLES_FORM)
    return from_matrix(read_triples(reader, compute_matrix_shape(spec.shape, rule), values), spec.shape, rule)

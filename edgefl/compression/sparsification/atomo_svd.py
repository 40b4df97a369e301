"""Spectral ATOMO: random singular vectors of each float32 parameter as a matrix, the larger the likelier; unbiased.

Source: Wang et al., ATOMO: Communication-efficient Learning via Atomic Sparsification, NeurIPS 2018, section 3. What
is said of atoms, weights and budgets in `atomo.py` holds here, too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Self

import numpy as np
from numpy.random import Generator

from edgefl.compression.chunked_indexing import iterate_chunks
from edgefl.compression.low_rank import (
    DENSE_FORM,
    ENTRIES_FORM,
    MAX_WEIGHT,
    VECTORS_FORM,
    MatrixRule,
    compute_matrix_shape,
    compute_sum_of_products,
    encode_dense_form,
    encode_form,
    from_matrix,
    is_smaller_as_vectors,
    normalise_rows,
    parse_form,
    parse_rule,
    quantise_vectors,
    read_pair_count,
    read_vectors,
    require_magnitude,
    to_matrix,
)
from edgefl.compression.sparsification.atomo import (
    compute_expected_square,
    compute_level,
    parse_budget,
    read_entries,
    sample_atoms,
    write_entries,
)
from edgefl.compression.stages import (
    FLOAT32,
    EachTensorStage,
    ValueStage,
    compute_max_magnitude,
    read_finite,
)
from edgefl.compression.wire import PayloadReader, encode_varint
from edgefl.core.errors import CodecError
from edgefl.core.types import Array, Tensor, TensorSpec

_MIN_RELATIVE_WEIGHT = 2.0**-22
_GRAM_CHUNK_ROWS = 4096

MAX_KERNEL_SIDE, MAX_DECOMPOSED_SIDE = 1024, 2048
"""Smaller sides of matrices over which kernels are made matrices by `out`, and over which none is decomposed: the
time grows with the third power, and 1536 takes 3 s where 512 takes 0.1 s."""

_SAMPLE_SIZE, _BISECTION_STEPS = 2**14, 16


class Spectrum(NamedTuple):
    """A matrix as a sum of orthonormal atoms: its products with the [n, n] orthonormal columns of `basis`.

    `weights` are the norms of the [n] products. They are singular values, but their accuracy does not matter:
    the products with any orthonormal basis are orthogonal to each other and add up to the matrix.
    """

    weights: Array
    basis: Array


def compute_spectrum(matrix: Array) -> Spectrum:
    """Returns the weights, largest first, and the shorter side's basis; rounding noise has weight 0.

    Computed from the Gram matrix of the longer side, ten times faster than a singular value decomposition. In float64
    the squares of all float32 numbers do not overflow.
    """
    tall = matrix if matrix.shape[0] >= matrix.shape[1] else matrix.T
    gram = np.zeros((tall.shape[1], tall.shape[1]))
    for chunk in iterate_chunks(len(tall), _GRAM_CHUNK_ROWS):
        rows = tall[chunk].astype(np.float64)
        gram += rows.T @ rows
    squares, basis = np.linalg.eigh(gram)
    weights = np.sqrt(np.maximum(squares[::-1], 0))
    weights[weights <= _MIN_RELATIVE_WEIGHT * math.sqrt(float(np.trace(gram)))] = 0
    return Spectrum(weights, basis[:, ::-1])


def write_triples(
    matrix: Array, spectrum: Spectrum, budget: float, values: ValueStage, rng: Generator
) -> Iterator[Array]:
    """Yields the arrays to write for an [m, n] matrix; `budget` triples are kept on average.

    Raises:
        CodecError: a weight is too large.
    """
    at_level = compute_level(spectrum.weights, budget)
    atoms = np.sort(np.concatenate(sample_atoms(spectrum.weights, at_level, rng)))
    yield encode_varint(atoms.size)
    if not atoms.size:
        return
    norms, left, right = compute_triples(matrix, spectrum, atoms)
    weights = norms / np.minimum(spectrum.weights[atoms] / at_level, 1)
    if weights.sum() > MAX_WEIGHT:
        raise CodecError(f"vectors carry weights up to {MAX_WEIGHT:g}, got {weights.sum():.6g}: use dense")
    yield weights.astype(FLOAT32)
    yield from values.encode(left, rng)
    yield from values.encode(right, rng)


def compute_triples(matrix: Array, spectrum: Spectrum, indices: Array) -> tuple[Array, Array, Array]:
    """Returns [k] norms, unit [k, m] left and [k, n] right vectors of atoms with non-zero weights."""
    is_tall = matrix.shape[0] >= matrix.shape[1]
    short_side = np.ascontiguousarray(spectrum.basis[:, indices].T, dtype=np.float32)
    long_side = short_side @ (matrix.T if is_tall else matrix)
    norms = np.linalg.norm(long_side.astype(np.float64), axis=1)
    # A product of denormal numbers can be zero although its weight is not.
    long_side = (long_side / np.where(norms > 0, norms, 1)[:, None]).astype(np.float32)
    return (norms, long_side, short_side) if is_tall else (norms, short_side, long_side)


def read_triples(reader: PayloadReader, sides: tuple[int, int], values: type[ValueStage]) -> Array:
    """Returns the [m, n] matrix that `write_triples` wrote.

    Raises:
        CodecError: damaged.
    """
    count = read_pair_count(reader, sides)
    if not count:
        return np.zeros(sides, dtype=np.float32)
    weights = read_finite(reader, count, "a singular value that is not finite")
    left, right = (read_vectors(reader, count, side, values) for side in sides)
    return compute_sum_of_products(left, weights, right)


@dataclass(frozen=True, slots=True)
class AtomoSvd(EachTensorStage):
    """`atomo-svd:s`: sends `budget` singular triples of each matrix on average; those below the rounding error never.

    A parameter is made a matrix (`low_rank.py`). Of a triple travel two vectors, which pass the value stage, and the
    exact weight sigma / p. Parameters that vectors would not make smaller pass the value stage whole.

    Written for each such parameter: a byte that names the form, 0 whole, 1 entries (`AtomoAuto`), 2 + the rule's
    number vectors; then the values; or the entries; or the number of triples and, if there are any, their weights,
    left and right vectors.

    Differs from the paper: how the tensors are made matrices.
    """

    name: ClassVar[str] = "atomo-svd"
    chooses: ClassVar[bool] = False
    is_unbiased: ClassVar[bool] = True
    is_contraction: ClassVar[bool] = False
    codes_indices: ClassVar[bool] = True

    budget: float
    rule: MatrixRule = MatrixRule.KERNEL

    @classmethod
    def parse(cls, argument: str) -> Self:
        budget, _, rule = argument.partition(":")
        return cls(budget=parse_budget(cls.name, budget), rule=parse_rule(cls.name, rule))

    def encode_tensor(self, spec: TensorSpec, array: Array, values: ValueStage, rng: Generator) -> Iterator[Array]:
        largest = compute_max_magnitude(self.name, array)
        rule = self._select_rule(spec.shape)
        sides = compute_matrix_shape(spec.shape, rule)
        if not is_smaller_as_vectors(math.ceil(self.budget), sides):
            yield from encode_dense_form(array, values, rng)
            return
        require_magnitude(self.name, largest)
        matrix = to_matrix(array, rule)
        spectrum = compute_spectrum(matrix) if min(sides) <= MAX_DECOMPOSED_SIDE else None
        entries = self._compute_entry_budget(array, matrix, spectrum, values) if self.chooses else None
        if entries is not None:
            yield encode_form(ENTRIES_FORM)
            yield from write_entries(array.reshape(-1), entries, values, rng)
        elif spectrum is not None:
            yield encode_form(VECTORS_FORM + rule)
            yield from write_triples(matrix, spectrum, self.budget, values, rng)
        else:
            raise CodecError(
                f"{self.name} decomposes matrices with a side of at most {MAX_DECOMPOSED_SIDE}, got"
                f" {sides[0]} x {sides[1]}: use atomo-auto, which sends entries of such"
            )

    @staticmethod
    def decode_tensor(reader: PayloadReader, spec: TensorSpec, values: type[ValueStage]) -> Tensor:
        form = reader.read_bytes(1)[0]
        if form == DENSE_FORM:
            return values.decode(reader, spec.size).reshape(spec.shape)
        if form == ENTRIES_FORM:
            return read_entries(reader, spec, values)
        rule = parse_form(form)
        return from_matrix(read_triples(reader, compute_matrix_shape(spec.shape, rule), values), spec.shape, rule)

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


class AtomoAuto(AtomoSvd):
    """`atomo-auto:s`: entries in place of triples where as many bytes of them have the smaller expected error.

    ATOMO's indicator, which compares nuclear norm * sqrt(m + n) with the sum of magnitudes, is this comparison for
    entries that cost as much as a number of a vector and for probabilities that are not capped; here bytes count as
    they travel. Written as of `atomo-svd`.
    """

    __slots__ = ()

    name: ClassVar[str] = "atomo-auto"
    chooses: ClassVar[bool] = True


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

"""Matrices as sums of orthonormal atoms, and their encoding: weights, left and right vectors."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.random import Generator

from edgefl.compression.lowrank.factors import MAX_WEIGHT, compute_sum_of_products, read_vectors
from edgefl.compression.lowrank.matrices import is_smaller_as_vectors
from edgefl.compression.sparsification.atomo_sampling import compute_level, sample_atoms
from edgefl.compression.stages import ValueStage
from edgefl.compression.wire import PayloadReader, encode_varint
from edgefl.core.errors import CodecError
from edgefl.core.types import Array

_FLOAT32 = np.dtype("<f4")
_MIN_RELATIVE_WEIGHT = 2.0**-22
_GRAM_CHUNK_ROWS = 4096


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
    for start in range(0, len(tall), _GRAM_CHUNK_ROWS):
        rows = tall[start : start + _GRAM_CHUNK_ROWS].astype(np.float64)
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
        raise CodecError(f"atomo-svd carries weights up to {MAX_WEIGHT:g}, got {weights.sum():.6g}: use dense")
    yield weights.astype(_FLOAT32)
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
    count = reader.read_varint(min(sides))
    if not count:
        return np.zeros(sides, dtype=np.float32)
    if not is_smaller_as_vectors(count, sides):
        raise CodecError(f"payload holds {count} pairs of vectors for a matrix of {sides[0]} x {sides[1]}")
    weights = reader.read_array(_FLOAT32, count)
    if not np.all(np.isfinite(weights)):
        raise CodecError("payload holds a singular value that is not finite")
    left, right = (read_vectors(reader, count, side, values) for side in sides)
    return compute_sum_of_products(left, weights, right)

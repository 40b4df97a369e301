"""Matrices as sums of orthonormal atoms, and some of these on the wire: weights, left and right vectors."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.random import Generator

from edgefl.compression.stages import ValueStage
from edgefl.compression.tensors.atomo_rule import draw, level
from edgefl.compression.tensors.factors import LARGEST_WEIGHT, read_vectors, sum_of_products
from edgefl.compression.tensors.matrices import pays
from edgefl.compression.wire import Reader, varint
from edgefl.errors import CodecError
from edgefl.types import Array

_FLOAT32 = np.dtype("<f4")
_ROUNDING = 2.0**-22
_GRAM_ROWS = 4096


class Spectrum(NamedTuple):
    """A matrix as a sum of orthonormal atoms: its products with the [n, n] orthonormal columns of `basis`.

    `weights` are the norms of the [n] products. They are singular values, but nothing depends on how well they are:
    the products with any orthonormal basis are orthogonal to each other and add up to the matrix.
    """

    weights: Array
    basis: Array


def spectrum_of(matrix: Array) -> Spectrum:
    """Returns the weights, largest first, and the basis of the shorter side; what rounding makes up has weight 0.

    Found by the products of the longer side's vectors with each other, ten times faster than a singular value
    decomposition. In float64 these carry the squares of all float32 numbers.
    """
    tall = matrix if matrix.shape[0] >= matrix.shape[1] else matrix.T
    products = np.zeros((tall.shape[1], tall.shape[1]))
    for begin in range(0, len(tall), _GRAM_ROWS):
        rows = tall[begin : begin + _GRAM_ROWS].astype(np.float64)
        products += rows.T @ rows
    squares, basis = np.linalg.eigh(products)
    weights = np.sqrt(np.maximum(squares[::-1], 0))
    weights[weights <= _ROUNDING * math.sqrt(float(np.trace(products)))] = 0
    return Spectrum(weights, basis[:, ::-1])


def write_triples(
    matrix: Array, spectrum: Spectrum, budget: float, values: ValueStage, rng: Generator
) -> Iterator[Array]:
    """Yields the arrays to write for an [m, n] matrix of which `budget` triples are kept on average.

    Raises:
        CodecError: a weight is too large.
    """
    at_level = level(spectrum.weights, budget)
    kept = np.sort(np.concatenate(draw(spectrum.weights, at_level, rng)))
    yield varint(kept.size)
    if not kept.size:
        return
    norms, left, right = triples(matrix, spectrum, kept)
    weights = norms / np.minimum(spectrum.weights[kept] / at_level, 1)
    if weights.sum() > LARGEST_WEIGHT:
        raise CodecError(f"atomo-svd carries weights up to {LARGEST_WEIGHT:g}, got {weights.sum():.6g}: use dense")
    yield weights.astype(_FLOAT32)
    yield from values.encode(left, rng)
    yield from values.encode(right, rng)


def triples(matrix: Array, spectrum: Spectrum, kept: Array) -> tuple[Array, Array, Array]:
    """Returns [k] norms, [k, m] left and [k, n] right vectors of length one of atoms whose weights are not zero."""
    is_tall = matrix.shape[0] >= matrix.shape[1]
    short = np.ascontiguousarray(spectrum.basis[:, kept].T, dtype=np.float32)
    long = short @ (matrix.T if is_tall else matrix)
    norms = np.linalg.norm(long.astype(np.float64), axis=1)
    # Of denormal numbers a product can be zero although its weight is not.
    long = (long / np.where(norms > 0, norms, 1)[:, None]).astype(np.float32)
    return (norms, long, short) if is_tall else (norms, short, long)


def read_triples(reader: Reader, sides: tuple[int, int], values: type[ValueStage]) -> Array:
    """Returns the [m, n] matrix that `write_triples` wrote.

    Raises:
        CodecError: damaged.
    """
    count = reader.varint(min(sides))
    if not count:
        return np.zeros(sides, dtype=np.float32)
    if not pays(count, sides):
        raise CodecError(f"payload holds {count} pairs of vectors for a matrix of {sides[0]} x {sides[1]}")
    weights = reader.array(_FLOAT32, count)
    if not np.all(np.isfinite(weights)):
        raise CodecError("payload holds a singular value that is not finite")
    left, right = (read_vectors(reader, count, side, values) for side in sides)
    return sum_of_products(left, weights, right)

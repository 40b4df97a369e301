"""Singular triples on the wire: right on average, whatever basis they were made of."""

import numpy as np
import pytest

from edgefl.compression.lowrank.singular_triples import (
    Spectrum,
    compute_spectrum,
    compute_triples,
    read_triples,
    write_triples,
)
from edgefl.compression.quantisation.floats import Float32
from edgefl.compression.quantisation.qsgd import Qsgd
from edgefl.compression.sparsification.atomo_sampling import compute_level, sample_atoms
from edgefl.compression.stages import ValueStage
from edgefl.compression.wire import PayloadReader, to_little_endian
from edgefl.core.errors import CodecError
from edgefl.core.types import Array

REPEATS = 3000


def matrix(rows: int, columns: int, seed: int = 1) -> Array:
    return np.random.default_rng(seed).standard_t(3, size=(rows, columns)).astype(np.float32)


def drawn(values: Array, spectrum: Spectrum, budget: float, stage: ValueStage, rng: np.random.Generator) -> Array:
    parts = write_triples(values, spectrum, budget, stage, rng)
    body = b"".join(to_little_endian(part) for part in parts)
    return read_triples(PayloadReader(memoryview(body)), values.shape, type(stage))


@pytest.mark.parametrize(
    ("budget", "stage", "repeats"), [(2.5, Float32(), REPEATS), (1.5, Qsgd(bits=2, bucket=4), 1000)]
)
def test_the_mean_of_many_draws_is_the_matrix(budget: float, stage: ValueStage, repeats: int) -> None:
    values, rng = matrix(9, 8), np.random.default_rng(7)
    spectrum = compute_spectrum(values)
    total, squares = np.zeros(values.shape), np.zeros(values.shape)
    for _ in range(repeats):
        found = drawn(values, spectrum, budget, stage, rng)
        total += found
        squares += np.square(found, dtype=np.float64)
    mean = total / repeats
    errors = np.sqrt((squares / repeats - mean**2) / repeats)
    # 6 standard errors: a false alarm in one of these 144 numbers is less likely than one in a million.
    assert np.all(np.abs(mean - values) <= 6 * errors + 1e-5)


def test_diag_3_1_at_a_budget_of_one_keeps_the_first_three_times_in_four() -> None:
    values = np.zeros((4, 4), dtype=np.float32)
    values[0, 0], values[1, 1] = 3, 1
    rng, spectrum, kept = np.random.default_rng(1), compute_spectrum(values), 0
    for _ in range(1500):
        found = drawn(values, spectrum, 1, Float32(), rng)
        assert abs(found[0, 0] + found[1, 1] - 4) < 1e-5
        kept += found[0, 0] > 3
    assert abs(kept / 1500 - 0.75) < 5.2 * np.sqrt(0.75 * 0.25 / 1500)


@pytest.mark.parametrize("shape", [(30, 12), (12, 30)])
def test_the_weights_are_the_singular_values(shape: tuple[int, int]) -> None:
    values = matrix(*shape)
    expected = np.linalg.svd(values.astype(np.float64), compute_uv=False)
    np.testing.assert_allclose(compute_spectrum(values).weights, expected, rtol=1e-6)
    low_rank = (matrix(80, 4) @ matrix(4, 60, seed=2)).astype(np.float32)
    assert np.count_nonzero(compute_spectrum(low_rank).weights) == 4


@pytest.mark.parametrize("shape", [(30, 12), (12, 30)])
def test_the_atoms_are_orthonormal_and_add_up_to_the_matrix(shape: tuple[int, int]) -> None:
    values = matrix(*shape)
    norms, left, right = compute_triples(values, compute_spectrum(values), np.arange(12))
    np.testing.assert_allclose((left.T * norms) @ right, values, atol=1e-5)
    atoms = np.einsum("km,kn->kmn", left, right).reshape(12, -1)
    np.testing.assert_allclose(atoms @ atoms.T, np.eye(12), atol=1e-5)


@pytest.mark.parametrize("scale", [1e-45, 1e28])
def test_the_smallest_and_the_largest_numbers_have_a_spectrum_too(scale: float) -> None:
    values = (np.sign(matrix(8, 6)) * scale).astype(np.float32)
    found = drawn(values, compute_spectrum(values), 3, Float32(), np.random.default_rng(1))
    assert np.all(np.isfinite(found))


def test_the_expected_square_is_that_of_the_rule() -> None:
    values, rng = matrix(8, 6), np.random.default_rng(3)
    spectrum = compute_spectrum(values)
    at_level = compute_level(spectrum.weights, 2)
    squares = [
        float(
            np.square(
                np.maximum(spectrum.weights[np.concatenate(sample_atoms(spectrum.weights, at_level, rng))], at_level)
            ).sum()
        )
        for _ in range(50)
    ]
    found = [float(np.square(drawn(values, spectrum, 2, Float32(), rng)).sum()) for _ in range(50)]
    assert min(squares) == pytest.approx(min(found), rel=1e-5)
    assert max(squares) == pytest.approx(max(found), rel=1e-5)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"\x09", "number over 8"),
        (b"\x05", "5 pairs of vectors for a matrix of 9 x 8"),
        (b"\x01\x00\x00\x80\x7f", "singular value that is not finite"),
        (b"\x01\x00\x00\x80\x3f" + b"\x00\x00\xc0\x7f" * 9, "vector that is not finite"),
        (b"\x01\xff\xff\x7f\x7f" + b"\xff\xff\x7f\x7f" * 17, "beyond float32"),
        (b"\x01\x00\x00\x80\x3f" + bytes(9 * 4), "ends early"),
    ],
)
def test_triples_that_cannot_be_are_refused(body: bytes, message: str) -> None:
    with pytest.raises(CodecError, match=message):
        read_triples(PayloadReader(memoryview(body)), (9, 8), Float32)

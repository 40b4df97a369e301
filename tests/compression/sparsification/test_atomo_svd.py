"""Singular triples at random: right on average, whatever basis they were made of, and when entries are better."""

import numpy as np
import pytest

from edgefl.compression.codec import make_codec
from edgefl.compression.quantisation.rounding import Float32
from edgefl.compression.quantisation.stochastic_rounding import Qsgd
from edgefl.compression.sparsification.atomo import compute_level, sample_atoms
from edgefl.compression.sparsification.atomo_svd import (
    Spectrum,
    compute_spectrum,
    compute_triples,
    read_triples,
    write_triples,
)
from edgefl.compression.stages import ValueStage
from edgefl.compression.wire import PayloadReader, read_frame, to_little_endian
from edgefl.core.errors import CodecError
from edgefl.core.types import Array, ModelSpec, SparseTensor, TensorSpec

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


WHOLE, ENTRIES, TRIPLES = 0, 1, 2


def low_rank(rows: int, columns: int, rank: int, seed: int = 1) -> Array:
    rng = np.random.default_rng(seed)
    left, right = rng.standard_normal((rows, rank)), rng.standard_normal((rank, columns))
    return (left * 2.0 ** -np.arange(rank) @ right).astype(np.float32)


def one(values: Array) -> ModelSpec:
    return (TensorSpec(name="w", shape=values.shape),)


def body(spec: str, values: Array, seed: int = 1) -> bytes:
    return make_codec(spec, one(values)).encode({"w": values}, np.random.default_rng(seed))


def decoded(spec: str, values: Array, seed: int = 1) -> Array:
    found = make_codec(spec, one(values)).decode(body(spec, values, seed))["w"]
    return found.dense() if isinstance(found, SparseTensor) else found


def form(spec: str, values: Array) -> int:
    return read_frame(body(spec, values)).payload[0]


def test_at_the_rank_or_more_the_matrix_comes_back() -> None:
    values = low_rank(60, 40, 3)
    for seed in range(20):
        np.testing.assert_allclose(decoded("atomo-svd:3", values, seed), values, atol=1e-5)
    np.testing.assert_allclose(decoded("atomo-svd:5", values), values, atol=1e-5)


@pytest.mark.parametrize("rule", ["kernel", "out", "atomo"])
def test_kernels_of_any_rule_come_back_at_full_rank(rule: str) -> None:
    values = np.zeros((6, 8, 3, 5), dtype=np.float32)
    values[:4, :4, 1:2] = np.random.default_rng(1).standard_normal((4, 4, 1, 5))
    assert form(f"atomo-svd:5:{rule}", values) == TRIPLES + {"kernel": 0, "out": 1, "atomo": 2}[rule]
    # Outputs and columns alone: that is one atom by any of the rules.
    by_output, by_column = np.arange(1, 7), np.array([5, -1, 0.3, 2, 9])
    one_atom = np.broadcast_to(np.einsum("o,w->ow", by_output, by_column)[:, None, None], values.shape)
    one_atom = np.ascontiguousarray(one_atom, dtype=np.float32)
    np.testing.assert_allclose(decoded(f"atomo-svd:1:{rule}", one_atom), one_atom, rtol=1e-5)
    number = {"kernel": 0, "out": 1, "atomo": 2}[rule]
    assert form(f"atomo-svd:1:{rule}", one_atom) == TRIPLES + number


def test_a_larger_budget_does_not_lose_more() -> None:
    values = low_rank(60, 40, 12)
    errors = [
        np.mean([np.square(decoded(f"atomo-svd:{s}", values, seed) - values).sum() for seed in range(20)])
        for s in (1, 2, 4, 8, 12)
    ]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 1e-6


@pytest.mark.parametrize("spec", ["atomo-auto:3", "atomo-auto:3|fp16"])
def test_entries_take_about_as_many_bytes_as_the_triples_in_whose_place_they_are(spec: str) -> None:
    rng = np.random.default_rng(2)
    noise = rng.standard_t(2, size=(200, 150)).astype(np.float32)
    assert form(spec, noise) == ENTRIES
    triples = len(body(spec, low_rank(200, 150, 8)))
    assert 0.75 * triples < len(body(spec, noise)) < 1.4 * triples


def test_the_choice_is_the_papers_indicator_where_an_entry_costs_as_much_as_a_number() -> None:
    # Balanced, so that no probability is capped: nuclear norm * sqrt(m + n) against the sum of magnitudes.
    flat_spectrum = np.linalg.qr(np.random.default_rng(1).standard_normal((64, 64)))[0].astype(np.float32)
    spectrum = compute_spectrum(flat_spectrum)
    assert spectrum.weights.sum() * np.sqrt(128) > np.abs(flat_spectrum).sum()
    assert form("atomo-auto:3", flat_spectrum) == ENTRIES
    assert form("atomo-svd:3", flat_spectrum) == TRIPLES
    one_atom = low_rank(64, 64, 1)
    assert compute_spectrum(one_atom).weights.sum() * np.sqrt(128) < np.abs(one_atom).sum()
    assert form("atomo-auto:3", one_atom) == form("atomo-svd:3", one_atom) == TRIPLES


@pytest.mark.parametrize("shape", [(), (0,), (9,), (1, 50), (3, 3), (0, 4), (2, 1, 1, 1)])
def test_what_vectors_would_not_make_smaller_travels_whole(shape: tuple[int, ...]) -> None:
    values = np.asarray(np.random.default_rng(1).standard_normal(shape), dtype=np.float32)
    assert form("atomo-svd:2", values) == WHOLE
    assert np.array_equal(decoded("atomo-svd:2", values), values)


def test_a_matrix_of_zeros_takes_a_byte_or_two() -> None:
    zeros = np.zeros((50, 40), dtype=np.float32)
    assert len(read_frame(body("atomo-svd:2", zeros)).payload) == 2
    assert np.array_equal(decoded("atomo-svd:2", zeros), zeros)


def test_a_kernel_whose_matrix_would_be_too_wide_is_made_one_by_its_outputs() -> None:
    one_atom = np.ones((350, 350, 3, 3), dtype=np.float32)
    assert form("atomo-svd:1", one_atom) == TRIPLES + 1
    np.testing.assert_allclose(decoded("atomo-svd:1", one_atom), one_atom, rtol=1e-5)


def test_a_matrix_too_wide_to_decompose_is_refused_by_name_or_travels_as_entries() -> None:
    wide = np.ones((2049, 2049), dtype=np.float32)
    with pytest.raises(CodecError, match=r"tensor 'w': atomo-svd decomposes .* at most 2048, got 2049 x 2049: use"):
        body("atomo-svd:1", wide)
    assert form("atomo-auto:1", wide) == ENTRIES


@pytest.mark.parametrize("spec", ["atomo-svd:1", "ef|powersgd:1"])
def test_numbers_whose_products_would_be_infinite_are_refused_by_name(spec: str) -> None:
    name = spec.rsplit("|", maxsplit=1)[-1].split(":", maxsplit=1)[0]
    with pytest.raises(CodecError, match=rf"tensor 'w': {name} carries magnitudes up to 1e\+30, got 3e\+38"):
        body(spec, np.full((9, 9), 3e38, dtype=np.float32))

"""Atoms at random: right on average with the least variance, and on the wire."""

import numpy as np
import pytest
from hypothesis import given, settings, strategies
from hypothesis.extra.numpy import arrays

from edgefl.compression.codec import decode_body, make_codec
from edgefl.compression.quantisation.rounding import Float32
from edgefl.compression.sparsification.atomo import (
    compute_expected_square,
    compute_float32_level,
    compute_level,
    compute_probabilities,
    read_entries,
    sample_atoms,
    transform_cosines,
)
from edgefl.compression.wire import PayloadReader, read_frame, write_frame
from edgefl.core.errors import CodecError
from edgefl.core.types import Array, SparseTensor, TensorSpec

# Zeros or numbers of 1e-30 to 1e30, so that no square of one is lost in float64.
weights = arrays(
    np.float32,
    strategies.integers(1, 40),
    elements=strategies.one_of(
        strategies.just(0.0), strategies.floats(-30, 30).map(lambda exponent: float(np.float32(10**exponent)))
    ),
)


class FirstMark:
    """A generator whose only number is where the first mark stands."""

    def __init__(self, at: float) -> None:
        self._at = at

    def random(self) -> float:
        return self._at


def water_filling(magnitudes: Array, budget: float) -> Array:
    return compute_probabilities(magnitudes, compute_level(magnitudes, budget))


@pytest.mark.parametrize(
    ("atoms", "budget", "chances", "square"),
    [
        pytest.param([4, 3, 2, 1], 2, [0.8, 0.6, 0.4, 0.2], 50, id="T1"),
        pytest.param([10, 3, 2, 1], 2, [1, 1 / 2, 1 / 3, 1 / 6], 136, id="T2"),
        pytest.param([8, 4, 1, 1], 3, [1, 1, 0.5, 0.5], 84, id="T3"),
        pytest.param([3, 1], 1.5, [1, 0.5], 11, id="T4"),
        pytest.param([1, 1, 1, 1], 2, [0.5, 0.5, 0.5, 0.5], 8, id="T5"),
        pytest.param([5, 0, 0, 0], 2, [1, 0, 0, 0], 25, id="T6"),
        pytest.param([2, -2, 1], 2, [0.8, 0.8, 0.4], 12.5, id="T7"),
        pytest.param([3, 1], 1, [0.75, 0.25], 16, id="diag(3, 1)"),
        pytest.param([0.3, -0.4, 0.5, 0.1], 1.820364, [0.42008, 0.56011, 0.70014, 0.14003], None, id="T8 1-bit QSGD"),
        pytest.param([0.3, -0.4, 0.5, 0.1], 2.6, [0.6, 0.8, 1, 0.2], None, id="T8 TernGrad"),
        pytest.param([1, 2, 10, 3], 2, [1 / 6, 1 / 3, 1, 1 / 2], 136, id="T2 in another order"),
    ],
)
def test_the_probabilities_and_the_expected_square_are_those_of_the_vectors(
    atoms: list[float], budget: float, chances: list[float], square: float | None
) -> None:
    magnitudes = np.abs(np.array(atoms, dtype=np.float64))
    np.testing.assert_allclose(water_filling(magnitudes, budget), chances, atol=1e-5)
    if square is not None:
        assert compute_expected_square(magnitudes, compute_level(magnitudes, budget)) == pytest.approx(square)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(weights, strategies.floats(0.01, 50))
def test_the_probabilities_add_up_to_the_budget_and_fall_with_the_magnitude(magnitudes: Array, budget: float) -> None:
    chances = water_filling(magnitudes, budget)
    assert chances.sum() == pytest.approx(min(budget, np.count_nonzero(magnitudes)), rel=1e-9)
    assert np.all(np.diff(chances[np.argsort(magnitudes, kind="stable")]) >= 0)
    assert np.all(chances[magnitudes == 0] == 0)
    np.testing.assert_allclose(water_filling(magnitudes.astype(np.float64) * 8, budget), chances, rtol=1e-12)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(weights, strategies.floats(0.01, 40), strategies.floats(0.01, 20))
def test_the_expected_square_does_not_grow_with_the_budget(magnitudes: Array, budget: float, more: float) -> None:
    less, greater = (
        compute_expected_square(magnitudes, compute_level(magnitudes, s)) for s in (budget, budget + more)
    )
    assert greater <= less * (1 + 1e-9)


def test_no_other_probabilities_within_the_budget_have_a_smaller_expected_square() -> None:
    rng = np.random.default_rng(5)
    magnitudes, budget = np.array([9, 5, 3, 2, 1, 0.2]), 2.5
    best = compute_expected_square(magnitudes, compute_level(magnitudes, budget))
    others = rng.dirichlet(np.ones(6), 50_000) * budget
    others = others[others.max(axis=1) <= 1]
    assert len(others) > 1000
    assert np.all((magnitudes**2 / others).sum(axis=1) >= best)


def test_with_a_budget_for_all_that_is_not_zero_all_of_it_is_certain() -> None:
    magnitudes = np.array([1e-45, 0, 3e38, 1], dtype=np.float32)
    for budget in (3, 3.5, 1e12):
        assert compute_probabilities(magnitudes, compute_level(magnitudes, budget)).tolist() == [1, 0, 1, 1]
    assert compute_level(np.zeros(3), 1) == compute_level(np.zeros(0), 1) == 1


def test_small_atoms_beside_a_huge_one_keep_their_probabilities() -> None:
    chances = water_filling(np.array([1e30, 1e-9, 3e-9]), 2)
    np.testing.assert_allclose(chances, [1, 0.25, 0.75])


def test_each_atom_is_kept_for_exactly_its_probability_of_the_places_of_the_first_mark() -> None:
    magnitudes = np.array([3, 0, 1, 4, 100, 2, 5, 1, 0, 4], dtype=np.float32)
    at_level = 5.0 / 0.75
    kept = np.zeros(10)
    num_places = 3000
    for place in range(num_places):
        certain, chosen = sample_atoms(magnitudes, at_level, FirstMark((place + 0.5) / num_places))
        assert certain.tolist() == [4]
        # 3, 1, 4, 2, 5, 1 and 4 at 0.15 each add up to 3.
        assert len(chosen) == 3
        kept[certain] += 1
        kept[chosen] += 1
    np.testing.assert_allclose(kept / num_places, np.minimum(magnitudes / at_level, 1), atol=1e-9)


def test_the_number_of_kept_atoms_is_the_budget_rounded_up_or_down() -> None:
    rng = np.random.default_rng(3)
    magnitudes = np.abs(rng.standard_t(2, size=700_001)).astype(np.float32)
    for budget in (1234.0, 1234.5):
        counts = {sum(map(len, sample_atoms(magnitudes, compute_level(magnitudes, budget), rng))) for _ in range(6)}
        assert counts <= {1234, int(np.ceil(budget))}
        assert counts


def test_kept_places_ascend_and_an_atom_is_kept_once_over_the_bounds_of_chunks() -> None:
    rng = np.random.default_rng(4)
    magnitudes = np.abs(rng.standard_normal(3 * 2**18)).astype(np.float32)
    certain, chosen = sample_atoms(magnitudes, compute_level(magnitudes, 500_000), rng)
    assert np.all(np.diff(certain) > 0)
    assert np.all(np.diff(chosen) > 0)
    assert np.intersect1d(certain, chosen).size == 0
    # The last of a chunk and the first of the next one are neighbours on the line as all others are.
    alike = np.ones(2**18 + 8, dtype=np.float32)
    _, chosen = sample_atoms(alike, 2.0, FirstMark(0.5))
    assert set(np.diff(chosen).tolist()) == {2}


def test_the_level_that_travels_is_rounded_up() -> None:
    magnitudes = np.array([1, 1, 1], dtype=np.float32)
    exact = compute_level(magnitudes, 0.7)
    found = compute_float32_level(magnitudes, 0.7)
    assert exact <= float(found) < exact * (1 + 2**-22)
    assert compute_float32_level(np.array([2, 4], dtype=np.float32), 2) == 2


def test_a_level_beyond_single_precision_is_refused() -> None:
    with pytest.raises(CodecError, match=r"atomo multiplies up to 3\.4e\+39, beyond float32: use topk, or a larger"):
        compute_float32_level(np.array([3.4e38, 0], dtype=np.float32), 0.1)


G = np.array([0.3, -0.4, 0.5, 0.1], dtype=np.float32)
REPEATS = 20_000
# Four entries of each of five codecs: a false alarm is less likely than one in a million.
STANDARD_ERRORS = 5.6


def body(spec: str, values: Array, seed: int = 1) -> bytes:
    shapes = (TensorSpec(name="w", shape=values.shape),)
    return make_codec(spec, shapes).encode({"w": values}, np.random.default_rng(seed))


def decoded(spec: str, values: Array, seed: int = 1) -> SparseTensor:
    shapes = (TensorSpec(name="w", shape=values.shape),)
    found = make_codec(spec, shapes).decode(body(spec, values, seed))["w"]
    assert isinstance(found, SparseTensor)
    return found


@pytest.mark.parametrize(
    "spec", ["atomo:0.4551", "atomo:0.1234", "atomo:51987", "atomo:0.7123|qsgd:2:1", "atomo:0.9"]
)
def test_the_mean_of_many_draws_is_the_tensor(spec: str) -> None:
    # No budget puts a whole number of marks on a repetition, or each one would be drawn alike.
    found = decoded(spec, np.tile(G, REPEATS)).dense().reshape(REPEATS, 4).astype(np.float64)
    errors = found.std(axis=0) / np.sqrt(REPEATS)
    assert np.all(np.abs(found.mean(axis=0) - G) <= STANDARD_ERRORS * errors + 1e-7)


def test_a_budget_below_one_is_a_share_of_the_entries_and_at_least_one_entry() -> None:
    values = np.random.default_rng(1).standard_normal(1000).astype(np.float32)
    assert len(decoded("atomo:0.02", values).values) == 20
    assert len(decoded("atomo:20", values).values) == 20
    assert len(decoded("atomo:0.0001", values).values) == 1
    assert decoded("atomo:0.01", G[:1]).values.tolist() == G[:1].tolist()


def test_an_entry_that_chance_has_chosen_comes_back_at_the_level_with_its_sign() -> None:
    values = np.array([0.01, 10, -3, -2, 1], dtype=np.float32)
    level = np.float32(6.01)
    for seed in range(50):
        found = decoded("atomo:2", values, seed)
        assert found.indices[:-1].tolist() in ([1], [0])
        expected = np.where(np.abs(values) > level, values, np.sign(values) * level)[found.indices]
        np.testing.assert_allclose(found.values, expected, rtol=1e-6)


def test_entries_that_are_certain_pass_the_value_stage_and_the_others_need_none() -> None:
    values = np.array([100.3, -50.7, 1, 1, 1, -1], dtype=np.float32)
    found = decoded("atomo:3|int8", values)
    assert found.values[:2].tolist() == [np.float32(100.3), np.float32(np.rint(-50.7 / 100.3 * 127) / 127 * 100.3)]
    assert np.abs(found.values[2:]).tolist() == [4]


def test_with_a_budget_for_all_entries_nothing_is_lost() -> None:
    values = np.random.default_rng(1).standard_normal((5, 7, 3)).astype(np.float32)
    values[0] = 0
    assert np.array_equal(decoded("atomo:105", values).dense(), values)


def test_an_entry_that_chance_has_chosen_takes_about_nine_bits_at_one_in_a_hundred() -> None:
    values = np.random.default_rng(1).laplace(size=100_000).astype(np.float32)
    # 8.08 bits of entropy if places were spread evenly, and a sign.
    assert 8 * len(body("atomo:0.01", values)) / 1000 < 9.5


@pytest.mark.parametrize(
    ("damaged", "message"),
    [
        (b"\x05", "number over 4"),
        (b"\x04\x05", "number over 4"),
        (b"\x04\x00\x00\x00\x80\x7f\x00", "level inf, expected a finite number"),
        (b"\x04\x00\x00\x00\xc0\x7f\x00", "level nan, expected a finite number"),
        (b"\x04\x00\x00\x00\x80\x3f", "ends early"),
        (b"\x04\x04" + bytes(15), "ends early"),
    ],
)
def test_entries_that_cannot_be_are_refused(damaged: bytes, message: str) -> None:
    with pytest.raises(CodecError, match=message):
        read_entries(PayloadReader(memoryview(damaged)), TensorSpec(name="w", shape=(4,)), Float32)


def cosines(size: int) -> Array:
    """The orthonormal transform as a matrix, by its definition."""
    places = np.arange(size)
    matrix = np.cos(np.pi * np.outer(places, places + 0.5) / size) * np.sqrt(2 / size)
    matrix[:1] /= np.sqrt(2)
    return matrix


@pytest.mark.parametrize("shape", [(), (1,), (2,), (7, 6), (3, 1, 8, 5)])
def test_the_cosine_transform_is_its_definition_along_every_axis_and_has_an_inverse(shape: tuple[int, ...]) -> None:
    values = np.asarray(np.random.default_rng(1).normal(size=shape), dtype=np.float32)
    expected = values.astype(np.float64)
    for axis, size in enumerate(shape):
        expected = np.moveaxis(np.moveaxis(expected, axis, -1) @ cosines(size).T, -1, axis)
    np.testing.assert_allclose(transform_cosines(values), expected, atol=1e-6)
    np.testing.assert_allclose(transform_cosines(transform_cosines(values), is_inverse=True), values, atol=1e-6)


def test_an_axis_over_65536_is_transformed_in_pieces_as_orthonormal_as_one() -> None:
    values = np.random.default_rng(1).normal(size=2**16 + 3).astype(np.float32)
    found = transform_cosines(values)
    np.testing.assert_allclose(found[2**16 :], cosines(3) @ values[2**16 :], atol=1e-6)
    np.testing.assert_allclose(transform_cosines(found, is_inverse=True), values, atol=1e-5)


def test_the_variance_of_cosine_atoms_is_that_of_theory_and_smooth_tensors_have_less_than_by_entries() -> None:
    rows, columns = np.meshgrid(np.linspace(0, 1, 12), np.linspace(0, 1, 10), indexing="ij")
    smooth = (np.exp(-4 * (rows - 0.3) ** 2 - 3 * (columns - 0.6) ** 2) - 0.4).astype(np.float32)
    shapes = (TensorSpec(name="w", shape=smooth.shape),)
    theory, measured = {}, {}
    for name, weights in (("atomo", smooth), ("atomo-dct", transform_cosines(smooth))):
        magnitudes, codec, luck = (
            np.abs(weights).reshape(-1),
            make_codec(f"{name}:6", shapes),
            np.random.default_rng(7),
        )
        square = compute_expected_square(magnitudes, compute_level(magnitudes, 6))
        theory[name] = square - float(np.square(smooth, dtype=np.float64).sum())
        decoded = [codec.decode(codec.encode({"w": smooth}, luck))["w"] for _ in range(400)]
        dense = [one.dense() if isinstance(one, SparseTensor) else one for one in decoded]
        errors = [float(np.square(one - smooth, dtype=np.float64).sum()) for one in dense]
        measured[name] = np.mean(errors)
        assert abs(measured[name] - theory[name]) < 6 * np.std(errors) / np.sqrt(len(errors)) + 1e-3 * theory[name]
    assert theory["atomo-dct"] < theory["atomo"] / 20


def test_cosine_coefficients_beyond_single_precision_are_refused() -> None:
    shapes = (TensorSpec(name="w", shape=(4,)),)
    with pytest.raises(CodecError, match=r"tensor 'w': atomo-dct carries magnitudes up to 1e\+30, got 3e\+38: use"):
        make_codec("atomo-dct:2", shapes).encode({"w": np.full(4, 3e38, np.float32)}, np.random.default_rng(1))
    entries = make_codec("atomo:4", shapes).encode({"w": np.full(4, 3e38, np.float32)}, np.random.default_rng(1))
    frame = read_frame(entries)
    with pytest.raises(CodecError, match=r"coefficients make numbers up to 1.2e\+39, beyond float32"):
        decode_body(write_frame([21], 1, [np.frombuffer(frame.payload, dtype=np.uint8)]), shapes)

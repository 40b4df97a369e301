"""The probabilities of least variance on ATOMO's vectors, and a draw that keeps to them exactly."""

import numpy as np
import pytest
from hypothesis import given, settings, strategies
from hypothesis.extra.numpy import arrays

from edgefl.compression.sparsification.atomo_sampling import (
    compute_expected_square,
    compute_float32_level,
    compute_level,
    compute_probabilities,
    sample_atoms,
)
from edgefl.core.errors import CodecError
from edgefl.core.types import Array

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

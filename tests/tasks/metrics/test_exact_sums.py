"""Sums without rounding."""

from fractions import Fraction

import numpy as np
import pytest

from edgefl.tasks.metrics.exact_sums import LIMB_BITS, NUM_LIMBS, read_sum, sum_exactly, sum_products


def test_a_sum_is_what_exact_arithmetic_says_whatever_cancels():
    rng = np.random.default_rng(2)
    values = np.concatenate([
        rng.normal(size=300) * 2.0 ** rng.integers(-150, 280, 300), [1e60, 1.0, -1e60, 2.0**-256, -(2.0**299)],
    ])  # fmt: skip
    sums = sum_exactly(values[:, None])[0]
    assert read_sum(sums) == sum(map(Fraction, values.tolist()))
    assert read_sum(sums + sum_exactly(-values[:, None])[0]) == 0
    # Limbs are carried on, so that many may be added.
    assert all(0 <= limb < 1 << LIMB_BITS for limb in sums[: NUM_LIMBS - 1].tolist())


def test_products_of_two_are_exact_and_of_three_nearly():
    first, second, third = np.random.default_rng(3).normal(1e9, 1.0, (3, 50, 2))
    pairs = sum_products(first, second)
    triples = sum_products(first, second, third)
    for column in range(2):
        rows = [list(map(Fraction, each[:, column].tolist())) for each in (first, second, third)]
        assert read_sum(pairs[column]) == sum(a * b for a, b, _ in zip(*rows, strict=True))
        exact = sum(a * b * c for a, b, c in zip(*rows, strict=True))
        assert abs(read_sum(triples[column]) - exact) <= exact / 2**100


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf, 2.0**300, -1e300])
def test_a_sum_of_what_is_not_finite_has_no_value_also_after_more_is_added(wrong):
    sums = sum_exactly(np.array([[1.0], [wrong]])) + sum_exactly(np.ones((4, 1)))
    assert read_sum(sums[0]) is None


def test_what_is_less_than_the_unit_is_cut_off():
    assert read_sum(sum_exactly(np.array([[1.5 * 2.0**-256], [-(2.0**-257)], [5e-324]]))[0]) == Fraction(1, 2**256)

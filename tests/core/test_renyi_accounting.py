"""ε of DP-SGD against sums in closed form, and against dp-accounting where it is installed."""

import math
from importlib.util import find_spec

import numpy as np
import pytest

from edgefl.core.errors import ConfigError
from edgefl.core.renyi_accounting import ORDERS, compute_divergences, compute_epsilon, find_noise
from edgefl.core.types import MIN_NOISE
from edgefl.engine.privacy_accounting import import_accounting

RUNS = [
    # sampling, noise, steps; the second is of the tutorial of TensorFlow Privacy: MNIST, 60 epochs
    (0.01, 1.1, 1000),
    (256 / 60_000, 1.1, 60 * 234),
    (0.1, 2.0, 500),
    (0.004, 0.6, 5000),
    (0.05, 4.0, 10_000),
    (1.0, 5.0, 10),
]


@pytest.mark.parametrize(("sampling", "noise"), [(0.01, 1.1), (0.3, 0.7), (0.9, 3.0), (0.05, 0.6)])
def test_divergences_of_whole_orders_are_the_binomial_sums_of_the_paper(sampling, noise):
    found = dict(zip(ORDERS, compute_divergences(sampling, noise, 1), strict=True))
    for order in (2, 3, 8, 20):
        total = sum(
            math.comb(order, k) * (1 - sampling) ** (order - k) * sampling**k * math.exp((k * k - k) / (2 * noise**2))
            for k in range(order + 1)
        )
        assert found[order] == pytest.approx(math.log(total) / (order - 1), rel=1e-9)


def test_steps_of_all_examples_are_plain_gaussian_mechanisms():
    np.testing.assert_allclose(compute_divergences(1.0, 5.0, 7), [7 * order / 50 for order in ORDERS])


def test_the_logarithm_of_the_moments_is_convex_in_the_order():
    """Which it is for every mechanism: no order between others is off."""
    moments = compute_divergences(0.1, 0.8, 1) * (np.array(ORDERS) - 1.0)
    slopes = np.diff(moments) / np.diff(ORDERS)
    assert (np.diff(slopes) > -1e-9).all()


@pytest.mark.skipif(
    find_spec("dp_accounting") is None,
    reason="dp-accounting is not installed: pip install -e '.[privacy]' -c constraints.txt",
)
@pytest.mark.parametrize(("sampling", "noise", "steps"), RUNS)
def test_epsilon_is_that_of_dp_accounting(sampling, noise, steps):
    """At whole orders to the digit; it bounds the others from those beside them, and ours is no higher there."""
    accounting, is_whole = import_accounting(), np.array(ORDERS) % 1 == 0
    event = accounting.GaussianDpEvent(noise)
    event = event if sampling == 1.0 else accounting.PoissonSampledDpEvent(sampling, event)
    ours, epsilons = compute_divergences(sampling, noise, steps), []
    for orders in (np.array(ORDERS)[is_whole], np.array(ORDERS)):
        accountant = accounting.rdp.RdpAccountant(list(orders))
        accountant.compose(event, steps)
        epsilons.append(accountant.get_epsilon(1e-5))
    assert compute_epsilon(np.where(is_whole, ours, np.inf), 1e-5) == pytest.approx(epsilons[0], abs=1e-6)
    accountant = accounting.pld.PLDAccountant()
    accountant.compose(event, steps)
    assert accountant.get_epsilon(1e-5) <= compute_epsilon(ours, 1e-5) <= epsilons[1] + 1e-6


def test_the_noise_found_fits_and_hardly_less_does_not():
    noise = find_noise(4.0, 1e-5, 0.05, 300)
    assert compute_epsilon(compute_divergences(0.05, noise, 300), 1e-5) <= 4.0
    assert compute_epsilon(compute_divergences(0.05, noise * 0.999, 300), 1e-5) > 4.0


def test_a_large_budget_has_the_least_noise_that_is_allowed():
    assert find_noise(1000.0, 1e-5, 0.05, 3) == MIN_NOISE


def test_a_budget_that_no_noise_keeps_is_refused_and_nothing_costs_nothing():
    with pytest.raises(ConfigError, match="no noise keeps 300 steps within epsilon = 1e-07"):
        find_noise(1e-7, 1e-12, 0.05, 300)
    assert compute_epsilon(np.zeros(len(ORDERS)), 1e-5) == 0.0

"""Epsilon of releases, against dp-accounting called directly and against published figures."""

import math
import subprocess
import sys
from importlib.util import find_spec

import pytest

from edgefl.core.errors import ConfigError
from edgefl.engine.privacy_accounting import (
    compute_epsilon,
    compute_gaussian_epsilon,
    count_releases,
    find_gaussian_noise,
    find_noise,
    import_accounting,
)

pytestmark = pytest.mark.skipif(
    find_spec("dp_accounting") is None,
    reason="dp-accounting is not installed: pip install -e '.[privacy]' -c constraints.txt",
)

STDERR_STAYS_OPEN = """
import io, logging, logging.config, sys
from edgefl.engine.privacy_accounting import compute_epsilon
stderr = sys.stderr = io.StringIO()
compute_epsilon(0.3, 1e-5, 0.1, 3, 1)  # some orders do not converge
sys.stderr = sys.__stderr__
assert logging.root.handlers == [], logging.root.handlers
logging.config.dictConfig({"version": 1})
assert not stderr.closed
assert stderr.getvalue() == "", stderr.getvalue()
print("and ours is not", end="", file=sys.__stderr__)
"""


@pytest.fixture
def accounting():
    return import_accounting()


def test_the_package_closes_no_stderr_of_others_and_adds_no_handler():
    done = subprocess.run(
        [sys.executable, "-c", STDERR_STAYS_OPEN], check=False, capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stderr) == (0, "and ours is not")


def test_epsilon_is_that_of_the_events_composed_by_hand(accounting):
    accountant = accounting.rdp.RdpAccountant()
    for _ in range(7):
        accountant.compose(accounting.PoissonSampledDpEvent(0.05, accounting.GaussianDpEvent(1.3)))
    for _ in range(2):
        accountant.compose(accounting.GaussianDpEvent(1.3))
    assert compute_epsilon(1.3, 1e-5, 0.05, 7, 2) == pytest.approx(accountant.get_epsilon(1e-5), abs=1e-9)


def test_without_a_sample_nothing_is_amplified(accounting):
    for sampling in (None, 1.0):
        accountant = accounting.rdp.RdpAccountant().compose(accounting.GaussianDpEvent(2.0), 30)
        assert compute_epsilon(2.0, 1e-5, sampling, 30, 0) == pytest.approx(accountant.get_epsilon(1e-5), abs=1e-9)
    assert compute_epsilon(2.0, 1e-5, 0.1, 30, 0) < compute_epsilon(2.0, 1e-5, None, 30, 0) / 4


def test_a_gaussian_has_the_published_renyi_divergence():
    # Mironov 2017: order/(2 noise²) for sensitivity 1; Theorem 21 of Balle et al. 2020 converts.
    noise, delta, number = 5.0, 1e-5, 10
    orders = [1 + step / 100 for step in range(10, 6400)]
    best = min(
        number * order / (2 * noise**2) + math.log1p(-1 / order) - math.log(delta * order) / (order - 1)
        for order in orders
    )
    assert compute_epsilon(noise, delta, None, number, 0) == pytest.approx(best, rel=5e-3)


def test_the_tutorial_of_tensorflow_privacy_comes_to_the_same_epsilon():
    # MNIST: 60,000 examples, batches of 250, noise multiplier 1.3, 15 epochs, delta 1e-5: epsilon 1.19, as published
    # with the conversion of Mironov 2017; the one of today is tighter.
    found = compute_epsilon(1.3, 1e-5, 250 / 60_000, 15 * 240, 0)
    assert 0.9 < found <= 1.19


@pytest.mark.parametrize("sampling", [None, 0.1])
def test_the_noise_that_is_found_fits_and_hardly_less_would(sampling):
    noise = find_noise(8.0, 1e-5, sampling, 100)
    assert compute_epsilon(noise, 1e-5, sampling, 100, 0) <= 8.0
    assert compute_epsilon(noise - 0.01, 1e-5, sampling, 100, 0) > 8.0
    assert compute_epsilon(noise, 1e-5, sampling, 101, 0) > 8.0


def test_releases_that_fit_are_counted():
    number = count_releases(lambda number: compute_epsilon(3.0, 1e-5, None, number, 0), 4.0)
    assert compute_epsilon(3.0, 1e-5, None, number, 0) <= 4.0 < compute_epsilon(3.0, 1e-5, None, number + 1, 0)
    assert count_releases(lambda number: compute_epsilon(0.5, 1e-5, None, number, 0), 0.01) == 0


def test_a_budget_that_no_noise_keeps_is_refused():
    with pytest.raises(ConfigError, match=r"no noise keeps 1000000 rounds within epsilon = 1e-09"):
        find_noise(1e-9, 1e-9, None, 1_000_000)


def test_a_single_gaussian_is_counted_exactly_and_below_its_renyi_bound(accounting):
    # Balle and Wang, 2018, theorem 8: delta is the difference of two normal distribution functions.
    for noise in (0.7, 1.0, 4.0):
        epsilon = compute_gaussian_epsilon(noise, 1e-5)
        below, above = (
            0.5 * math.erfc(-(side / (2 * noise) - epsilon * noise) / math.sqrt(2)) for side in (1.0, -1.0)
        )
        assert below - math.exp(epsilon) * above == pytest.approx(1e-5, rel=1e-3)
        assert epsilon < compute_epsilon(noise, 1e-5, None, 1, 0) < epsilon * 1.25
        assert find_gaussian_noise(epsilon, 1e-5) == pytest.approx(noise, rel=1e-6)
        by_loss = accounting.pld.PLDAccountant().compose(accounting.GaussianDpEvent(noise)).get_epsilon(1e-5)
        assert epsilon == pytest.approx(by_loss, abs=1e-3)

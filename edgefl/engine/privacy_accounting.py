"""Accounting of differential privacy: ε of releases, and the noise for a budget, by dp-accounting.

Releases are Gaussian mechanisms, of all devices or of a Poisson sample of them, composed by Rényi differential
privacy (Mironov, 2017; Mironov, Talwar, Zhang, 2019). Neighbours are fleets in one of which a device takes part in no
round.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from edgefl.core.errors import ConfigError, MissingPackageError, format_install_command

NOISE_TOLERANCE = 1e-4
"""Of a noise multiplier that is found for a budget; the one found is never too small."""
MAX_COUNTED = 1_000_000
"""Releases up to which it is counted how many fit into a budget."""


@cache
def compute_epsilon(noise: float, delta: float, sampling: float | None, sampled: int, repeated: int) -> float:
    """Returns ε at `delta` of some releases.

    Args:
        noise: the noise multiplier, standard deviation over sensitivity.
        delta: δ.
        sampling: probability that a device takes part in a first release; None or 1 claims no amplification.
        sampled: number of first releases.
        repeated: number of further releases of the same versions, which are not amplified.

    Raises:
        MissingPackageError: dp-accounting is not installed.
    """
    if sampled + repeated == 0:
        return 0.0
    accounting = import_accounting()
    accountant = accounting.rdp.RdpAccountant()
    with _quiet():
        if sampled:
            accountant.compose(_make_event(noise, sampling), sampled)
        if repeated:
            accountant.compose(_make_event(noise, None), repeated)
        return float(accountant.get_epsilon(delta))


@cache
def find_noise(epsilon: float, delta: float, sampling: float | None, releases: int) -> float:
    """Returns the least noise multiplier with which some releases fit into a budget.

    Raises:
        ConfigError: there is none.
        MissingPackageError: dp-accounting is not installed.
    """
    accounting = import_accounting()
    try:
        with _quiet():
            noise = accounting.calibrate_dp_mechanism(
                accounting.rdp.RdpAccountant,
                lambda noise: accounting.SelfComposedDpEvent(_make_event(noise, sampling), releases),
                epsilon,
                delta,
                tol=NOISE_TOLERANCE,
            )
    except accounting.mechanism_calibration.NoBracketIntervalFoundError:
        raise ConfigError(
            f"no noise keeps {releases} rounds within epsilon = {epsilon:g} at delta = {delta:g}; "
            "give a larger budget"
        ) from None
    return float(noise)


@cache
def compute_gaussian_epsilon(noise: float, delta: float) -> float:
    """Returns ε at `delta` of a single Gaussian mechanism, exactly; correlated noise of all rounds together is one.

    Args:
        noise: standard deviation over sensitivity.
        delta: δ.

    Raises:
        MissingPackageError: dp-accounting is not installed.

    Source: Balle and Wang, Improving the Gaussian Mechanism for Differential Privacy, ICML 2018.
    """
    return float(import_accounting().get_epsilon_gaussian(noise, delta))


@cache
def find_gaussian_noise(epsilon: float, delta: float) -> float:
    """Returns the least standard deviation over sensitivity of a single Gaussian mechanism within a budget."""
    return float(import_accounting().get_sigma_gaussian(epsilon, delta))


def count_releases(compute: Callable[[int], float], epsilon: float) -> int:
    """Returns how many releases fit into a budget; at most `MAX_COUNTED`.

    Args:
        compute: number of releases -> ε that they spend.
        epsilon: the budget.
    """
    low, high = 0, 1
    while high < MAX_COUNTED and compute(high) <= epsilon:
        low, high = high, min(MAX_COUNTED, 2 * high)
    if high == MAX_COUNTED and compute(high) <= epsilon:
        return high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if compute(middle) <= epsilon else (low, middle)
    return low


def _make_event(noise: float, sampling: float | None) -> Any:
    accounting = import_accounting()
    event = accounting.GaussianDpEvent(noise)
    return event if sampling is None or sampling == 1 else accounting.PoissonSampledDpEvent(sampling, event)


def import_accounting() -> Any:
    """Returns dp-accounting, whose logger holds no stream of ours.

    The handler of absl keeps the stderr of its import, and closes it with itself, as `logging.config` closes all
    handlers: a stream that replaces stderr for a while would be closed under its owner.

    Raises:
        MissingPackageError: it is not installed.
    """
    try:
        import dp_accounting  # noqa: PLC0415 only private runs need it
        import dp_accounting.rdp  # noqa: PLC0415 likewise
        from absl import logging as absl_logging  # noqa: PLC0415 likewise
    except ModuleNotFoundError:
        raise MissingPackageError(f"privacy needs dp-accounting: {format_install_command('dp_accounting')}") from None
    absl_logging.get_absl_handler().python_handler.stream = sys.__stderr__
    return dp_accounting


@contextmanager
def _quiet() -> Iterator[None]:
    """Silences a warning for each Rényi order that does not converge: ε is the least over the others."""
    logger, handler = logging.getLogger("absl"), logging.NullHandler()
    level = logger.level
    logger.setLevel(logging.ERROR)
    logging.root.addHandler(handler)  # without any, absl would add one of its own to stderr, to stay
    try:
        yield
    finally:
        logging.root.removeHandler(handler)
        logger.setLevel(level)

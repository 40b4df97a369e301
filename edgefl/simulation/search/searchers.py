"""Spaces of settings, and who proposes the values of the next trial: at random, or Optuna.

What a searcher proposes follows from the seed and the trials before it alone, so a search that was stopped goes on as
it would have.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from edgefl.core.errors import ConfigError, MissingPackageError, format_install_command
from edgefl.core.types import derive_rng

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution
    from optuna.trial import FrozenTrial

_NUMBER = r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?"
_RANGE = re.compile(rf"(?P<low>{_NUMBER}?)\.\.(?P<high>{_NUMBER})(?P<log>:log)?")
_MAX_NUMBER_CHARS = 40
SIGNIFICANT_DIGITS = 4
"""Of a proposed number: it stands in the run's name, and in the table."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """Numbers from `low` to `high`, both included; whole ones with `is_int`, even in the logarithm with `is_log`."""

    low: float
    high: float
    is_int: bool = False
    is_log: bool = False

    def __str__(self) -> str:
        return f"{self.low:g}..{self.high:g}{':log' if self.is_log else ''}"

    def round(self, value: float) -> float:
        """Returns a value with few digits, in the range."""
        value = round(value) if self.is_int else float(f"{value:.{SIGNIFICANT_DIGITS}g}")
        return min(max(value, self.low), self.high)


Choices = tuple[Any, ...]
Space = Mapping[str, Choices | Range]


def parse_range(setting: str, text: str) -> Range | None:
    """Returns the range in `LOW..HIGH` or `LOW..HIGH:log`; None for anything else.

    Raises:
        ConfigError: a range that makes no sense.
    """
    match = _RANGE.fullmatch(text.strip())
    if match is None or max(map(len, match.groups(""))) > _MAX_NUMBER_CHARS:
        return None
    is_int = all(re.fullmatch(r"[+-]?\d{1,15}", match[name]) for name in ("low", "high"))
    low, high = ((int if is_int else float)(match[name]) for name in ("low", "high"))
    if not low < high or not math.isfinite(high - low) or (match["log"] and low <= 0):
        raise ConfigError(
            f"--set {setting}: a range must be LOW..HIGH with LOW < HIGH, and LOW > 0 with :log, got {text.strip()!r}"
        )
    return Range(low=low, high=high, is_int=is_int, is_log=match["log"] is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A proposal and what it came to.

    Attributes:
        values: by setting.
        is_ended: all its runs have ended.
        value: of the metric, less is better; None of one that failed, or has not ended.
        stopped_at: the round at which it was stopped early; None of one that was not.
    """

    values: Mapping[str, Any]
    is_ended: bool
    value: float | None = None
    stopped_at: int | None = None


Searcher = Callable[[Space, Sequence[Trial], int], dict[str, Any]]
"""(space, trials so far, seed) -> values of the next trial."""


def propose_at_random(space: Space, trials: Sequence[Trial], seed: int) -> dict[str, Any]:
    """Returns values that are drawn each on its own, evenly over its choices or its range."""
    rng = derive_rng("random-search", seed, len(trials))
    return {setting: _draw(domain, rng) for setting, domain in space.items()}


def _draw(domain: Choices | Range, rng: np.random.Generator) -> Any:
    if not isinstance(domain, Range):
        return domain[int(rng.integers(len(domain)))]
    if domain.is_log:
        return domain.round(math.exp(rng.uniform(math.log(domain.low), math.log(domain.high))))
    if domain.is_int:
        return int(rng.integers(int(domain.low), int(domain.high) + 1))
    return domain.round(rng.uniform(domain.low, domain.high))


def propose_by_optuna(space: Space, trials: Sequence[Trial], seed: int) -> dict[str, Any]:
    """Returns values by Optuna's tree-structured Parzen estimator (Bergstra et al., NeurIPS 2011).

    The sampler is a new one for each trial, with a seed of its own, so that nothing but the trials need be kept.

    Raises:
        MissingPackageError: Optuna is not installed.
    """
    optuna = check_optuna()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    distributions = {setting: _make_distribution(domain) for setting, domain in space.items()}
    sampler_seed = int(derive_rng("optuna-search", seed, len(trials)).integers(2**31))
    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=sampler_seed, constant_liar=True))
    for trial in trials:
        study.add_trial(_make_frozen_trial(trial, space, distributions))
    found = study.ask(distributions).params
    return {
        setting: domain.round(found[setting]) if isinstance(domain, Range) else domain[found[setting]]
        for setting, domain in space.items()
    }


def check_optuna() -> Any:
    """Returns the package.

    Raises:
        MissingPackageError: it is not installed.
    """
    try:
        import optuna  # noqa: PLC0415 optional
    except ImportError as error:
        raise MissingPackageError(
            f"--search optuna needs Optuna, which cannot be imported ({error}); "
            f"install it with: {format_install_command('optuna')}"
        ) from None
    return optuna


def _make_distribution(domain: Choices | Range) -> BaseDistribution:
    from optuna import distributions  # noqa: PLC0415 optional

    if not isinstance(domain, Range):  # by its number: choices may be lists
        return distributions.CategoricalDistribution(range(len(domain)))
    if domain.is_int:
        return distributions.IntDistribution(int(domain.low), int(domain.high), log=domain.is_log)
    return distributions.FloatDistribution(domain.low, domain.high, log=domain.is_log)


def _make_frozen_trial(trial: Trial, space: Space, distributions: Mapping[str, BaseDistribution]) -> FrozenTrial:
    from optuna.trial import TrialState, create_trial  # noqa: PLC0415 optional

    state, steps = TrialState.COMPLETE, dict[int, float]()
    if not trial.is_ended:
        state = TrialState.RUNNING
    elif trial.value is None:
        state = TrialState.FAIL
    elif trial.stopped_at is not None:
        state, steps = TrialState.PRUNED, {trial.stopped_at: trial.value}
    return create_trial(
        params={
            setting: value if isinstance(domain := space[setting], Range) else domain.index(value)
            for setting, value in trial.values.items()
        },
        distributions=dict(distributions),
        state=state,
        value=trial.value if state == TrialState.COMPLETE else None,
        intermediate_values=steps,
    )


SEARCHERS: Mapping[str, Searcher] = {"random": propose_at_random, "optuna": propose_by_optuna}

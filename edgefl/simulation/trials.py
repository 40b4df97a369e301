"""The trials of a search: each is proposed when it is its turn, and durable before its first run starts."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from edgefl.core.errors import StoreError, UsageError
from edgefl.core.safe_parsing import parse_json
from edgefl.simulation.search.early_stopping import AshaSettings
from edgefl.simulation.search.searchers import SEARCHERS, Range, Space, Trial, check_optuna
from edgefl.simulation.sweep import (
    MAX_RUNS,
    Sweep,
    SweepOutcome,
    SweepPlan,
    SweepRun,
    hash_texts,
    open_sweep,
    select_metric,
)
from edgefl.system.atomic_files import write_atomic


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """A search for the best values: where, by which of `SEARCHERS`, and how many trials."""

    space: Space
    searcher: str
    num_trials: int

    def check(self, plan: SweepPlan) -> None:
        """Checks each choice, and the ends of each range, with the first of the others.

        Raises:
            ConfigError: what is wrong with the settings in any of these combinations: all of it.
            MissingPackageError: the searcher is not installed.
            UsageError: there is nothing to search, or too much.
        """
        if not self.space:
            raise UsageError("--search needs settings to vary, such as --set strategy.learning_rate=0.01..0.5:log")
        if (num_runs := self.num_trials * plan.num_seeds) > MAX_RUNS:
            raise UsageError(f"a search has at most {MAX_RUNS} runs, got {num_runs}; take fewer trials or seeds")
        if self.searcher == "optuna":
            check_optuna()
        ends = {
            setting: (domain.low, domain.high) if isinstance(domain, Range) else domain
            for setting, domain in self.space.items()
        }
        first = {setting: values[0] for setting, values in ends.items()}
        plan.check({**first, setting: value} for setting, values in ends.items() for value in values)


def run_search(  # noqa: PLR0913 the last four by name
    plan: SweepPlan,
    search: Search,
    root: Path,
    *,
    num_jobs: int = 1,
    retry_failed: bool = False,
    on_end: Callable[[SweepOutcome], None] = lambda _: None,
    early_stop: AshaSettings | None = None,
) -> list[SweepOutcome]:
    """Simulates the trials of a search, and returns how their runs ended, each once, in the order of the trials.

    A trial's values are durable before its first run starts: a search that was stopped goes on with the same trials.
    The other arguments are those of `run_sweep`.

    Raises:
        ConfigError: something is wrong with the settings of a trial.
        StoreError: the history cannot be written, or another sweep works in the folder.
    """
    space = [f"{setting}={domain!r}" for setting, domain in search.space.items()]
    key = hash_texts([plan.base.run_id, *space, search.searcher, str(plan.num_seeds), str(early_stop)])
    with open_sweep(root, on_end, retry_failed=retry_failed, early_stop=early_stop, company=key) as sweep:
        kept = _KeptTrials.load(root / f"search-{key}.json", search)
        sweep.simulate(
            _list_trial_runs(sweep, plan, search, kept), min(num_jobs, search.num_trials * plan.num_seeds), None, None
        )
        return [sweep.outcomes[run_id] for run_id in sweep.runs if run_id in sweep.outcomes]


def _list_trial_runs(sweep: Sweep, plan: SweepPlan, search: Search, kept: _KeptTrials) -> Iterator[SweepRun]:
    """Yields the runs of one trial after another that have not ended; a trial is proposed when it is its turn."""
    trials = list[list[SweepRun]]()
    for number in range(search.num_trials):
        if number == len(kept.values):
            known = [_summarise_trial(runs, sweep.outcomes) for runs in trials]
            kept.add(SEARCHERS[search.searcher](search.space, known, plan.base.seed))
        trials.append(plan.make_runs(kept.values[number]))
        pending = [run for run in trials[-1] if run.run_id not in sweep.runs]  # a choice may be proposed again
        sweep.restore(pending)
        yield from (run for run in pending if run.run_id not in sweep.outcomes)


def _summarise_trial(runs: Sequence[SweepRun], outcomes: Mapping[str, SweepOutcome]) -> Trial:
    """Returns what a trial came to, over its seeds; with one that was stopped early it counts as stopped."""
    known = [outcomes[run.run_id] for run in runs if run.run_id in outcomes]
    trial = Trial(values=runs[0].values, is_ended=len(known) == len(runs))
    counted = [outcome for outcome in known if outcome.is_finished or outcome.is_stopped]
    if not trial.is_ended or not counted:
        return trial
    metric = select_metric([*outcomes.values()])
    found = [outcome.metrics.get(metric.name) for outcome in counted]
    values = [value for value in found if value is not None and math.isfinite(value)]
    if not values:
        return trial
    stopped_at = [int(outcome.metrics["rounds"] or 0) for outcome in counted if outcome.is_stopped]
    value = statistics.fmean(values)
    return replace(trial, value=-value if metric.is_max else value, stopped_at=min(stopped_at, default=None))


@dataclass(slots=True)
class _KeptTrials:
    """The values of a search's trials, in a file that has each before it starts."""

    path: Path
    values: list[dict[str, Any]]

    @classmethod
    def load(cls, path: Path, search: Search) -> Self:
        """Returns the trials of an earlier start of the same search; with more trials it is the same one."""
        if not path.exists():
            return cls(path, [])
        try:
            values = parse_json(path.read_bytes())["trials"]
            are_known = all(trial.keys() == search.space.keys() for trial in values)
            error = None if are_known else "a trial has other settings"
        except (AttributeError, KeyError, TypeError, ValueError) as found:
            error, values = str(found), []
        if error is not None:
            raise StoreError(f"{path}: not the trials of a search ({error}); remove it to start the search anew")
        return cls(path, values)

    def add(self, values: Mapping[str, Any]) -> None:
        self.values.append(dict(values))
        write_atomic(self.path, json.dumps({"trials": self.values}, indent=1).encode())

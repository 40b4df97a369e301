"""Early stopping of a sweep's runs by asynchronous successive halving (ASHA).

Source: Li et al., A System for Massively Parallel Hyperparameter Tuning, MLSys 2020, section 3.

Differs from the paper: a run is judged when it reaches a rung, among all that have reached it, and goes on in its
process or ends. None is paused to be promoted later, so nothing is trained twice and no state is kept; the first at
a rung go on even where later ones turn out to be better.
"""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from edgefl.core.errors import ConfigError
from edgefl.engine.run_summary import compute_run_metrics

MAX_ETA = 100
MAX_FIRST_RUNG = 1_000_000
MAX_RUNG = 10**9

ReadRounds = Callable[[], Sequence[Mapping[str, Any]]]
"""Returns the history's rows of a run's rounds so far, oldest first."""
Metrics = Mapping[str, float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class AshaSettings:
    """Rungs after `first_rung` rounds and each `eta` times further; the best 1/`eta` at a rung go on."""

    eta: int = 3
    first_rung: int = 1

    def __str__(self) -> str:
        return f"asha:{self.eta}:{self.first_rung}"

    def list_rungs(self, num_rounds: int | None) -> Iterator[int]:
        """Yields the rungs before a run's last round; of a run without a number of rounds up to `MAX_RUNG`."""
        rung = self.first_rung
        while rung < (num_rounds or MAX_RUNG):
            yield rung
            rung *= self.eta


def parse_early_stop(text: str) -> AshaSettings:
    """Returns the settings in `asha`, `asha:ETA` or `asha:ETA:FIRST`.

    Raises:
        ConfigError: anything else.
    """
    name, *numbers = text.split(":")
    if name == "asha" and len(numbers) <= 2 and all(number.isdecimal() and len(number) < 9 for number in numbers):
        eta, first = [*map(int, numbers), *(3, 1)[len(numbers) :]]
        if 2 <= eta <= MAX_ETA and 1 <= first <= MAX_FIRST_RUNG:
            return AshaSettings(eta=eta, first_rung=first)
    raise ConfigError(
        f"--early-stop must be asha, asha:ETA or asha:ETA:FIRST, with ETA from 2 to {MAX_ETA} and FIRST from 1 to "
        f"{MAX_FIRST_RUNG} rounds, got {text!r:.60}"
    )


def find_rung_metrics(
    rounds: Sequence[Mapping[str, Any]], rung: int, num_rounds: int | None = None
) -> Metrics | None:
    """Returns the metrics of the first evaluated round from a rung on, and before a run's last; None without one."""
    for row in rounds:
        is_evaluated = row["accuracy"] is not None or row["loss"] is not None
        if num_rounds is not None and row["round"] >= num_rounds:
            return None  # it has done all its work
        if row["round"] >= rung and row["closed_at"] is not None and is_evaluated:
            return compute_run_metrics([row], 0.0)
    return None


class RungReporter:
    """Reports a run's metrics at its rungs, as `simulate` calls it after each evaluated round.

    Args:
        settings: of the sweep.
        num_rounds: of the run, if it has a number of them.
        report: called with a rung and the metrics there; returns why the run ends, or an empty text.
    """

    def __init__(self, settings: AshaSettings, num_rounds: int | None, report: Callable[[int, Metrics], str]) -> None:
        self._rungs, self._report, self._num_rounds = settings.list_rungs(num_rounds), report, num_rounds
        self._next = next(self._rungs, None)

    def __call__(self, number: int, read_rounds: ReadRounds) -> str:
        while self._next is not None and number >= self._next:
            metrics = find_rung_metrics(read_rounds(), self._next, self._num_rounds)
            if metrics is None:
                return ""
            if reason := self._report(self._next, metrics):
                return reason
            self._next = next(self._rungs, None)
        return ""


class Asha:
    """Judges runs at their rungs; runs with one seed, which have the same data and first model, are compared.

    `company` says in the reasons among which runs; what was judged among others is judged anew.
    """

    def __init__(self, settings: AshaSettings, company: str = "") -> None:
        self.settings, self._company = settings, f" in {company}" if company else ""
        self._scores: dict[tuple[int, int], dict[str, float]] = {}
        self._lock = threading.Lock()

    def record(self, run_id: str, seed: int, rung: int, score: float) -> tuple[int, int]:
        """Adds a run's score at a rung, more is better; returns its rank from 1, and of how many.

        A run that is simulated again takes the place of its former score. Equal scores share a rank.
        """
        with self._lock:
            scores = self._scores.setdefault((seed, rung), {})
            scores[run_id] = score if math.isfinite(score) else -math.inf
            return 1 + sum(other > scores[run_id] for other in scores.values()), len(scores)

    def judge(self, run_id: str, seed: int, rung: int, score: float) -> str:
        """Adds a run's score at a rung; returns why the run ends there, or an empty text."""
        rank, num_runs = self.record(run_id, seed, rung, score)
        if not math.isfinite(score):
            return f"{self.reason_prefix} at round {rung}: not a finite number"
        if rank <= max(1, num_runs // self.settings.eta):
            return ""
        return f"{self.reason_prefix} at round {rung}: place {rank} of {num_runs}"

    @property
    def reason_prefix(self) -> str:
        """How the reasons of all runs begin that were ended here."""
        return f"stopped early by {self.settings}{self._company}"

    def find_last_rung(self, reason: str | None) -> int | None:
        """Returns the rung at which a run of an earlier start was ended here; None where it was not."""
        match = re.match(rf"{re.escape(self.reason_prefix)} at round (\d{{1,10}}):", reason or "")
        return None if match is None else int(match[1])

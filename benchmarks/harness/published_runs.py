"""Runs of other frameworks' published settings in the simulator: device profiles, and accuracy by virtual time."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import edgefl
from edgefl.core.errors import RunFailedError
from edgefl.storage.queries.history import read_history
from edgefl.storage.store import Store
from edgefl.system.atomic_files import DATABASE_NAME

MODULE = "harness.published_networks"
TASK = "cifar-10"
SOURCE = '"vendor: as published"'


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Accuracy by time: (virtual second since the first assignment, accuracy) of each evaluation, in order.

    `num_rounds` were closed within `seconds`, with the updates that count; `updates` are all that were asked for.
    """

    num_rounds: int
    seconds: float
    points: tuple[tuple[float, float], ...]
    updates: tuple[Mapping[str, Any], ...]

    def seconds_to(self, accuracy: float) -> float | None:
        """Returns the time of the first evaluation with at least this accuracy; None where there is none."""
        return next((at_s for at_s, score in self.points if score >= accuracy), None)


def run_of(
    config: Mapping[str, Any], folder: str, *, num_updates: float = math.inf, is_trained: bool = True
) -> Curve:
    """Returns the accuracies of one simulated run; its settings that are None are left out.

    Without training there are times, but no accuracies. Of a run that failed, what its history has counts.

    An asynchronous run ends with what is still out when its budget is used up: nothing after `num_updates` counts.
    """
    tables = {
        name: {key: value for key, value in table.items() if value is not None} for name, table in config.items()
    }
    with suppress(RunFailedError):
        edgefl.simulate(tables, root=folder, allow_modules=[MODULE], bookkeeping_only=not is_trained)
    with Store.open(Path(folder) / DATABASE_NAME, read_only=True) as store:
        rounds, updates = read_history(store, "rounds"), read_history(store, "updates")
    if not rounds:
        return Curve(num_rounds=0, seconds=0.0, points=(), updates=tuple(updates))
    began_s = min(row["started_at"] for row in rounds)
    counted = itertools.accumulate(row["num_updates"] for row in rounds)
    within = [
        row
        for row, total in zip(rounds, counted, strict=True)
        if total <= num_updates and row["closed_at"] is not None
    ]
    scored = [row for row in within if row["accuracy"] is not None]
    return Curve(
        num_rounds=len(within),
        seconds=max((row["closed_at"] for row in within), default=began_s) - began_s,
        points=tuple((row["closed_at"] - began_s, row["accuracy"]) for row in scored),
        updates=tuple(updates),
    )


def write_profiles(
    path: Path, model: str, iteration_s: Mapping[str, float], *, jitter: float, latency_s: float
) -> None:
    """Writes a profile of each name: seconds of one iteration of a model, and links that cost only latency."""
    path.write_text(
        "\n".join(
            f"[profile.{name}]\njitter = {jitter}\nlatency_s = {latency_s}\nup_bytes_per_s = 1e12\n"
            f'down_bytes_per_s = 1e12\niterations = {{ "{TASK}/{model}" = {seconds!r} }}\n'
            f"source = {{ iterations = {SOURCE}, latency_s = {SOURCE}, jitter = {SOURCE} }}\n"
            for name, seconds in iteration_s.items()
        )
    )


def spread(values: Sequence[float], digits: int = 1) -> str:
    """Returns median, least and most as a table's cell."""
    low, middle, high = min(values), statistics.median(values), max(values)
    return f"{middle:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"

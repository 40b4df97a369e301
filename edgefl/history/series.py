"""Rounds of runs as arrays, from wherever the rows of the history are read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol

import numpy as np

from edgefl.errors import NotFoundError, UsageError
from edgefl.types import Array, Json


@dataclass(frozen=True, slots=True, kw_only=True)
class RunHead:
    """Which run it is; `batch_size` is None where nobody knows it."""

    run_id: str
    name: str
    strategy: str
    batch_size: int | None = None


class Source(Protocol):
    """Where rows come from: a store, or a coordinator that is asked."""

    def run(self, text: str) -> RunHead: ...
    def rows(
        self,
        kind: str,
        *,
        run: str,
        since: float | None = None,
        until: float | None = None,
        limit: int | None = None,
    ) -> list[Json]: ...


@dataclass(frozen=True, slots=True)
class RoundRange:
    """Rounds from `first` to `last`, both included; None is open."""

    first: int | None = None
    last: int | None = None

    def holds(self, numbers: Array) -> Array:
        """Returns which of the rounds are in it."""
        low, high = self.first or 0, np.inf if self.last is None else self.last
        return np.asarray((numbers >= low) & (numbers <= high))

    def __str__(self) -> str:
        return f"{self.first or ''}:{self.last or ''}"


def parse_range(text: str) -> RoundRange:
    """Returns the rounds that `10:40`, `10:`, `:40` or `17` means.

    Raises:
        UsageError: it is none of these, or ends before it begins.
    """
    first, colon, last = text.strip().partition(":")
    ends = (first, last if colon else first)
    if not any(ends) or not all(end == "" or (end.isascii() and end.isdigit() and int(end) > 0) for end in ends):
        raise UsageError(f"rounds are FIRST:LAST such as 10:40, 10: or :40, counted from 1, got {text!r}")
    low, high = (int(end) if end else None for end in ends)
    if low is not None and high is not None and low > high:
        raise UsageError(f"rounds must go from the lower to the higher, got {text!r}")
    return RoundRange(low, high)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundSeries:
    """The closed rounds of a run, in order; each array is [rounds] float64, NaN where nothing is known.

    `elapsed_s` is the time from the start of the run's first round to the end of this one, `moved_bytes` what crossed
    the network until then in both directions. `started_s` and `closed_s` are unix seconds.
    """

    head: RunHead
    label: str
    round: Array
    started_s: Array
    closed_s: Array
    elapsed_s: Array
    moved_bytes: Array
    bytes_up: Array
    bytes_down: Array
    num_devices: Array
    num_updates: Array
    accuracy: Array
    loss: Array
    train_loss: Array
    node_accuracy: Array
    worst_node_accuracy: Array
    disagreement: Array

    def __len__(self) -> int:
        return len(self.round)

    @property
    def duration_s(self) -> float:
        """Seconds from the start of the first of these rounds to the end of the last."""
        return float(np.max(self.closed_s) - np.min(self.started_s))

    def has(self, name: str) -> bool:
        """Says whether anything is known of a column."""
        return bool(np.isfinite(getattr(self, name)).any())

    def within(self, wanted: RoundRange) -> RoundSeries:
        """Returns the wanted rounds alone.

        Raises:
            NotFoundError: there are none.
        """
        kept = wanted.holds(self.round)
        if not kept.any():
            known = f"{self.round[0]:.0f} to {self.round[-1]:.0f}"
            raise NotFoundError(f"run {self.label} has rounds {known}, none in {wanted}")
        arrays = [item.name for item in fields(self) if item.name not in {"head", "label"}]
        return replace(self, **{name: getattr(self, name)[kept] for name in arrays})


def read_rounds(source: Source, head: RunHead, *, label: str = "", newest: int | None = None) -> RoundSeries:
    """Returns the closed rounds of a run.

    Args:
        source: where they are read.
        head: which run.
        label: what it is called on a sheet; its name when empty.
        newest: so many rounds at most; times and bytes then count from the first of them.

    Raises:
        NotFoundError: no round has closed yet.
    """
    rows = source.rows("rounds", run=head.run_id, limit=None if newest is None else newest + 1)
    closed = sorted((row for row in rows if row["closed_at"] is not None), key=lambda row: row["round"])
    if not closed:
        raise NotFoundError(f"run {label or head.name} has no closed round yet, so there is nothing to draw")
    return _series(head, label or head.name, closed if newest is None else closed[-newest:])


def _series(head: RunHead, label: str, rows: Sequence[Json]) -> RoundSeries:
    up, down = column(rows, "bytes_up"), column(rows, "bytes_down")
    started, closed = column(rows, "started_at"), column(rows, "closed_at")
    same = (
        "round",
        "num_devices",
        "num_updates",
        "accuracy",
        "loss",
        "train_loss",
        "node_accuracy",
        "worst_node_accuracy",
    )
    facts = [row.get("facts") or {} for row in rows]
    return RoundSeries(
        head=head,
        label=label,
        started_s=started,
        closed_s=closed,
        elapsed_s=closed - np.min(started),
        moved_bytes=np.cumsum(np.nan_to_num(up) + np.nan_to_num(down)),
        bytes_up=up,
        bytes_down=down,
        disagreement=column(facts, "disagreement"),
        **{name: column(rows, name) for name in same},
    )


def column(rows: Sequence[Json], name: str) -> Array:
    """Returns one column as [rows] float64, NaN where it is missing."""
    values: list[Any] = [row.get(name) for row in rows]
    return np.array([np.nan if value is None else value for value in values], dtype=np.float64)


def find_runs(source: Source, texts: Sequence[str]) -> dict[str, RunHead]:
    """Returns the runs that are meant, each once, by what to call them: the name, with the id where two are alike."""
    heads = list({head.run_id: head for head in map(source.run, texts)}.values())
    alike = Counter(head.name for head in heads)
    return {head.name if alike[head.name] == 1 else f"{head.name} {head.run_id}": head for head in heads}

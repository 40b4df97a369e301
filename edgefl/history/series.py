"""Rounds and assignments of runs as arrays, from any history reader."""

from __future__ import annotations

import json
import logging
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from fnmatch import fnmatchcase
from functools import reduce
from itertools import pairwise
from typing import Any, Protocol, Unpack

import numpy as np

from edgefl.core.errors import NotFoundError, UsageError
from edgefl.core.types import Array, Json, UpdateStatus
from edgefl.storage.queries.columns import HistoryFilters

log = logging.getLogger(__name__)

_ROUND_COLUMNS = (
    "round", "bytes_up", "bytes_down", "num_devices", "num_updates", "accuracy", "loss", "train_loss",
    "node_accuracy", "worst_node_accuracy",
)  # fmt: skip

_SEED_ENDING = re.compile(r" seed=\d+\Z")
"""Ending of the names of a sweep's runs."""

READ_BATCH_ROWS = 50_000
"""A run of a million assignments is read in batches: HTTPS answers are limited."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInfo:
    """A run; `batch_size` is None where unknown, `config` are the tables of its run file."""

    run_id: str
    name: str
    strategy: str
    batch_size: int | None = None
    config: Mapping[str, Any] = field(default_factory=dict)


class HistoryReader(Protocol):
    """Source of history rows: a store, or a remote coordinator."""

    def find_run(self, text: str) -> RunInfo: ...
    def read_rows(self, kind: str, **filters: Unpack[HistoryFilters]) -> list[Json]: ...


@dataclass(frozen=True, slots=True)
class RoundRange:
    """Rounds from `first` to `last`, both included; None is open."""

    first: int | None = None
    last: int | None = None

    def contains(self, numbers: Array) -> Array:
        """Returns a mask of the rounds in the range."""
        low, high = self.first or 0, np.inf if self.last is None else self.last
        return np.asarray((numbers >= low) & (numbers <= high))

    def __str__(self) -> str:
        return f"{self.first or ''}:{self.last or ''}"


def parse_round_range(text: str) -> RoundRange:
    """Returns the range of `10:40`, `10:`, `:40` or `17`.

    Raises:
        UsageError: not a range, or it ends before it begins.
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
    """The closed rounds of a run, in order; each array is [rounds] float64, NaN where unknown.

    `elapsed_s` is the time from the start of the run's first round to the end of this one, `transferred_bytes` what
    crossed the network until then in both directions. `started_s` and `closed_s` are unix seconds. `spread` are the
    standard deviations, by column, over the runs whose mean this is.
    """

    head: RunInfo
    label: str
    round: Array
    started_s: Array
    closed_s: Array
    elapsed_s: Array
    transferred_bytes: Array
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
    spread: Mapping[str, Array] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.round)

    @property
    def duration_s(self) -> float:
        """Seconds from the start of the first of these rounds to the end of the last."""
        return float(np.max(self.closed_s) - np.min(self.started_s))

    def has_values(self, name: str) -> bool:
        """Returns whether a column has any value."""
        return bool(np.isfinite(getattr(self, name)).any())

    def select_rounds(self, round_range: RoundRange) -> RoundSeries:
        """Returns the rounds in a range.

        Raises:
            NotFoundError: there are none.
        """
        mask = round_range.contains(self.round)
        if not mask.any():
            available = f"{self.round[0]:.0f} to {self.round[-1]:.0f}"
            raise NotFoundError(f"run {self.label} has rounds {available}, none in {round_range}")
        return replace(
            self,
            **{name: getattr(self, name)[mask] for name in ARRAYS},
            spread={name: values[mask] for name, values in self.spread.items()},
        )


ARRAYS = tuple(item.name for item in fields(RoundSeries) if item.name not in {"head", "label", "spread"})


def average_runs(series: Sequence[RoundSeries]) -> list[RoundSeries]:
    """Returns one series for runs that differ in nothing but seed and name: their mean, with the spread.

    A mean has the rounds that all of its runs have. A run that no other belongs to stays as it is.

    Raises:
        NotFoundError: runs that belong together have no round in common.
    """
    groups: dict[str, list[RoundSeries]] = {}
    for one in series:
        groups.setdefault(_format_settings(one.head), []).append(one)
    return [_average(group) if len(group) > 1 else group[0] for group in groups.values()]


def _format_settings(run: RunInfo) -> str:
    """Returns the settings of a run without seed and name; a run whose settings are unknown is alone."""
    tables = {name: table for name, table in run.config.items() if name != "run"}
    own = {name: value for name, value in run.config.get("run", {}).items() if name not in {"seed", "name"}}
    return json.dumps([tables, own, run.run_id if not run.config else ""], sort_keys=True, default=str)


def _average(group: Sequence[RoundSeries]) -> RoundSeries:
    rounds = reduce(np.intersect1d, [run.round for run in group])
    if not rounds.size:
        raise NotFoundError(f"the runs of {group[0].label} have no round in common")
    columns = {name: np.stack([getattr(run, name)[np.isin(run.round, rounds)] for run in group]) for name in ARRAYS}
    name = _SEED_ENDING.sub("", group[0].head.name)
    return replace(
        group[0],
        label=f"{name} (mean of {len(group)})",
        **{key: np.mean(values, axis=0) for key, values in columns.items()},
        spread={key: np.std(values, axis=0, ddof=1) for key, values in columns.items()},
    )


def read_rounds(
    source: HistoryReader, run_info: RunInfo, *, label: str = "", newest: int | None = None
) -> RoundSeries:
    """Returns the closed rounds of a run.

    Args:
        source: to read from.
        run_info: the run.
        label: of the run on a sheet; its name when empty.
        newest: maximum number of rounds; times and bytes then count from the first of them.

    Raises:
        NotFoundError: no round has closed yet.
    """
    rows = source.read_rows("rounds", run=run_info.run_id, limit=None if newest is None else newest + 1)
    closed_rows = sorted((row for row in rows if row["closed_at"] is not None), key=lambda row: row["round"])
    if not closed_rows:
        raise NotFoundError(f"run {label or run_info.name} has no closed round yet, so there is nothing to draw")
    return _make_series(run_info, label or run_info.name, closed_rows if newest is None else closed_rows[-newest:])


def _make_series(run_info: RunInfo, label: str, rows: Sequence[Json]) -> RoundSeries:
    columns: dict[str, Any] = {name: make_column_array(rows, name) for name in _ROUND_COLUMNS}
    started_s, closed_s = make_column_array(rows, "started_at"), make_column_array(rows, "closed_at")
    facts = [row.get("facts") or {} for row in rows]
    return RoundSeries(
        head=run_info,
        label=label,
        started_s=started_s,
        closed_s=closed_s,
        elapsed_s=closed_s - np.min(started_s),
        transferred_bytes=np.cumsum(np.nan_to_num(columns["bytes_up"]) + np.nan_to_num(columns["bytes_down"])),
        disagreement=make_column_array(facts, "disagreement"),
        **columns,
    )


def make_column_array(rows: Sequence[Json], name: str) -> Array:
    """Returns one column as [rows] float64, NaN where it is missing."""
    values: list[Any] = [row.get(name) for row in rows]
    return np.array([np.nan if value is None else value for value in values], dtype=np.float64)


def find_runs(source: HistoryReader, texts: Sequence[str]) -> dict[str, RunInfo]:
    """Returns the identified runs, each once, by label: the name, with the id for duplicate names.

    In a text, `*` stands for any part of names: it is the newest run with a closed round of each that matches.

    Raises:
        NotFoundError: there is no such run.
    """
    run_ids = [run_id for text in texts for run_id in (_match_names(source, text) if "*" in text else [text])]
    runs = list({run.run_id: run for run in map(source.find_run, run_ids)}.values())
    name_counts = Counter(run.name for run in runs)
    return {run.name if name_counts[run.name] == 1 else f"{run.name} {run.run_id}": run for run in runs}


def _match_names(source: HistoryReader, pattern: str) -> list[str]:
    rows = [row for row in source.read_rows("runs") if fnmatchcase(row["name"], pattern)]
    newest = {row["name"]: row["run_id"] for row in rows}
    run_ids = list({row["name"]: row["run_id"] for row in rows if row["rounds"]}.values())
    if left_out := [f"{name} {run_id}" for name, run_id in newest.items() if run_id not in run_ids]:
        log.warning("left out, since they have no closed round: %s", ", ".join(left_out))
    if not run_ids:
        raise NotFoundError(f"no run's name matches {pattern!r}; `edgefl history runs` has them")
    return run_ids


@dataclass(frozen=True, slots=True, kw_only=True)
class AssignmentArrays:
    """Arrays of [assignments]; numbers are float64, NaN where unknown, times unix seconds."""

    device: Array
    is_used: Array
    round: Array
    dispatched_at: Array
    received_at: Array
    compute_s: Array
    send_s: Array
    wait_s: Array
    iterations: Array
    staleness: Array
    bytes_up: Array
    bytes_down: Array

    def __len__(self) -> int:
        return len(self.device)

    def select(self, mask: Array) -> AssignmentArrays:
        """Returns a selection; `mask` is a boolean mask or indices."""
        return AssignmentArrays(**{name: getattr(self, name)[mask] for name in self.__dataclass_fields__})


def read_assignments(
    source: HistoryReader, series: RoundSeries, round_range: RoundRange | None = None
) -> AssignmentArrays:
    """Returns the assignments of the selected rounds of a run, all when None.

    An update of an asynchronous run belongs to the round in which it was applied, and may have been dispatched long
    before.

    Args:
        source: to read from.
        series: all closed rounds of the run.
        round_range: which rounds.
    """
    parts = []
    for since, until in _split_time(series):
        part = _to_arrays(source.read_rows("updates", run=series.head.run_id, since=since, until=until))
        parts.append(part if round_range is None else part.select(round_range.contains(part.round)))
    return _concatenate(parts)


def read_assignments_between(source: HistoryReader, run_id: str, since: float, until: float) -> AssignmentArrays:
    """Returns the assignments dispatched in this time, unix seconds."""
    return _to_arrays(source.read_rows("updates", run=run_id, since=since, until=until))


def _split_time(series: RoundSeries) -> Iterator[tuple[float | None, float | None]]:
    """Yields time spans with about `READ_BATCH_ROWS` assignments each; the first and the last are open."""
    counts = np.fmax(series.num_devices, series.num_updates)
    parts = np.nancumsum(counts) // READ_BATCH_ROWS
    starts = [float(series.started_s[index]) for index in 1 + np.flatnonzero(np.diff(parts))]
    bounds = [None, *sorted(set(starts)), None]
    yield from pairwise(bounds)


def _to_arrays(rows: Sequence[Json]) -> AssignmentArrays:
    return AssignmentArrays(
        device=np.array([row["device_id"] for row in rows], dtype=object),
        is_used=np.array([row["outcome"] == str(UpdateStatus.USED) for row in rows], dtype=bool),
        **{
            name: make_column_array(rows, name)
            for name in AssignmentArrays.__dataclass_fields__.keys() - {"device", "is_used"}
        },
    )


def _concatenate(parts: Sequence[AssignmentArrays]) -> AssignmentArrays:
    names = AssignmentArrays.__dataclass_fields__
    return AssignmentArrays(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in names})

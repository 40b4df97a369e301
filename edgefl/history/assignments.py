"""Assignments of a run as arrays: computing, sending and waiting times by device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from edgefl.core.types import Array, Json, UpdateStatus
from edgefl.history.series import HistoryReader, RoundRange, RoundSeries, make_column_array

READ_BATCH_ROWS = 50_000
"""A run of a million assignments is read in batches: HTTPS answers are limited."""
_NUMBER_COLUMNS = (
    "round", "dispatched_at", "received_at", "compute_s", "send_s", "wait_s", "iterations", "staleness", "bytes_up",
    "bytes_down",
)  # fmt: skip


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
        **{name: make_column_array(rows, name) for name in _NUMBER_COLUMNS},
    )


def _concatenate(parts: Sequence[AssignmentArrays]) -> AssignmentArrays:
    names = AssignmentArrays.__dataclass_fields__
    return AssignmentArrays(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in names})

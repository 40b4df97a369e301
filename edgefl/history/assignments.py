"""Assignments of a run as arrays: who computed, sent and waited, when and for how long."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from edgefl.history.series import RoundRange, RoundSeries, Source, column
from edgefl.types import Array, Json, Outcome

ROWS_AT_ONCE = 50_000
"""A run of a million assignments is read in parts: an answer over HTTPS has an end."""
_NUMBERS = (
    "round", "dispatched_at", "received_at", "compute_s", "send_s", "wait_s", "iterations", "staleness", "bytes_up",
    "bytes_down",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignments:
    """Each array is [assignments]; numbers are float64, NaN where nothing is known, times unix seconds."""

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

    def where(self, kept: Array) -> Assignments:
        """Returns some of them; `kept` is a mask or places."""
        return Assignments(**{name: getattr(self, name)[kept] for name in self.__dataclass_fields__})


def read_assignments(source: Source, series: RoundSeries, wanted: RoundRange | None = None) -> Assignments:
    """Returns the assignments that belong to the wanted rounds of a run, all when None.

    An update of an asynchronous run belongs to the round in which it was applied, and may have gone out long before.

    Args:
        source: where they are read.
        series: all closed rounds of the run.
        wanted: which rounds.
    """
    parts = []
    for since, until in _spans(series):
        part = _arrays(source.rows("updates", run=series.head.run_id, since=since, until=until))
        parts.append(part if wanted is None else part.where(wanted.holds(part.round)))
    return _joined(parts)


def read_between(source: Source, run_id: str, since: float, until: float) -> Assignments:
    """Returns the assignments that went out in this time, unix seconds."""
    return _arrays(source.rows("updates", run=run_id, since=since, until=until))


def _spans(series: RoundSeries) -> Iterator[tuple[float | None, float | None]]:
    """Yields spans of time with about `ROWS_AT_ONCE` assignments each; the first and the last are open."""
    counts = np.fmax(series.num_devices, series.num_updates)
    parts = np.nancumsum(counts) // ROWS_AT_ONCE
    starts = [float(series.started_s[place]) for place in 1 + np.flatnonzero(np.diff(parts))]
    bounds = [None, *sorted(set(starts)), None]
    yield from pairwise(bounds)


def _arrays(rows: Sequence[Json]) -> Assignments:
    return Assignments(
        device=np.array([row["device_id"] for row in rows], dtype=object),
        is_used=np.array([row["outcome"] == str(Outcome.USED) for row in rows], dtype=bool),
        **{name: column(rows, name) for name in _NUMBERS},
    )


def _joined(parts: Sequence[Assignments]) -> Assignments:
    names = Assignments.__dataclass_fields__
    return Assignments(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in names})

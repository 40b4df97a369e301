"""In-memory metrics of runs, for `/metrics` and for alerts. Counts start with the coordinator.

A resumed run replays the journal after its newest checkpoint. What another coordinator did is not counted here, and
what this one did before a pause is counted already: so the items counted since a checkpoint are kept.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from math import inf, isfinite
from statistics import median

from prometheus_client import CollectorRegistry, Counter, Histogram

from edgefl.coordinator.runs.history_writer import HistoryRows
from edgefl.core.safe_text import escape_start
from edgefl.core.types import UpdateStatus
from edgefl.storage.repositories.records import RunRecord, RunStatus, UpdateRow

ROUND_BUCKETS_S = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800, 3600)
SYNC_BUCKETS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
STALENESS_BUCKETS = (0, 1, 2, 3, 5, 8, 13, 21, 50, 100)
MAX_ROUND_DURATIONS, MAX_ENDED_RUNS, MAX_REASON_CHARS = 20, 50, 200


@dataclass(frozen=True, slots=True, kw_only=True)
class ActiveRun:
    """An active run.

    `typical_round_s` is the median duration of its last rounds, `since_last_round_s` the time since the last one,
    `best_accuracy` the highest that this coordinator has seen, `rejections` the devices whose last updates were
    rejected, with their number in a row and the last reason.
    """

    run_id: str
    name: str
    task: str
    strategy: str
    status: RunStatus
    round: int
    version: int
    accuracy: float | None
    typical_round_s: float | None
    since_last_round_s: float
    best_accuracy: float | None = None
    rejections: Mapping[str, tuple[int, str]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedRun:
    """A failed or finished run, its serial `number` and the `num_rounds` closed by then, of all since the start."""

    run_id: str
    status: RunStatus
    reason: str
    accuracy: float | None = None
    number: int
    num_rounds: int


@dataclass(slots=True)
class _RunCounters:
    """Counters of an active run.

    `counted_items` are those seen since its newest checkpoint. Once `is_fully_observed`, this coordinator has seen
    all of them, and every unknown item is counted.
    """

    record: RunRecord
    last_change_s: float
    status: RunStatus = RunStatus.RUNNING
    round: int = 0
    version: int = 0
    accuracy: float | None = None
    best_accuracy: float | None = None
    rejections: dict[str, tuple[int, str]] = field(default_factory=dict)
    round_starts: dict[int, float] = field(default_factory=dict)
    received_ids: set[str] = field(default_factory=set)
    counted_items: set[tuple[str, str | int]] = field(default_factory=set)
    is_fully_observed: bool = False
    durations_s: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_ROUND_DURATIONS))

    def should_count(self, kind: str, name: str | int, *, is_replay: bool) -> bool:
        """Returns whether to count an item, which a replay may have repeated, and marks it as seen."""
        is_known = (kind, name) in self.counted_items
        self.counted_items.add((kind, name))
        return not is_known and (self.is_fully_observed or not is_replay)


class RunMetrics:
    """Metrics of runs, from their starts, ends and history rows. Thread-safe.

    Args:
        registry: exports the counters and histograms; None to export none.
        clock: seconds, monotonic.
    """

    def __init__(
        self, registry: CollectorRegistry | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock, self._lock = clock, threading.Lock()
        self._runs: dict[str, _RunCounters] = {}
        self._recent_ends: deque[EndedRun] = deque(maxlen=MAX_ENDED_RUNS)
        self._num_ends = self._num_rounds = 0
        self._ended_runs = Counter("edgefl_runs_ended", "Runs that ended, by how.", ["status"], registry=registry)
        self._rounds = Counter("edgefl_rounds_closed", "Rounds that were closed.", registry=registry)
        self._assignments = Counter("edgefl_assignments", "Assignments that were given out.", registry=registry)
        self._updates = Counter(
            "edgefl_updates", "Assignments that ended, by what became of the update.", ["outcome"], registry=registry
        )
        self._bytes_up = Counter("edgefl_uplink_bytes", "Bytes that devices sent for runs.", registry=registry)
        self._bytes_down = Counter("edgefl_downlink_bytes", "Bytes that devices fetched for runs.", registry=registry)
        self._round_s = Histogram(
            "edgefl_round_duration_seconds",
            "From the first assignment of a round to its close.",
            buckets=ROUND_BUCKETS_S,
            registry=registry,
        )
        self._staleness = Histogram(
            "edgefl_update_staleness_versions",
            "Versions between an update's base and the version that it was applied to.",
            buckets=STALENESS_BUCKETS,
            registry=registry,
        )
        self._sync_s = Histogram(
            "edgefl_journal_sync_seconds",
            "What it took to make the journal durable.",
            buckets=SYNC_BUCKETS_S,
            registry=registry,
        )
        # Create all series at the start: a rate over one that appears with its first event misses that event.
        for outcome in UpdateStatus:
            self._updates.labels(str(outcome))
        for status in (RunStatus.FINISHED, RunStatus.STOPPED, RunStatus.FAILED, RunStatus.INTERRUPTED):
            self._ended_runs.labels(str(status))

    def time_sync(self) -> AbstractContextManager[object]:
        """Returns a context manager that times one fsync of the journal."""
        return self._sync_s.time()

    def on_run_started(self, record: RunRecord) -> None:
        with self._lock:
            self._runs[record.run_id] = _RunCounters(record, self._clock())

    def on_run_paused(self, run_id: str) -> None:
        """Records that the run will replay everything since its newest checkpoint."""
        with self._lock:
            if (run := self._runs.get(run_id)) is not None:
                run.is_fully_observed = True

    def on_checkpoint(self, run_id: str) -> None:
        """Records that nothing counted so far of a run will be replayed."""
        with self._lock:
            if (run := self._runs.get(run_id)) is not None:
                run.counted_items.clear()

    def on_run_stopping(self, run_id: str) -> None:
        with self._lock:
            if (run := self._runs.get(run_id)) is not None:
                run.status = RunStatus.STOPPING

    def on_run_ended(self, run_id: str, status: RunStatus, reason: str) -> None:
        """Records a final or interrupted status; `queued` is not counted as an end."""
        with self._lock:
            run = self._runs.pop(run_id, None)
            accuracy = run.accuracy if run is not None else None
            if status in {RunStatus.FAILED, RunStatus.FINISHED}:
                self._num_ends += 1
                self._recent_ends.append(
                    EndedRun(
                        run_id=run_id,
                        status=status,
                        reason=reason,
                        accuracy=accuracy,
                        number=self._num_ends,
                        num_rounds=self._num_rounds,
                    )
                )
        if status is not RunStatus.QUEUED:
            self._ended_runs.labels(str(status)).inc()

    def record_rows(self, run_id: str, rows: HistoryRows, *, is_replay: bool = False) -> None:
        """Counts the rows that an active run has just published.

        Args:
            run_id: of the run.
            rows: the published rows.
            is_replay: they come from a replay, and may have been counted before.
        """
        with self._lock:
            run = self._runs.get(run_id)
            if run is None:
                return
            should_count = partial(run.should_count, is_replay=is_replay)
            self._assignments.inc(sum(should_count("dispatched", row.assignment_id) for row in rows.dispatches))
            for row in rows.evaluations:
                if should_count("scored", row.assignment_id):
                    self._count_bytes(row.bytes_up, row.bytes_down)
            for update in rows.updates.values():
                self._record_update(run, update, should_count)
            for number, (at, _) in rows.opened_rounds.items():
                run.round_starts.setdefault(number, at)
            for number, (version, at) in sorted(rows.closed_rounds.items()):
                seconds = rows.round_metrics.get(number, {}).get("seconds")
                self._record_round(run, number, version, at, seconds, should_count=should_count("closed", number))
            if rows.accuracy is not None:
                run.accuracy = rows.accuracy
                if isfinite(rows.accuracy):
                    run.best_accuracy = max(rows.accuracy, -inf if run.best_accuracy is None else run.best_accuracy)

    def list_active_runs(self) -> list[ActiveRun]:
        """Returns the state of the active runs, the one that has been active for longest first."""
        with self._lock:
            now_s = self._clock()
            return [
                ActiveRun(
                    run_id=run.record.run_id,
                    name=run.record.name,
                    task=run.record.task,
                    strategy=run.record.strategy,
                    status=run.status,
                    round=run.round,
                    version=run.version,
                    accuracy=run.accuracy,
                    typical_round_s=median(run.durations_s) if run.durations_s else None,
                    since_last_round_s=now_s - run.last_change_s,
                    best_accuracy=run.best_accuracy,
                    rejections=dict(run.rejections),
                )
                for run in self._runs.values()
            ]

    def list_ended_runs(self, *, after: int = 0) -> list[EndedRun]:
        """Returns the failed and finished runs with a higher number, oldest first."""
        with self._lock:
            return [run for run in self._recent_ends if run.number > after]

    @property
    def num_rounds(self) -> int:
        """Number of rounds closed since the start, of all runs."""
        return self._num_rounds

    def _record_update(self, run: _RunCounters, row: UpdateRow, should_count: Callable[[str, str], bool]) -> None:
        # An update has a row on arrival and another with its outcome; its bytes count once.
        if row.assignment_id not in run.received_ids and should_count("arrived", row.assignment_id):
            self._count_bytes(row.bytes_up, row.bytes_down)
        if row.outcome is None:
            run.received_ids.add(row.assignment_id)
            return
        run.received_ids.discard(row.assignment_id)
        if not should_count("ended", row.assignment_id):
            return
        self._updates.labels(str(row.outcome)).inc()
        if row.outcome is UpdateStatus.USED:
            run.rejections.pop(row.device_id, None)
        elif row.outcome is UpdateStatus.REJECTED:
            count, _ = run.rejections.get(row.device_id, (0, ""))
            run.rejections[row.device_id] = count + 1, escape_start(row.reason or "", MAX_REASON_CHARS)
        if row.staleness is not None:
            self._staleness.observe(row.staleness)

    def _record_round(
        self,
        run: _RunCounters,
        round_number: int,
        version: int,
        at: float,
        seconds: float | None,
        *,
        should_count: bool,
    ) -> None:
        run.round, run.version, run.last_change_s = round_number, version, self._clock()
        opened_at = run.round_starts.get(round_number)
        run.round_starts = {other: opened for other, opened in run.round_starts.items() if other > round_number}
        if not should_count:
            return
        self._num_rounds += 1
        self._rounds.inc()
        if seconds is None and opened_at is not None:
            seconds = max(0.0, at - opened_at)
        if seconds is not None:
            run.durations_s.append(seconds)
            self._round_s.observe(seconds)

    def _count_bytes(self, up: int | None, down: int | None) -> None:
        self._bytes_up.inc(up or 0)
        self._bytes_down.inc(down or 0)

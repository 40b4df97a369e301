"""Measures runs as they go, in memory: for `/metrics` and for alerts. Counts begin with the coordinator.

A run that is taken up again is shown by its journal what it did behind its newest checkpoint. What another
coordinator did is not counted here, and what this one did before a pause was counted then: so what was seen since a
checkpoint is remembered.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from statistics import median

from prometheus_client import CollectorRegistry, Counter, Histogram

from edgefl.coordinator.runs.ledger import Rows
from edgefl.storage.records import RunRecord, RunStatus, UpdateRow
from edgefl.types import Outcome

ROUND_BUCKETS_S = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800, 3600)
SYNC_BUCKETS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
STALENESS_BUCKETS = (0, 1, 2, 3, 5, 8, 13, 21, 50, 100)
REMEMBERED_ROUNDS, REMEMBERED_FAILURES = 20, 50


@dataclass(frozen=True, slots=True, kw_only=True)
class ActiveRun:
    """The run that is being driven; `usual_s` is how long its last rounds took, `quiet_s` how long none has ended."""

    run_id: str
    name: str
    task: str
    strategy: str
    status: RunStatus
    round: int
    version: int
    accuracy: float | None
    usual_s: float | None
    quiet_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedRun:
    """A run that failed: the `number`-th since the start, when `num_rounds` rounds of all runs had closed."""

    run_id: str
    reason: str
    number: int
    num_rounds: int


@dataclass(slots=True)
class _Run:
    """The run that is being driven.

    `known` names what was seen since its newest checkpoint. Once `is_ours`, this coordinator has seen all of that,
    and whatever is not known is to be counted.
    """

    record: RunRecord
    changed_s: float
    status: RunStatus = RunStatus.RUNNING
    round: int = 0
    version: int = 0
    accuracy: float | None = None
    opened: dict[int, float] = field(default_factory=dict)
    received: set[str] = field(default_factory=set)
    known: set[tuple[str, str | int]] = field(default_factory=set)
    is_ours: bool = False
    durations_s: deque[float] = field(default_factory=lambda: deque(maxlen=REMEMBERED_ROUNDS))


@dataclass(frozen=True, slots=True)
class _Shown:
    """Rows of a run, which its journal may have shown it again."""

    run: _Run
    is_shown_again: bool

    def counts(self, what: str, name: str | int) -> bool:
        """Returns whether something is to be counted now, and remembers that it was seen."""
        is_known = (what, name) in self.run.known
        self.run.known.add((what, name))
        return not is_known and (self.run.is_ours or not self.is_shown_again)


class RunMeter:
    """Is told when runs begin and end, and of every row that goes into their ledger.

    Args:
        registry: where the counters and histograms are exported from; None for nowhere.
        clock: seconds, monotone.
    """

    def __init__(
        self, registry: CollectorRegistry | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock, self._lock = clock, threading.Lock()
        self._run: _Run | None = None
        self._failed: deque[FailedRun] = deque(maxlen=REMEMBERED_FAILURES)
        self._num_failed = self._num_rounds = 0
        self._ended = Counter("edgefl_runs_ended", "Runs that ended, by how.", ["status"], registry=registry)
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
        # Series that are there from the start: a rate over one that appears with its first event misses that event.
        for outcome in Outcome:
            self._updates.labels(str(outcome))
        for status in (RunStatus.FINISHED, RunStatus.STOPPED, RunStatus.FAILED, RunStatus.INTERRUPTED):
            self._ended.labels(str(status))

    def time_sync(self) -> AbstractContextManager[object]:
        """Returns what measures one fsync of the journal."""
        return self._sync_s.time()

    def began(self, record: RunRecord) -> None:
        with self._lock:
            self._run = _Run(record, self._clock())

    def paused(self, run_id: str) -> None:
        """Says that this run will be shown again what it did since its newest checkpoint."""
        with self._lock:
            if self._run is not None and self._run.record.run_id == run_id:
                self._run.is_ours = True

    def checkpointed(self) -> None:
        """Says that nothing of what was noted will be shown to the active run again."""
        with self._lock:
            if self._run is not None:
                self._run.known.clear()

    def stopping(self, run_id: str) -> None:
        with self._lock:
            if self._run is not None and self._run.record.run_id == run_id:
                self._run.status = RunStatus.STOPPING

    def ended(self, run_id: str, status: RunStatus, reason: str) -> None:
        """Takes any status that a run was given outside of its own course; `queued` is no end."""
        with self._lock:
            if self._run is not None and self._run.record.run_id == run_id:
                self._run = None
            if status is RunStatus.FAILED:
                self._num_failed += 1
                self._failed.append(
                    FailedRun(run_id=run_id, reason=reason, number=self._num_failed, num_rounds=self._num_rounds)
                )
        if status is not RunStatus.QUEUED:
            self._ended.labels(str(status)).inc()

    def note(self, rows: Rows, *, is_shown_again: bool = False) -> None:
        """Takes what the active run has just made ready for the store.

        Args:
            rows: what it made.
            is_shown_again: its journal has shown it that: it may have been done and counted before.
        """
        with self._lock:
            run = self._run
            if run is None:
                return
            shown = _Shown(run, is_shown_again)
            self._assignments.inc(sum(shown.counts("given", row.assignment_id) for row in rows.dispatches))
            for row in rows.evaluations:
                if shown.counts("scored", row.assignment_id):
                    self._count_bytes(row.bytes_up, row.bytes_down)
            for update in rows.updates.values():
                self._note_update(run, update, shown)
            for number, (at, _) in rows.opened.items():
                run.opened.setdefault(number, at)
            for number, (version, at) in sorted(rows.closed.items()):
                seconds = rows.figures.get(number, {}).get("seconds")
                self._close(run, number, version, at, seconds, counts=shown.counts("closed", number))
            if rows.accuracy is not None:
                run.accuracy = rows.accuracy

    def active(self) -> ActiveRun | None:
        """Returns how the run that is being driven stands, if there is one."""
        with self._lock:
            run = self._run
            if run is None:
                return None
            return ActiveRun(
                run_id=run.record.run_id,
                name=run.record.name,
                task=run.record.task,
                strategy=run.record.strategy,
                status=run.status,
                round=run.round,
                version=run.version,
                accuracy=run.accuracy,
                usual_s=median(run.durations_s) if run.durations_s else None,
                quiet_s=self._clock() - run.changed_s,
            )

    def failed(self, *, after: int = 0) -> list[FailedRun]:
        """Returns the runs that failed behind the one of this number, oldest first."""
        with self._lock:
            return [failed for failed in self._failed if failed.number > after]

    @property
    def num_rounds(self) -> int:
        """How many rounds of all runs have closed since the start."""
        return self._num_rounds

    def _note_update(self, run: _Run, row: UpdateRow, shown: _Shown) -> None:
        # A row comes when the update arrives and again with its outcome; its bytes count once.
        if row.assignment_id not in run.received and shown.counts("arrived", row.assignment_id):
            self._count_bytes(row.bytes_up, row.bytes_down)
        if row.outcome is None:
            run.received.add(row.assignment_id)
            return
        run.received.discard(row.assignment_id)
        if not shown.counts("ended", row.assignment_id):
            return
        self._updates.labels(str(row.outcome)).inc()
        if row.staleness is not None:
            self._staleness.observe(row.staleness)

    def _close(self, run: _Run, number: int, version: int, at: float, seconds: float | None, *, counts: bool) -> None:
        run.round, run.version, run.changed_s = number, version, self._clock()
        opened_at = run.opened.get(number)
        run.opened = {other: opened for other, opened in run.opened.items() if other > number}
        if not counts:
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

"""Buffered writer of one run's history rows: filled by the run's thread, flushed by any.

Writing never delays a round: SQLite gets one transaction per flush, about twice a second, however many rounds close
in between. The journal has everything before; rows that a killed coordinator never wrote are derived from it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from edgefl.storage.repositories.records import AssignmentRow, EvaluationRow, RoundMetrics, UpdateRow
from edgefl.storage.rollback import get_newest_ids
from edgefl.storage.store import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class EventRow:
    """An event of this run, of a device or of none in particular."""

    kind: str
    device_id: str | None
    message: str
    at: float


@dataclass(slots=True)
class HistoryRows:
    """Rows to be written.

    By round are `opened_rounds` (time, number of devices), `closed_rounds` (version, time) and `round_metrics`.
    `repeated_ids` are assignments dispatched a second time: their earlier rows are deleted.
    """

    repeated_ids: list[str] = field(default_factory=list)
    dispatches: list[AssignmentRow] = field(default_factory=list)
    updates: dict[str, UpdateRow] = field(default_factory=dict)
    evaluations: list[EvaluationRow] = field(default_factory=list)
    opened_rounds: dict[int, tuple[float, int]] = field(default_factory=dict)
    closed_rounds: dict[int, tuple[int, float]] = field(default_factory=dict)
    round_metrics: dict[int, RoundMetrics] = field(default_factory=dict)
    events: list[EventRow] = field(default_factory=list)
    accuracy: float | None = None
    reason: str | None = None

    def merge(self, newer: HistoryRows) -> HistoryRows:
        """Returns the rows of both, as if added one after the other."""
        opened_rounds = dict(self.opened_rounds)
        for number, (at, num_devices) in newer.opened_rounds.items():
            first_at, num_earlier = opened_rounds.get(number, (at, 0))
            opened_rounds[number] = first_at, num_earlier + num_devices
        metrics = dict(self.round_metrics)
        for number, newer_metrics in newer.round_metrics.items():
            metrics[number] = metrics.get(number, RoundMetrics()) | newer_metrics
        return HistoryRows(
            repeated_ids=[*self.repeated_ids, *newer.repeated_ids],
            dispatches=[*self.dispatches, *newer.dispatches],
            updates=self.updates | newer.updates,
            evaluations=[*self.evaluations, *newer.evaluations],
            opened_rounds=opened_rounds,
            closed_rounds=self.closed_rounds | newer.closed_rounds,
            round_metrics=metrics,
            events=[*self.events, *newer.events],
            accuracy=self.accuracy if newer.accuracy is None else newer.accuracy,
            reason=self.reason if newer.reason is None else newer.reason,
        )


def _ignore_rows(_rows: HistoryRows) -> None:
    pass


class HistoryWriter:
    """Buffers rows of one thread, which publishes them once the journal is durable; any thread may `flush`.

    The publishing thread calls `on_publish` with all rows, and `on_checkpoint` when none of them will be repeated.
    """

    def __init__(
        self,
        store: Store,
        run_id: str,
        on_publish: Callable[[HistoryRows], None] = _ignore_rows,
        on_checkpoint: Callable[[], None] = lambda: None,
    ) -> None:
        self._store, self._run_id = store, run_id
        self._on_publish, self.on_checkpoint = on_publish, on_checkpoint
        self._staged, self._ready = HistoryRows(), HistoryRows()
        self._lock, self._write_lock = threading.Lock(), threading.Lock()

    def add_dispatches(self, rows: Sequence[AssignmentRow], *, can_repeat: bool = False) -> None:
        """Adds dispatched assignments; the first of a round opens it.

        With `can_repeat` some may have been dispatched before the run was resumed; only this time counts.
        """
        if can_repeat:
            self._staged.repeated_ids += [row.assignment_id for row in rows]
        self._staged.dispatches += rows
        for row in rows:
            opened_at, num_devices = self._staged.opened_rounds.get(row.round, (row.dispatched_at, 0))
            self._staged.opened_rounds[row.round] = opened_at, num_devices + 1

    def add_updates(self, rows: Sequence[UpdateRow]) -> None:
        """Adds outcomes of assignments; a later row of an assignment replaces the earlier one."""
        self._staged.updates |= {row.assignment_id: row for row in rows}

    def close_round(self, round_number: int, *, version: int, at: float) -> None:
        """Closes a round, also one without assignments."""
        self._staged.opened_rounds.setdefault(round_number, (at, 0))
        self._staged.closed_rounds[round_number] = version, at

    def add_round_metrics(self, round_number: int, metrics: RoundMetrics) -> None:
        """Adds metrics of a round, beside its sums; earlier ones stay."""
        self._staged.round_metrics[round_number] = (
            self._staged.round_metrics.get(round_number, RoundMetrics()) | metrics
        )

    def add_evaluation(self, row: EvaluationRow) -> None:
        self._staged.evaluations.append(row)

    def update_accuracy(self, accuracy: float) -> None:
        """Sets the newest accuracy of the run's model."""
        self._staged.accuracy = accuracy

    def update_reason(self, reason: str) -> None:
        """Sets what is said beside the run's status while it is running."""
        self._staged.reason = reason

    def add_event(self, row: EventRow) -> None:
        self._staged.events.append(row)

    def publish(self) -> None:
        """Makes the added rows ready to be written."""
        staged, self._staged = self._staged, HistoryRows()
        self._on_publish(staged)
        with self._lock:
            self._ready = self._ready.merge(staged)

    def flush(self) -> None:
        """Writes the published rows in one transaction; when that fails, they stay buffered.

        Raises:
            StoreError: the store cannot be written; `StoreFullError` when there is no room.
        """
        with self._write_lock:
            with self._lock:
                rows, self._ready = self._ready, HistoryRows()
            if rows == HistoryRows():
                return
            try:
                self._write(rows)
            except BaseException:  # an interrupt too: no row may be lost
                with self._lock:
                    self._ready = rows.merge(self._ready)
                raise

    def sync(self) -> None:
        """Flushes, and returns when every row ever written is durable, whichever thread wrote it.

        Raises:
            StoreError: as `flush`.
        """
        self.flush()
        self._store.sync()

    def get_newest_ids(self) -> dict[str, int]:
        """Returns the ids of the run's newest rows in the store; see `Checkpoint`."""
        return get_newest_ids(self._store, self._run_id)

    def finish(self) -> None:
        """Flushes and updates the sums of all rounds, with what arrived after they had closed.

        Raises:
            StoreError: as `flush`.
        """
        self.flush()
        self._store.update_round_sums(self._run_id)

    def _write(self, rows: HistoryRows) -> None:
        store, run_id = self._store, self._run_id
        with store.batch():
            store.open_rounds(run_id, rows.opened_rounds)
            store.delete_updates(run_id, rows.repeated_ids)
            store.record_assignments(run_id, rows.dispatches)
            store.record_updates(run_id, list(rows.updates.values()))
            store.record_evaluations(run_id, rows.evaluations)
            store.close_rounds(run_id, rows.closed_rounds)
            for number, metrics in rows.round_metrics.items():
                store.set_round_metrics(run_id, number, metrics)
            for event in rows.events:
                store.record_event(event.kind, event.message, at=event.at, run_id=run_id, device_id=event.device_id)
            if rows.accuracy is not None:
                store.set_run_accuracy(run_id, rows.accuracy)
            if rows.reason is not None:
                store.set_running_reason(run_id, rows.reason)

"""Writes the history of a run: the journal that the loop sees, with the rows of the store derived from it.

Rows are collected during a turn of the loop and written in one transaction at `commit`, after the journal itself is
on disk. If the coordinator dies in between, the journal still knows.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from edgefl.storage.records import DispatchRow, EvaluationRow, RunStatus, UpdateRow
from edgefl.storage.store import Store
from edgefl.types import Assignment, Decision, Evaluated, Event, Lost, Outcome, Update

log = logging.getLogger(__name__)


class Wal(Protocol):
    """The write-ahead log of one run (`storage.journal`)."""

    def received(self, events: Sequence[Event]) -> Sequence[Event]: ...
    def decided(self, decision: Decision) -> None: ...
    def aggregated(self, version: int, assignment_ids: Sequence[str]) -> None: ...
    def commit(self) -> None: ...


@dataclass(slots=True)
class _Turn:
    """What one turn of the loop adds to the store."""

    dispatches: list[DispatchRow] = field(default_factory=list)
    updates: dict[str, UpdateRow] = field(default_factory=dict)
    evaluations: list[EvaluationRow] = field(default_factory=list)
    opened: dict[int, int] = field(default_factory=dict)
    closed: dict[int, int] = field(default_factory=dict)
    lost: list[Lost] = field(default_factory=list)
    accuracy: float | None = None


class Recorder:
    """Implements `Journal` for one run, over its write-ahead log and the store.

    Args:
        run_id: as in the store.
        store: where the rows go.
        wal: where everything goes first.
        clock: Unix seconds, for the rows.
        monotonic: the fleet's clock, which the events carry.
        checkpoint: called with (version, state) after every aggregation.
    """

    def __init__(
        self,
        *,
        run_id: str,
        store: Store,
        wal: Wal,
        clock: Callable[[], float],
        monotonic: Callable[[], float],
        checkpoint: Callable[[int, object], None],
    ) -> None:
        self._run_id, self._store, self._wal = run_id, store, wal
        self._clock, self._monotonic, self._checkpoint = clock, monotonic, checkpoint
        self._turn = _Turn()
        self._unused: dict[str, tuple[UpdateRow, float]] = {}
        self._rounds: dict[str, int] = {}
        self._round_opened_s: dict[int, float] = {}

    def received(self, events: Sequence[Event]) -> Sequence[Event]:
        for event in events:
            match event:
                case Update():
                    row = self._update_row(event)
                    self._unused[event.assignment_id] = row, event.received_s
                    self._turn.updates[event.assignment_id] = row
                case Evaluated():
                    self._turn.evaluations.append(self._evaluation_row(event))
                    self._turn.accuracy = event.accuracy if event.source != "device" else self._turn.accuracy
                case Lost():
                    self._note_lost(event)
        return self._wal.received(events)

    def decided(self, decision: Decision) -> None:
        self._wal.decided(decision)
        now = self._clock()
        for order in decision.orders:
            if isinstance(order, Assignment):
                number = order.base_version + 1
                self._rounds[order.assignment_id] = number
                self._round_opened_s.setdefault(number, self._monotonic())
                self._turn.opened[number] = self._turn.opened.get(number, 0) + 1
                self._turn.dispatches.append(
                    DispatchRow(
                        assignment_id=order.assignment_id,
                        device_id=order.device_id,
                        round=number,
                        base_version=order.base_version,
                        dispatched_at=now,
                    )
                )

    def aggregated(self, version: int, assignment_ids: Sequence[str], state: object) -> None:
        self._wal.aggregated(version, assignment_ids)
        now_s = self._monotonic()
        rows = []
        for assignment_id in assignment_ids:
            row, received_s = self._unused.pop(assignment_id)
            rows.append(
                replace(
                    row,
                    round=version,
                    outcome=Outcome.USED,
                    applied_version=version - 1,
                    staleness=version - 1 - row.base_version,
                    wait_s=max(0.0, now_s - received_s),
                )
            )
        self._turn.updates |= {row.assignment_id: row for row in rows}
        self._turn.closed[version] = version
        _log_round(version, rows, now_s - self._round_opened_s.pop(version, now_s))
        self._checkpoint(version, state)

    def commit(self) -> None:
        """Makes the turn durable: first the log, then the rows that follow from it."""
        self._wal.commit()
        turn, self._turn = self._turn, _Turn()
        if not (turn.dispatches or turn.updates or turn.evaluations or turn.closed):
            return
        now, store, run_id = self._clock(), self._store, self._run_id
        with store.batch():
            for number, num_devices in turn.opened.items():
                store.open_round(run_id, number, started_at=now, num_devices=num_devices)
            store.record_dispatches(run_id, turn.dispatches)
            store.record_updates(run_id, list(turn.updates.values()))
            store.record_evaluations(run_id, turn.evaluations)
            for number, version in turn.closed.items():
                store.close_round(run_id, number, version=version, closed_at=now)
            for lost in turn.lost:
                store.record_event(
                    "assignment-lost",
                    f"{lost.assignment_id}: {lost.reason}",
                    at=now,
                    run_id=run_id,
                    device_id=lost.device_id,
                )
            if turn.accuracy is not None:
                store.set_run_accuracy(run_id, turn.accuracy)

    def finish(self, status: RunStatus, reason: str) -> None:
        """Writes how the run ended; what arrived and was never used was late."""
        for row, _ in self._unused.values():
            self._turn.updates[row.assignment_id] = replace(row, outcome=Outcome.LATE)
        self._unused.clear()
        self.commit()
        now = self._clock()
        with self._store.batch(durable=True):
            self._store.set_run_status(self._run_id, status, at=now, reason=reason)
            self._store.record_event(f"run-{status}", reason, at=now, run_id=self._run_id)

    def _note_lost(self, lost: Lost) -> None:
        number = self._rounds.get(lost.assignment_id)
        log.warning("%s of %s brings no update: %s", lost.assignment_id, lost.device_id, lost.reason)
        self._turn.lost.append(lost)
        if number is not None:
            self._turn.updates[lost.assignment_id] = UpdateRow(
                assignment_id=lost.assignment_id,
                device_id=lost.device_id,
                round=number,
                base_version=number - 1,
                outcome=lost.outcome,
                reason=lost.reason,
            )

    def _update_row(self, update: Update) -> UpdateRow:
        metrics = update.metrics
        return UpdateRow(
            assignment_id=update.assignment_id,
            device_id=update.device_id,
            round=self._rounds.get(update.assignment_id, update.base_version + 1),
            base_version=update.base_version,
            iterations=metrics.iterations,
            num_examples=metrics.num_examples,
            bytes_up=metrics.bytes_up,
            bytes_down=metrics.bytes_down,
            compute_s=metrics.compute_s,
            send_s=metrics.send_s,
            loss=metrics.loss,
            received_at=self._clock(),
            metrics=dict(metrics.extra),
        )

    def _evaluation_row(self, evaluated: Evaluated) -> EvaluationRow:
        log.info(
            "version %d: accuracy %.4f, loss %.4f on %d examples of %s",
            evaluated.version,
            evaluated.accuracy,
            evaluated.loss,
            evaluated.num_examples,
            evaluated.device_id,
        )
        return EvaluationRow(
            assignment_id=evaluated.assignment_id,
            round=evaluated.round,
            version=evaluated.version,
            device_id=evaluated.device_id,
            source=evaluated.source,
            loss=evaluated.loss,
            accuracy=evaluated.accuracy,
            num_examples=evaluated.num_examples,
            at=self._clock(),
            metrics=dict(evaluated.metrics),
        )


def _log_round(number: int, rows: Sequence[UpdateRow], seconds: float) -> None:
    num_bytes = sum((row.bytes_up or 0) + (row.bytes_down or 0) for row in rows)
    log.info("round %d closed: %d updates, %.2f s, %d kB", number, len(rows), seconds, num_bytes // 1000)

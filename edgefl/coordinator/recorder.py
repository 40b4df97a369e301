"""Writes the history of a run: the journal that the loop sees, and the rows of the store derived from it.

`commit` makes the journal durable and nothing else; the rows go to the ledger, which writes them soon.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from edgefl.coordinator.ledger import Ledger, LostRow
from edgefl.loop import Scoreboard
from edgefl.storage.records import DispatchRow, EvaluationRow, UpdateRow
from edgefl.types import Assignment, Decision, Evaluated, Event, Lost, Outcome, Update

log = logging.getLogger(__name__)


class Wal(Protocol):
    """The write-ahead log of one run (`storage.journal`)."""

    def received(self, events: Sequence[Event]) -> Sequence[Event]: ...
    def decided(self, decision: Decision) -> None: ...
    def aggregated(self, version: int, assignment_ids: Sequence[str]) -> None: ...
    def commit(self) -> None: ...


class Recorder:
    """Implements `Journal` for one run, over its write-ahead log and its ledger.

    Args:
        wal: where everything goes first.
        ledger: where the rows go.
        clock: Unix seconds, for the rows.
        monotonic: the fleet's clock, which the events carry.
        checkpoint: called with (version, state) after every aggregation.
    """

    def __init__(
        self,
        *,
        wal: Wal,
        ledger: Ledger,
        clock: Callable[[], float],
        monotonic: Callable[[], float],
        checkpoint: Callable[[int, object], None],
    ) -> None:
        self._wal, self._ledger = wal, ledger
        self._clock, self._monotonic, self._checkpoint = clock, monotonic, checkpoint
        self._unused: dict[str, tuple[UpdateRow, float]] = {}
        self._rounds: dict[str, int] = {}
        self._round_opened_s: dict[int, float] = {}
        self._scores = Scoreboard()

    def received(self, events: Sequence[Event]) -> Sequence[Event]:
        for event in events:
            match event:
                case Update():
                    row = self._update_row(event)
                    self._unused[event.assignment_id] = row, event.received_s
                    self._ledger.update([row])
                case Evaluated():
                    self._ledger.evaluation(self._evaluation_row(event))
                    self._note_score(event)
                case Lost():
                    self._note_lost(event)
                    self._note_score(event)
        return self._wal.received(events)

    def decided(self, decision: Decision) -> None:
        self._wal.decided(decision)
        self._scores.ask(decision.orders)
        now, rows = self._clock(), []
        for order in decision.orders:
            if isinstance(order, Assignment):
                number = order.base_version + 1
                self._rounds[order.assignment_id] = number
                self._round_opened_s.setdefault(number, self._monotonic())
                rows.append(
                    DispatchRow(
                        assignment_id=order.assignment_id,
                        device_id=order.device_id,
                        round=number,
                        base_version=order.base_version,
                        dispatched_at=now,
                    )
                )
        self._ledger.dispatch(rows)

    def aggregated(self, version: int, assignment_ids: Sequence[str], state: object) -> None:
        self._wal.aggregated(version, assignment_ids)
        now_s = self._monotonic()
        rows = []
        for assignment_id in assignment_ids:
            row, received_s = self._unused.pop(assignment_id)
            self._rounds.pop(assignment_id, None)
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
        self._ledger.update(rows)
        self._ledger.close(version, version=version, at=self._clock())
        _log_round(version, rows, now_s - self._round_opened_s.pop(version, now_s))
        self._checkpoint(version, state)

    def commit(self) -> None:
        """Makes the journal durable; only then may the rows that follow from it be written."""
        self._wal.commit()
        self._ledger.publish()

    def finish(self) -> None:
        """Writes all rows; what arrived and was never used was late."""
        self._ledger.update([replace(row, outcome=Outcome.LATE) for row, _ in self._unused.values()])
        self._unused.clear()
        self.commit()
        self._ledger.flush()

    def _note_score(self, event: Evaluated | Lost) -> None:
        self._scores.note(event)
        if self._scores.accuracy is not None:
            self._ledger.accuracy(self._scores.accuracy)

    def _note_lost(self, lost: Lost) -> None:
        number = self._rounds.get(lost.assignment_id)
        log.warning("%s of %s brings no update: %s", lost.assignment_id, lost.device_id, lost.reason)
        self._ledger.lost(
            LostRow(assignment_id=lost.assignment_id, device_id=lost.device_id, reason=lost.reason, at=self._clock())
        )
        if number is not None:
            row = UpdateRow(
                assignment_id=lost.assignment_id,
                device_id=lost.device_id,
                round=number,
                base_version=number - 1,
                outcome=lost.outcome,
                reason=lost.reason,
            )
            self._ledger.update([row])

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
            bytes_up=evaluated.bytes_up,
            bytes_down=evaluated.bytes_down,
            at=self._clock(),
            metrics=dict(evaluated.metrics),
        )


def _log_round(number: int, rows: Sequence[UpdateRow], seconds: float) -> None:
    num_bytes = sum((row.bytes_up or 0) + (row.bytes_down or 0) for row in rows)
    log.info("round %d closed: %d updates, %.2f s, %d kB", number, len(rows), seconds, num_bytes // 1000)

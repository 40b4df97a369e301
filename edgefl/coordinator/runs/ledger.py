"""The rows of one run on their way into the store: gathered by the run's thread, written by whoever flushes.

Writing is not on the way of a round: SQLite gets one transaction per flush, about twice a second, however many rounds
close in between. The journal has everything long before; rows that a killed coordinator never wrote follow from it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from edgefl.storage.records import DispatchRow, EvaluationRow, RoundFigures, UpdateRow
from edgefl.storage.store import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class EventRow:
    """Something that happened in this run, to a device or to no one in particular."""

    kind: str
    device_id: str | None
    message: str
    at: float


@dataclass(slots=True)
class Rows:
    """What waits to be written, by round: `opened` (time, devices asked), `closed` (version, time), `figures`.

    `again` are assignments that are given a second time: what is known of them goes.
    """

    again: list[str] = field(default_factory=list)
    dispatches: list[DispatchRow] = field(default_factory=list)
    updates: dict[str, UpdateRow] = field(default_factory=dict)
    evaluations: list[EvaluationRow] = field(default_factory=list)
    opened: dict[int, tuple[float, int]] = field(default_factory=dict)
    closed: dict[int, tuple[int, float]] = field(default_factory=dict)
    figures: dict[int, RoundFigures] = field(default_factory=dict)
    events: list[EventRow] = field(default_factory=list)
    accuracy: float | None = None

    def followed_by(self, newer: Rows) -> Rows:
        """Returns both, as if they had been taken one after the other."""
        opened = dict(self.opened)
        for number, (at, num_devices) in newer.opened.items():
            first_at, asked = opened.get(number, (at, 0))
            opened[number] = first_at, asked + num_devices
        figures = dict(self.figures)
        for number, known in newer.figures.items():
            figures[number] = figures.get(number, RoundFigures()) | known
        return Rows(
            again=[*self.again, *newer.again],
            dispatches=[*self.dispatches, *newer.dispatches],
            updates=self.updates | newer.updates,
            evaluations=[*self.evaluations, *newer.evaluations],
            opened=opened,
            closed=self.closed | newer.closed,
            figures=figures,
            events=[*self.events, *newer.events],
            accuracy=self.accuracy if newer.accuracy is None else newer.accuracy,
        )


def _unseen(_rows: Rows) -> None:
    pass


class Ledger:
    """Takes rows in one thread, which publishes them once the journal is durable; `flush` may be called from any.

    In the thread that publishes `on_publish` is told of all that was taken, and `on_checkpoint` that nothing of it
    will be taken again.
    """

    def __init__(
        self,
        store: Store,
        run_id: str,
        on_publish: Callable[[Rows], None] = _unseen,
        on_checkpoint: Callable[[], None] = lambda: None,
    ) -> None:
        self._store, self._run_id = store, run_id
        self._on_publish, self.on_checkpoint = on_publish, on_checkpoint
        self._staged, self._ready = Rows(), Rows()
        self._lock, self._writing = threading.Lock(), threading.Lock()

    def dispatch(self, rows: Sequence[DispatchRow], *, may_repeat: bool = False) -> None:
        """Takes assignments that go out; the first of a round opens it.

        With `may_repeat` some may have gone out before the run was taken up again; only this time counts.
        """
        if may_repeat:
            self._staged.again += [row.assignment_id for row in rows]
        self._staged.dispatches += rows
        for row in rows:
            opened_at, num_devices = self._staged.opened.get(row.round, (row.dispatched_at, 0))
            self._staged.opened[row.round] = opened_at, num_devices + 1

    def update(self, rows: Sequence[UpdateRow]) -> None:
        """Takes what came of assignments; a later row of the same assignment replaces the earlier one."""
        self._staged.updates |= {row.assignment_id: row for row in rows}

    def close(self, number: int, *, version: int, at: float) -> None:
        """Ends a round, also one that nothing was given out for."""
        self._staged.opened.setdefault(number, (at, 0))
        self._staged.closed[number] = version, at

    def figures(self, number: int, figures: RoundFigures) -> None:
        """Takes what is known of a round beside its sums; what was known of it before stays."""
        self._staged.figures[number] = self._staged.figures.get(number, RoundFigures()) | figures

    def evaluation(self, row: EvaluationRow) -> None:
        self._staged.evaluations.append(row)

    def accuracy(self, accuracy: float) -> None:
        """Takes the newest accuracy of the run's model."""
        self._staged.accuracy = accuracy

    def event(self, row: EventRow) -> None:
        self._staged.events.append(row)

    def publish(self) -> None:
        """Makes what was taken ready to be written."""
        staged, self._staged = self._staged, Rows()
        self._on_publish(staged)
        with self._lock:
            self._ready = self._ready.followed_by(staged)

    def flush(self) -> None:
        """Writes what is ready in one transaction; when that fails, nothing is written and nothing forgotten.

        Raises:
            StoreError: the store cannot be written; `StoreFullError` when there is no room.
        """
        with self._writing:
            with self._lock:
                rows, self._ready = self._ready, Rows()
            if rows == Rows():
                return
            try:
                self._write(rows)
            except BaseException:
                with self._lock:
                    self._ready = rows.followed_by(self._ready)
                raise

    def sync(self) -> None:
        """Writes what is ready, and returns when all that was ever written is durable, whichever thread wrote it.

        Raises:
            StoreError: as `flush`.
        """
        self.flush()
        self._store.sync()

    def finish(self) -> None:
        """Writes what is ready and sums the rounds up: each of them with what came after it had closed.

        Raises:
            StoreError: as `flush`.
        """
        self.flush()
        self._store.sum_rounds(self._run_id)

    def _write(self, rows: Rows) -> None:
        store, run_id = self._store, self._run_id
        with store.batch():
            store.open_rounds(run_id, rows.opened)
            store.forget_updates(run_id, rows.again)
            store.record_dispatches(run_id, rows.dispatches)
            store.record_updates(run_id, list(rows.updates.values()))
            store.record_evaluations(run_id, rows.evaluations)
            store.close_rounds(run_id, rows.closed)
            for number, figures in rows.figures.items():
                store.set_round_figures(run_id, number, figures)
            for event in rows.events:
                store.record_event(event.kind, event.message, at=event.at, run_id=run_id, device_id=event.device_id)
            if rows.accuracy is not None:
                store.set_run_accuracy(run_id, rows.accuracy)

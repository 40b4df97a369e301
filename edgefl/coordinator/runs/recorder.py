"""Writes the history of a run: the journal that the loop sees, and the rows of the store derived from it.

`commit` makes the journal durable and nothing else; the rows go to the ledger, which writes them soon.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from edgefl.coordinator.runs.facts import Facts, no_facts
from edgefl.coordinator.runs.ledger import EventRow, Ledger
from edgefl.errors import StrategyError
from edgefl.node_scores import NodeAccuracy, NodeScores
from edgefl.storage.records import DispatchRow, EvaluationRow, RoundFigures, UpdateRow
from edgefl.tally import RoundCount, Scoreboard, Tally
from edgefl.types import Assignment, Decision, Evaluated, Event, Lost, Outcome, Update

log = logging.getLogger(__name__)

TOLD = ("assignment-lost", "device-flagged")
"""Kinds of events that follow from what the journal has."""


class Wal(Protocol):
    """The write-ahead log of one run (`storage.journal`)."""

    def received(self, events: Sequence[Event]) -> Sequence[Event]: ...
    def decided(self, decision: Decision) -> None: ...
    def aggregated(self, version: int, assignment_ids: Sequence[str]) -> None: ...
    def commit(self) -> None: ...


@dataclass(slots=True)
class _OpenRound:
    """What the round that is not closed yet has brought in this life of the coordinator.

    `state` is the strategy's at `version`, which is 0 while the round has brought nothing.
    """

    version: int = 0
    num_updates: int = 0
    num_bytes: int = 0
    state: object = None

    def add(self, version: int, rows: Sequence[UpdateRow], state: object) -> None:
        self.version, self.state = version, state
        self.num_updates += len(rows)
        self.num_bytes += sum((row.bytes_up or 0) + (row.bytes_down or 0) for row in rows)


class Recorder:
    """Implements `Journal` for one run, over its write-ahead log and its ledger.

    Args:
        wal: where everything goes first.
        ledger: where the rows go.
        rounds: which round a version belongs to; the loop's own, which learns it with the first work.
        clock: Unix seconds, for the rows.
        monotonic: the fleet's clock, which the events carry.
        on_version: told every version that was made.
        flagged: the devices that are not asked any more because their updates were refused too often.
        facts: asked at the end of every round.
        earlier: updates that came before the run was taken up again, and were not used yet.
        may_repeat: an assignment may have been given before, for other work.
    """

    def __init__(  # noqa: PLR0913 the parts of a run, by name
        self,
        *,
        wal: Wal,
        ledger: Ledger,
        rounds: RoundCount,
        clock: Callable[[], float],
        monotonic: Callable[[], float],
        on_version: Callable[[int], None] = lambda _version: None,
        flagged: Callable[[], Collection[str]] = frozenset,
        facts: Facts = no_facts,
        earlier: Sequence[UpdateRow] = (),
        may_repeat: bool = False,
    ) -> None:
        self._wal, self._ledger, self._count = wal, ledger, rounds
        self._clock, self._monotonic, self._on_version = clock, monotonic, on_version
        self._flagged, self._known_flagged = flagged, set[str]()
        self._facts = facts
        self._unused: dict[str, tuple[UpdateRow, float]] = {}
        self._asked: dict[str, Assignment] = {}
        self._opened_s: dict[int, float] = {}
        self._began_before = set[int]()
        self._open = _OpenRound()
        self._scores, self._nodes = Scoreboard(), NodeScores()
        self._may_repeat = may_repeat
        for row in earlier:
            self._unused[row.assignment_id] = row, self._monotonic()

    @property
    def opened_s(self) -> Mapping[int, float]:
        """When rounds began that are not closed, by their number, in seconds of the run's own clock."""
        return self._opened_s

    def go_on(
        self, asked: Iterable[Assignment], tally: Tally, opened_s: Mapping[int, float], state: object = None
    ) -> None:
        """Takes up what was asked, what was scored and which rounds began before; who is flagged by now was told."""
        self._reopen(tally.version, state)
        self._asked = {order.assignment_id: order for order in asked}
        self._opened_s = dict(opened_s)
        rounds = {self._count.of(order.base_version + 1) for order in self._asked.values()}
        self._began_before = rounds - self._opened_s.keys()
        self._scores, self._nodes = copy.deepcopy(tally.scores), copy.deepcopy(tally.nodes)
        self._known_flagged = set(self._flagged())

    def go_on_behind(self, version: int, state: object = None) -> None:
        """Takes up a round that is open at a version; how long it lasted before, its row says."""
        self._known_flagged = set(self._flagged())
        self._reopen(version, state)
        if self._open.version:
            self._began_before = {self._count.of(version)}

    def _reopen(self, version: int, state: object) -> None:
        if not self._count.ends_at(version):
            self._open = _OpenRound(version=version, state=state)

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
        self._nodes.ask(decision.orders)
        assignments = [order for order in decision.orders if isinstance(order, Assignment)]
        if not assignments:
            return
        self._count.begin(len({order.device_id for order in assignments}))
        now, rows = self._clock(), []
        for order in assignments:
            number = self._count.of(order.base_version + 1)
            self._asked[order.assignment_id] = order
            self._unused.pop(order.assignment_id, None)  # given a second time
            self._opened_s.setdefault(number, self._monotonic())
            rows.append(
                DispatchRow(
                    assignment_id=order.assignment_id,
                    device_id=order.device_id,
                    round=number,
                    base_version=order.base_version,
                    dispatched_at=now,
                    codec=order.codec or "dense",
                )
            )
        self._ledger.dispatch(rows, may_repeat=self._may_repeat)

    def aggregated(self, version: int, assignment_ids: Sequence[str], state: object) -> None:
        self._wal.aggregated(version, assignment_ids)
        now_s, number = self._monotonic(), self._count.of(version)
        rows = []
        for assignment_id in assignment_ids:
            row, received_s = self._taken(assignment_id)
            self._asked.pop(assignment_id, None)
            rows.append(
                replace(
                    row,
                    round=number,
                    outcome=Outcome.USED,
                    applied_version=version - 1,
                    staleness=version - 1 - row.base_version,
                    wait_s=max(0.0, now_s - received_s),
                )
            )
        self._ledger.update(rows)
        self._open.add(version, rows, state)
        if self._count.ends_at(version):
            self._close_round(number, now_s)
        self._on_version(version)

    def _close_round(self, number: int, now_s: float) -> None:
        done, self._open = self._open, _OpenRound()
        self._ledger.close(number, version=done.version, at=self._clock())
        opened_s = self._opened_s.pop(number, None)
        if opened_s is not None and number not in self._began_before:
            # Not the difference of two Unix times: the board's clock may have been set in between.
            self._ledger.figures(number, {"seconds": max(0.0, now_s - opened_s)})
        if facts := {name: float(value) for name, value in self._facts(done.state).items()}:
            self._ledger.figures(number, {"facts": facts})
        log.info(
            "round %d closed: %d updates, %.2f s, %d kB",
            number,
            done.num_updates,
            now_s - (now_s if opened_s is None else opened_s),
            done.num_bytes // 1000,
        )

    def commit(self) -> None:
        """Makes the journal durable; only then may the rows that follow from it be written."""
        self._wal.commit()
        self._ledger.publish()

    def finish(self) -> None:
        """Writes all rows; a round that is not whole ends here, and what arrived and was never used was late."""
        if self._open.version:
            self._close_round(self._count.of(self._open.version), self._monotonic())
        for accuracy in self._nodes.rest():
            self._note_nodes(accuracy)
        self._ledger.update([replace(row, outcome=Outcome.LATE) for row, _ in self._unused.values()])
        self._unused.clear()
        self.commit()
        self._ledger.finish()

    def _note_score(self, event: Evaluated | Lost) -> None:
        self._scores.note(event)
        if self._scores.accuracy is not None:
            self._ledger.accuracy(self._scores.accuracy)
        if (accuracy := self._nodes.note(event)) is not None:
            self._note_nodes(accuracy)

    def _note_nodes(self, accuracy: NodeAccuracy) -> None:
        log.info("round %d: accuracy of the nodes %.4f, worst %.4f", accuracy.round, accuracy.mean, accuracy.worst)
        figures = RoundFigures(node_accuracy=accuracy.mean, worst_node_accuracy=accuracy.worst)
        self._ledger.figures(accuracy.round, figures)

    def _note_lost(self, lost: Lost) -> None:
        order = self._asked.pop(lost.assignment_id, None)
        log.warning("%s of %s brings no update: %s", lost.assignment_id, lost.device_id, lost.reason)
        self._tell("assignment-lost", lost.device_id, f"{lost.assignment_id}: {lost.reason}")
        if lost.outcome is Outcome.REFUSED:
            self._note_flag(lost)
        if order is not None:
            row = UpdateRow(
                assignment_id=lost.assignment_id,
                device_id=lost.device_id,
                round=self._count.of(order.base_version + 1),
                base_version=order.base_version,
                outcome=lost.outcome,
                reason=lost.reason,
                ended_at=self._clock(),
            )
            self._ledger.update([row])

    def _note_flag(self, lost: Lost) -> None:
        """Writes it down once when the device that was just refused is not asked any more."""
        if lost.device_id in self._flagged() and lost.device_id not in self._known_flagged:
            self._known_flagged.add(lost.device_id)
            log.warning("%s is flagged and not asked again in this run", lost.device_id)
            self._tell("device-flagged", lost.device_id, lost.reason)

    def _tell(self, kind: str, device_id: str, message: str) -> None:
        self._ledger.event(EventRow(kind=kind, device_id=device_id, message=message, at=self._clock()))

    def _taken(self, assignment_id: str) -> tuple[UpdateRow, float]:
        """Returns the row of an update that is used now, and when it came.

        Raises:
            StrategyError: there is no such update, or it was used before.
        """
        if assignment_id not in self._unused:
            raise StrategyError(f"used: the strategy names {assignment_id!r}, which never came or was used before")
        return self._unused.pop(assignment_id)

    def _update_row(self, update: Update) -> UpdateRow:
        metrics, now = update.metrics, self._clock()
        return UpdateRow(
            assignment_id=update.assignment_id,
            device_id=update.device_id,
            round=self._count.of(update.base_version + 1),
            base_version=update.base_version,
            iterations=metrics.iterations,
            num_examples=metrics.num_examples,
            bytes_up=metrics.bytes_up,
            bytes_down=metrics.bytes_down,
            compute_s=metrics.compute_s,
            send_s=metrics.send_s,
            loss=metrics.loss,
            received_at=now,
            ended_at=now,
            max_temperature_c=metrics.max_temperature_c,
            throttled=metrics.throttled,
            signal_dbm=metrics.signal_dbm,
            link_bits_per_s=metrics.link_bits_per_s,
            energy_j=metrics.energy_j,
            paced_s=metrics.paced_s,
            metrics=dict(metrics.extra),
        )

    def _evaluation_row(self, evaluated: Evaluated) -> EvaluationRow:
        log.log(
            logging.DEBUG if evaluated.subject else logging.INFO,
            "version %d%s: accuracy %.4f, loss %.4f on %d examples of %s",
            evaluated.version,
            f" of {evaluated.subject}" if evaluated.subject else "",
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
            subject=evaluated.subject,
        )

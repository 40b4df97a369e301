"""The fleet as the journal knows it: first what it did before the coordinator ended, then what it does now.

What the loop sees of the real fleet goes into the journal turn by turn. A run that is taken up again is shown that
first; what is still out then goes over to the real boards, which may have it done by now.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from edgefl.coordinator.dispatch.fleet_book import FleetBook
from edgefl.coordinator.dispatch.live_view import LiveView
from edgefl.coordinator.dispatch.lives import Lives
from edgefl.coordinator.dispatch.replay import ReplayError, RunClock, Script
from edgefl.storage.journal_records import Seen, Turn
from edgefl.types import (
    Assignment,
    Decision,
    DeviceInfo,
    Evaluated,
    Evaluation,
    Event,
    FleetView,
    Lost,
    ModelSource,
    Order,
    Progress,
    Recall,
    Role,
    Speed,
    Update,
    Vitals,
)


class Wal(Protocol):
    """The write-ahead log of one run (`storage.journal`)."""

    def received(self, events: Sequence[Event]) -> Sequence[Event]: ...
    def decided(self, decision: Decision) -> None: ...
    def aggregated(self, version: int, assignment_ids: Sequence[str]) -> None: ...
    def turned(self, entry: Turn | Seen) -> None: ...
    def commit(self) -> None: ...


class Real(Protocol):
    """The live fleet."""

    def view(self) -> LiveView: ...
    def adopt(self, out: Sequence[Given], source: ModelSource) -> None: ...
    def dispatch(self, orders: Sequence[Order], source: ModelSource) -> None: ...
    def wait(self, until_s: float) -> Sequence[Event]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """An order that is out, and when it was given, in the run's own time."""

    order: Assignment | Evaluation
    given_s: float


@dataclass(slots=True, kw_only=True)
class FleetStanding:
    """What a run knows of its fleet between two turns.

    Attributes:
        now_s, at: the run's own time, and Unix seconds.
        out: orders that are not settled, by id, in the order in which they were given.
        recalled: those of them that were recalled.
        devices, speeds, progress, vitals: as in the view; None for a board that had not said how it is.
        life: of the run; None where that was not written down.
        lives: the newest assignments of each life but the first, oldest first.
    """

    now_s: float = 0.0
    at: float = 0.0
    out: dict[str, Given] = field(default_factory=dict)
    recalled: set[str] = field(default_factory=set)
    devices: dict[str, DeviceInfo] = field(default_factory=dict)
    speeds: dict[str, Speed] = field(default_factory=dict)
    progress: dict[str, Progress] = field(default_factory=dict)
    vitals: dict[str, Vitals | None] = field(default_factory=dict)
    life: int | None = None
    lives: dict[int, list[str]] = field(default_factory=dict)


class NoBoards:
    """In place of the live fleet where a journal is only followed: nobody is asked for anything."""

    def view(self) -> LiveView:
        raise ReplayError("the loop goes on behind the end of its journal")

    def adopt(self, out: Sequence[Given], source: ModelSource) -> None:  # noqa: ARG002
        self.view()

    def dispatch(self, orders: Sequence[Order], source: ModelSource) -> None:  # noqa: ARG002
        self.view()

    def wait(self, until_s: float) -> Sequence[Event]:  # noqa: ARG002
        raise ReplayError("the loop waits behind the end of its journal")


class JournaledFleet:
    """Implements `Fleet` over the live one, and the write-ahead log that the run's recorder writes to.

    Args:
        real: the live fleet, which hears its boards already.
        wal: where everything goes that is new.
        script: what is known already; over at once for a run that begins.
        clock: the run's own.
        before: how things stood where the script begins.
        lives: of the run; the first where there was no other.
    """

    def __init__(
        self,
        real: Real,
        wal: Wal,
        script: Script,
        clock: RunClock,
        before: FleetStanding | None = None,
        *,
        lives: Lives | None = None,
    ) -> None:
        self._real, self._wal, self._script, self._clock = real, wal, script, clock
        self._lives = lives or Lives("")
        before = before or FleetStanding()
        self._out, self._recalled = dict(before.out), set(before.recalled)
        self._vitals: dict[str, Vitals] = {}
        self._known_vitals: dict[str, Vitals | None] = {}
        self._see(before.vitals)
        self._book = _opened(before, self._vitals)
        self._view: LiveView | None = None
        self._source: ModelSource | None = None
        self._is_live = False
        self._left: list[Given] = []
        if before.at:
            clock.tell(before.now_s, before.at)
        if script.is_over:
            self._go_live()

    # The fleet.

    def view(self) -> FleetView:
        if not self._is_live and self._script.next_turn is not None:
            return self._shown()
        self._go_live()
        self._view = view = self._real.view()
        devices, progress = view.take_changes()
        turn = Turn(
            now_s=view.now_s,
            at=self._clock.at(),
            devices=devices,
            progress=progress,
            life=self._lives.number,
        )
        self._wal.turned(turn)
        return view

    def dispatch(self, orders: Sequence[Order], source: ModelSource) -> None:
        """Gives out what is new; of what was given before only notes that it is out."""
        self._source, now_s = source, self._clock.now_s()
        for order in orders:
            if not isinstance(order, Recall):
                self._out[order.assignment_id] = Given(order=order, given_s=now_s)
                if self._is_live:
                    self._lives.given(order.assignment_id)
        if self._is_live:
            self._hand_over(source)
            self._real.dispatch(orders, source)
        else:
            for order in orders:
                if isinstance(order, Assignment):
                    self._book.give(order)
        recalled = {order.assignment_id for order in orders if isinstance(order, Recall)}
        self._recalled |= recalled & self._out.keys()

    def wait(self, until_s: float) -> Sequence[Event]:
        if self._is_live or self._script.is_over:
            self._go_live()
            if self._source is not None:
                self._hand_over(self._source)
            events = [self._timed(event) for event in self._real.wait(until_s - self._clock.offset_s)]
        else:
            events = self._script.events()
            if (following := self._script.next_turn) is not None:
                self._clock.tell(following.now_s, following.at)  # they came right before it
        for event in events:
            self._settle(event)
        return events

    # The write-ahead log.

    def received(self, events: Sequence[Event]) -> Sequence[Event]:
        return self._wal.received(events) if self._is_live else events

    def decided(self, decision: Decision) -> None:
        if not decision.orders:
            return
        if not self._is_live and not self._script.is_over:
            self._script.decided(decision.orders)
            return
        self._go_live()
        self._tell_vitals()
        self._wal.decided(decision)

    def aggregated(self, version: int, assignment_ids: Sequence[str]) -> None:
        if not self._is_live and not self._script.is_over:
            self._script.aggregated(version, assignment_ids)
            return
        self._go_live()
        self._wal.aggregated(version, assignment_ids)

    def commit(self) -> None:
        if self._is_live:
            self._wal.commit()

    # Between the two.

    @property
    def is_live(self) -> bool:
        """Whether all that the journal knew has been told."""
        return self._is_live

    def standing(self) -> FleetStanding:
        """Returns how things stand, for a checkpoint; to be asked between two turns of a run that is live."""
        view = self._view or self._book
        known = self._view.seen.known if self._view is not None else self._known_vitals
        return FleetStanding(
            now_s=view.now_s,
            at=self._clock.at(),
            out=dict(self._out),
            recalled=set(self._recalled),
            devices=dict(view.devices),
            speeds=dict(view.speeds),
            progress=dict(view.progress),
            vitals=dict(known),
            life=self._lives.number,
            lives=self._lives.told(),
        )

    def _shown(self) -> FleetBook:
        """Returns the book as it was in the next turn of the journal."""
        turn, seen = self._script.begin_turn()
        self._clock.tell(turn.now_s, turn.at)
        self._book.begin(turn.now_s)
        for device_id, info in turn.devices.items():
            self._book.put(device_id, info)
        for report in turn.progress:
            if report.assignment_id in self._book.busy.get(report.device_id, ()):
                self._book.note_progress(report)
        for news in seen:
            self._see(news.vitals)
        return self._book

    def _see(self, vitals: Mapping[str, Vitals | None]) -> None:
        for device_id, known in vitals.items():
            self._known_vitals[device_id] = known
            if known is None:
                self._vitals.pop(device_id, None)
            else:
                self._vitals[device_id] = known

    def _settle(self, event: Event) -> None:
        if not isinstance(event, Update | Evaluated | Lost):
            return
        given = self._out.pop(event.assignment_id, None)
        self._recalled.discard(event.assignment_id)
        if self._is_live or given is None or not isinstance(given.order, Assignment):
            return
        self._book.settle(given.order)
        if isinstance(event, Update):
            self._book.note_speed(event.device_id, event.metrics)

    def _go_live(self) -> None:
        """Ends the telling: what follows is new."""
        if self._is_live:
            return
        self._is_live, self._left = True, list(self._out.values())
        self._clock.go_live()
        view = self._real.view()
        view.take_over(self._book)
        view.seen.begin(self._known_vitals)
        self._view = view

    def _hand_over(self, source: ModelSource) -> None:
        """Hands what was out when the telling ended to the real boards, once."""
        left, self._left = self._left, []
        if left:
            offset_s = self._clock.offset_s
            self._real.adopt([replace(given, given_s=given.given_s - offset_s) for given in left], source)
            # The word may have gone with the coordinator, and a board that was switched off has forgotten it.
            orders = [given.order for given in left if given.order.assignment_id in self._recalled]
            recalls = [Recall(assignment_id=order.assignment_id, device_id=order.device_id) for order in orders]
            if recalls:
                self._real.dispatch(recalls, source)

    def _tell_vitals(self) -> None:
        if self._view is not None and (news := self._view.seen.take_news()):
            self._wal.turned(Seen(vitals=news))

    def _timed(self, event: Event) -> Event:
        """Returns an event in the run's own time."""
        offset_s = self._clock.offset_s
        if offset_s and isinstance(event, Update):
            return replace(event, received_s=event.received_s + offset_s)
        return event


def _opened(standing: FleetStanding, vitals: dict[str, Vitals]) -> FleetBook:
    book = FleetBook(vitals)
    book.begin(standing.now_s)
    for device_id, info in standing.devices.items():
        book.put(device_id, replace(info, role=Role(info.role)))
    for given in standing.out.values():
        if isinstance(given.order, Assignment):
            book.give(given.order)
    book.restore(standing.speeds, standing.progress)
    return book

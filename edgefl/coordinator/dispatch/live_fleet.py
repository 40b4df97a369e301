"""The live fleet: gives orders to real boards through Flower and MQTT, and turns what comes back into events.

Replies, presence and progress arrive in other threads and go into one queue; all else happens in the thread of the
run, inside `dispatch` and `wait`. A device that dies, fails or takes too long leaves `busy`, and a `Lost` says why.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from edgefl.coordinator.aside import lay_aside
from edgefl.coordinator.dispatch.door import COME_BACK_S, Door, Note, Terms
from edgefl.coordinator.dispatch.downlink import HELD, PREPARED, Downlink
from edgefl.coordinator.dispatch.entrance import Entrance
from edgefl.coordinator.dispatch.inbox import Inbox, Load
from edgefl.coordinator.dispatch.journaled_fleet import Given
from edgefl.coordinator.dispatch.live_view import LiveView
from edgefl.coordinator.dispatch.lives import Lives
from edgefl.coordinator.dispatch.messages import evaluated, node_messages, order_header, update_metrics
from edgefl.coordinator.dispatch.outstanding import Bell, Mail, Outstanding, Pending
from edgefl.coordinator.dispatch.participants import FleetRun
from edgefl.coordinator.dispatch.waiting import Waiting
from edgefl.coordinator.fleet.presence import DeviceState, Transition
from edgefl.coordinator.fleet.roster import Changed, Holding, Removed, Restarted, Roster, RosterEvent
from edgefl.coordinator.mail import Reply
from edgefl.coordinator.superlink import prepare_body
from edgefl.errors import CodecError, EdgeflError, NetworkError
from edgefl.storage.retention import REFUSED
from edgefl.types import (
    Assignment,
    Evaluated,
    Evaluation,
    Event,
    Joined,
    Lost,
    ModelSource,
    Order,
    Outcome,
    Progress,
    Recall,
    Stop,
    Update,
    bytes_of,
)

__all__ = ["Bell", "FleetRun", "InterruptedRunError", "LiveFleet", "LiveView"]

log = logging.getLogger(__name__)

EVALUATION_DEADLINE_S = 600.0
MAX_REASON_CHARS = 500
MAX_DECODED_BYTES = 32 * 1024 * 1024


class InterruptedRunError(EdgeflError):
    """The coordinator stops; the run can be taken up again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Unsendable:
    """An order could not be handed over; told in `wait`, like all that goes wrong."""

    key: str
    reason: str


_Item = Reply | RosterEvent | Progress | Stop | InterruptedRunError | _Unsendable


class LiveFleet:
    """Implements `Fleet` for one run. `post` may be called from any thread, all else from the run's.

    Args:
        run, link, roster, bell: the run, its messages, and the devices.
        clock: seconds, monotone.
        terms: what devices are asked before they get work; nothing when None.
        note: keeps an event of a device, or of the run where it names none.
        run_clock: the run's own time, which the view says; `clock` where there is none.
        max_decoded_bytes: when so much of what devices sent is decoded, it is handed on before the rest is.
        folder: where replies lie for which there is no room; None for the system's temporary files.
    """

    def __init__(  # noqa: PLR0913 the parts of a run, by name
        self,
        *,
        run: FleetRun,
        link: Mail,
        roster: Roster,
        bell: Bell,
        clock: Callable[[], float],
        terms: Terms | None = None,
        note: Note = lambda _kind, _device, _message: None,
        run_clock: Callable[[], float] | None = None,
        max_decoded_bytes: int = MAX_DECODED_BYTES,
        folder: Path | None = None,
    ) -> None:
        self.roster, self.clock, self._note = roster, clock, note
        self._lives = run.lives or Lives(run.run_id)
        self._run = run
        self._folder = folder
        self._inbox = Inbox[_Item](self._laid_aside)
        self._left: deque[_Item] = deque()
        self._max_decoded_bytes = max_decoded_bytes
        self._out = Outstanding(mail=link, bell=bell, node_of=roster.node_of, on_unsendable=self._note_unsendable)
        self._downlink = Downlink(run)
        door = None
        if terms is not None:
            door = Door(
                run=run,
                terms=terms,
                mail=link,
                bell=bell,
                roster=roster,
                clock=clock,
                note=note,
                model=self._downlink.first,
                on_prepared=self._downlink.note_prepared,
            )
        self._waiting = Waiting(run, clock, lambda kind, message: note(kind, "", message))
        self._adopted_until_s: float | None = None
        self._view = LiveView(run, roster, run_clock or clock, admits=door.admits if door else lambda _: True)
        self._entrance = Entrance(door, self._view, roster)
        self._end_listening = roster.listen(self._inbox.put)

    def post(self, item: Reply | Progress | Stop | InterruptedRunError) -> None:
        """Hands an item to the run; a reply for which there is no room waits a little, and is laid aside then."""
        self._inbox.put(item, len(item.body) if isinstance(item, Reply) else 0)

    def _laid_aside(self, item: _Item) -> Load[_Item] | None:
        aside = lay_aside(item.body, self._folder) if isinstance(item, Reply) else None
        if not isinstance(item, Reply) or aside is None:
            return None
        bare = replace(item, body=b"")

        def load() -> Reply | None:
            try:
                return replace(bare, body=aside.read())
            except OSError as error:  # its device has the answer still, and is asked for it when it does not come
                log.warning("a reply of %s is lost: %s", self.roster.device_of(bare.node_id), error)
                return None

        return load

    def close(self, *, goes_on: bool = False) -> None:
        """Stops listening, recalls what is out unless the run goes on later, and closes it in Flower's books."""
        self._end_listening()
        self._inbox.close()
        self._entrance.close()
        self._view.close()
        self._out.close(recalls=not goes_on)

    def view(self) -> LiveView:
        return self._view.refresh()

    def dispatch(self, orders: Sequence[Order], source: ModelSource) -> None:
        """Sends every order and rings the bells; one that cannot be sent comes back as `Lost`."""
        self._downlink.look_at(source)
        for order in orders:
            if isinstance(order, Recall):
                self._out.recall(self._lives.known(order.assignment_id), order.device_id)
                continue
            if isinstance(order, Assignment):
                self._view.give(order)
            self._give(order, source)

    def adopt(self, out: Sequence[Given], source: ModelSource) -> None:
        """Takes up orders that an earlier coordinator gave, whose devices may have finished by now.

        A device is asked for the answer when it says that it holds the assignment, and is sent it anew when it says
        that it does not. Evaluations are asked for anew.
        """
        self._downlink.look_at(source)
        now_s = self.clock()
        for given in out:
            order, key = given.order, self._lives.known(given.order.assignment_id)
            deadline_s = order.deadline_s if isinstance(order, Assignment) else EVALUATION_DEADLINE_S
            pending = Pending(
                key=key,
                order=order,
                header={**self._run.header, **order_header(self._lives, order, key=key)},
                body=prepare_body(b""),
                given_s=given.given_s,
                deadline_s=None if deadline_s is None else given.given_s + deadline_s,
                sent_s=now_s,
                model=HELD,
            )
            self._out.adopt(pending)
            if isinstance(order, Evaluation):
                self._evaluate_again(pending, source)
        self._adopted_until_s = now_s + COME_BACK_S
        for device_id in dict.fromkeys(given.order.device_id for given in out):
            self._out.inquire(device_id)
        log.info("%d orders were out when the coordinator ended; their devices are asked for them", len(out))

    def _evaluate_again(self, pending: Pending, source: ModelSource) -> None:
        order = pending.order
        if not isinstance(order, Evaluation) or order.version != source.version or order.subject:
            self._note_unsendable(pending.key, "the model that it evaluates went with the coordinator")
            return
        mail = self._downlink.mail(order, source)
        pending.body, pending.model = mail.body, mail.header
        self._out.send_again(pending, "the coordinator restarted")

    def _compared(self, event: Holding) -> list[Event]:
        """Sends again what got lost, and asks for what a device had when the coordinator ended."""
        events: list[Event] = []
        for pending in self._out.of(event.device_id):
            if pending.instruction_id:
                continue
            if pending.key in event.assignment_ids:
                pending.sent_s = self.clock()
                self._out.send_again(pending, "its answer is wanted")
            else:
                events += self._send_whole(pending, "it does not hold it any more")
        self._out.compare(event)
        return events

    def _not_back(self) -> list[Event]:
        """Gives up on orders of an earlier coordinator whose devices have said nothing in time."""
        if self._adopted_until_s is None or self.clock() < self._adopted_until_s:
            return []
        self._adopted_until_s = None
        return [
            self._lose(pending, Outcome.LOST, f"not heard of within {COME_BACK_S:g} s of the coordinator's restart")
            for pending in self._out
            if not pending.instruction_id
        ]

    def _give(self, order: Assignment | Evaluation, source: ModelSource) -> None:
        now_s, mail, header = self.clock(), self._downlink.mail(order, source), order_header(self._lives, order)
        deadline_s = order.deadline_s if isinstance(order, Assignment) else EVALUATION_DEADLINE_S
        pending = Pending(
            key=header["assignment"],
            order=order,
            header={**self._run.header, **header},
            body=mail.body,
            given_s=now_s,
            deadline_s=None if deadline_s is None else now_s + deadline_s,
            sent_s=now_s,
            model=mail.header,
        )
        self._out.give(pending)

    def _note_unsendable(self, key: str, reason: str) -> None:
        self._inbox.put(_Unsendable(key=key, reason=reason))

    def wait(self, until_s: float) -> Sequence[Event]:
        """Returns what happened, at once when something has, else at `until_s` at the latest.

        Raises:
            InterruptedRunError: the coordinator stops.
            RunFailedError: fewer devices are ready than the run requires.
        """
        while True:
            has_work = bool(self._view.busy) or self._out.next_deadline_s() is not None
            if self._waiting.look(self._view.idle, has_work=has_work):
                return []  # so that it is kept now
            events = [*self._overdue(), *self._not_back(), *self._entrance.turn()]
            arrived = list(self._left)  # what is behind it in the inbox comes when it is dealt with
            if not arrived:
                arrived = self._inbox.take(0.0 if events else self._next_wake_s(until_s) - self.clock())
            # Replies first: what a device no longer holds may have been answered in the same breath.
            self._left = deque(sorted(arrived, key=lambda item: not isinstance(item, Reply)))
            num_bytes = 0
            while self._left and num_bytes < self._max_decoded_bytes:
                understood = self._understood(self._left.popleft())
                num_bytes += sum(bytes_of(event.tensors) for event in understood if isinstance(event, Update))
                events += understood
            events += self._entrance.turn()
            if events or self.clock() >= until_s:
                return events

    def _next_wake_s(self, until_s: float) -> float:
        door_s, look_s = self._entrance.next_deadline_s(), self._waiting.next_look_s()
        times = (self._out.next_deadline_s(), door_s, look_s, self._adopted_until_s)
        return min([until_s, *(time_s for time_s in times if time_s is not None)])

    def _overdue(self) -> list[Event]:
        return [
            self._lose(late, Outcome.LOST, f"not back within {(late.deadline_s or 0.0) - late.given_s:g} s")
            for late in self._out.overdue(self.clock())
        ]

    def _understood(self, item: _Item) -> list[Event]:
        match item:
            case InterruptedRunError():
                raise item
            case Reply():
                return self._replied(item)
            case Progress():
                return self._progressed(item)
            case Stop():
                return [item]
            case _Unsendable():
                pending = self._out.get(item.key)
                return [self._lose(pending, Outcome.FAILED, item.reason)] if pending else []
            case _:
                return self._noticed(item)

    def _noticed(self, event: RosterEvent) -> list[Event]:
        self._entrance.noticed(event)
        match event:
            case Transition(after=DeviceState.GONE | DeviceState.OFFLINE):
                return self._lose_all(event.device_id, f"device {event.after}: {event.reason}")
            case Removed():
                return self._lose_all(event.device_id, "device removed")
            case Transition(after=DeviceState.ONLINE, before=before) if before is not DeviceState.LATE:
                self._out.inquire(event.device_id)  # what was asked before it was there, nobody has heard
                return [Joined(device_id=event.device_id)]
            case Changed():
                return [Joined(device_id=event.device_id)]
            case Restarted() | Holding():
                return self._restarted(event.device_id) if isinstance(event, Restarted) else self._compared(event)
            case _:
                return []

    def _restarted(self, device_id: str) -> list[Event]:
        """Gives a new agent the work of the one before; the model that it held is gone."""
        self._downlink.forget(device_id)
        events: list[Event] = []
        for pending in self._out.of(device_id):
            if not pending.instruction_id:
                continue  # its first heartbeat says what it still has
            if {"base", PREPARED, "held"} & set(pending.model):
                events += self._send_whole(pending, "its agent restarted")
            else:
                self._out.send_again(pending, "its agent restarted")
        return events

    def _send_whole(self, pending: Pending, why: str) -> list[Event]:
        """Sends an order again with the whole model in place of a delta; where that is gone, the order is lost."""
        mail = self._downlink.whole(pending.order) if isinstance(pending.order, Assignment) else None
        if mail is None:
            return [self._lose(pending, Outcome.LOST, f"needs a whole model that is kept no longer: {why}")]
        pending.body, pending.model, pending.sent_s = mail.body, mail.header, self.clock()
        self._out.send_again(pending, why)
        return []

    def _progressed(self, report: Progress) -> list[Event]:
        pending = self._out.get(report.assignment_id)
        if pending is None or pending.order.device_id != report.device_id:
            return []
        progress = replace(report, assignment_id=pending.order.assignment_id)
        self._view.note_progress(progress)
        return [progress]

    def _lose_all(self, device_id: str, reason: str) -> list[Event]:
        return [self._lose(pending, Outcome.LOST, reason) for pending in self._out.of(device_id)]

    def _settle(self, pending: Pending) -> None:
        self._out.settle(pending)
        if isinstance(pending.order, Assignment):
            self._view.settle(pending.order)

    def _lose(self, pending: Pending, outcome: Outcome, reason: str) -> Lost:
        self._settle(pending)
        order = pending.order
        if isinstance(order, Assignment):
            self._downlink.forget(order.device_id)
        return Lost(
            device_id=order.device_id,
            assignment_id=order.assignment_id,
            outcome=outcome,
            reason=reason[:MAX_REASON_CHARS],
        )

    def _replied(self, reply: Reply) -> list[Event]:
        """Turns a reply into an event; one that nobody waits for (a repeat, a late one) is dropped."""
        pending = self._answered(reply)
        if pending is None:
            return []
        if reply.header.get("needs_dense") is True and reply.instruction_id != pending.instruction_id:
            return []  # about a message before the newest, which is on its way
        if reply.header.get("needs_dense") is True and not _is_whole(pending):
            return self._send_whole(pending, str(reply.header.get("error", "it lost the model")))
        if "error" in reply.header:
            return [self._lose(pending, Outcome.FAILED, str(reply.header["error"]))]
        try:
            event = self._event(pending, reply)
        except (CodecError, NetworkError, TypeError, ValueError, KeyError, ArithmeticError) as error:
            reason = f"unusable reply: {error}"
            self._note(REFUSED, pending.order.device_id, reason[:MAX_REASON_CHARS])
            return [self._lose(pending, Outcome.REFUSED, reason)]
        self._settle(pending)
        return [event]

    def _answered(self, reply: Reply) -> Pending | None:
        """Returns the order that a reply is about; None where it was for the door, or nobody waits for it."""
        device_id, named = self.roster.device_of(reply.node_id), str(reply.header.get("assignment"))
        if device_id is not None and self._entrance.answered(device_id, reply):
            return None
        pending = self._out.get(named)
        if pending is None or pending.order.device_id != device_id:
            if pending is not None and device_id is not None:
                self._note(REFUSED, device_id, f"its reply names an assignment of {pending.order.device_id}")
            pending = self._out.answered_by(reply.instruction_id)
        if pending is None or pending.order.device_id != device_id:
            log.info("dropped a reply of %s for %.80s: nobody waits for it", device_id, named)
            return None
        return pending

    def _event(self, pending: Pending, reply: Reply) -> Update | Evaluated:
        order, header = pending.order, reply.header
        if header.get("assignment") != pending.key:
            raise ValueError(f"it names {header.get('assignment')!r:.80}, asked was {pending.key!r}")
        if isinstance(order, Evaluation):
            info = self.roster.info(order.device_id)
            made = evaluated(order, header["metrics"], info.source if info else "device")
            return replace(made, bytes_up=reply.bytes_up, bytes_down=reply.bytes_down)
        outbox, body = node_messages(order, header, reply.body)
        tensors = self._run.decode(body) if body or order.plan.node is None else {}
        metrics = update_metrics(
            header["metrics"],
            turnaround_s=self.clock() - pending.given_s,
            bytes_up=reply.bytes_up,
            bytes_down=reply.bytes_down,
            ahead=self._entrance.take_bytes(order.device_id),
        )
        if metrics.iterations > 0:
            self.roster.note_speed(order.device_id, metrics.compute_s / metrics.iterations)
            self._view.note_speed(order.device_id, metrics)
        return Update(
            assignment_id=order.assignment_id,
            device_id=order.device_id,
            base_version=order.base_version,
            tensors=tensors,
            metrics=metrics,
            body=body or None,
            received_s=self.clock(),
            outbox=outbox,
        )


def _is_whole(pending: Pending) -> bool:
    """Says whether an order's message held the whole model."""
    part = {"base", PREPARED} & set(pending.model)
    return not part and pending.model.get("model") is not False

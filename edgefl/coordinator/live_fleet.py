"""The live fleet: gives orders to real boards through Flower and MQTT, and turns what comes back into events.

Replies, presence and progress arrive in other threads and go into one queue; all else happens in the thread of the
run, inside `dispatch` and `wait`. A device that dies, fails or takes too long leaves `busy`, and a `Lost` says why.
"""

from __future__ import annotations

import logging
import queue
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from edgefl.coordinator.messages import check_finite, evaluated, order_header, update_metrics, wire_id
from edgefl.coordinator.outstanding import Bell, Mail, Outstanding, Pending
from edgefl.coordinator.participants import FleetRun, Participants
from edgefl.coordinator.presence import DeviceState, Flapping, Transition
from edgefl.coordinator.roster import Changed, Holding, Removed, Restarted, Roster, RosterEvent
from edgefl.coordinator.superlink import PreparedBody, Reply, prepare_body
from edgefl.errors import CodecError, EdgeflError
from edgefl.types import (
    Assignment,
    DeviceInfo,
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
    Role,
    Speed,
    Stop,
    Update,
)

__all__ = ["Bell", "FleetRun", "InterruptedRunError", "LiveFleet", "LiveView"]

log = logging.getLogger(__name__)

EVALUATION_DEADLINE_S = 600.0
MAX_REASON_CHARS = 500


class InterruptedRunError(EdgeflError):
    """The coordinator stops; the run can be taken up again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Unsendable:
    """An order could not be handed over; told in `wait`, like all that goes wrong."""

    key: str
    reason: str


_Item = Reply | RosterEvent | Progress | Stop | InterruptedRunError | _Unsendable


class LiveView:
    """The fleet as it is now; `busy` holds training only, evaluations never keep a device from work."""

    def __init__(self, fleet: LiveFleet) -> None:
        self._fleet = fleet

    @property
    def now_s(self) -> float:
        return self._fleet.clock()

    @property
    def devices(self) -> Mapping[str, DeviceInfo]:
        return self._fleet.eligible()

    @property
    def idle(self) -> Sequence[str]:
        busy = self.busy
        return [name for name, info in self.devices.items() if info.role == Role.TRAINER and name not in busy]

    @property
    def busy(self) -> Mapping[str, Sequence[str]]:
        return self._fleet.busy()

    @property
    def speeds(self) -> Mapping[str, Speed]:
        return self._fleet.roster.speeds()

    @property
    def progress(self) -> Mapping[str, Progress]:
        return self._fleet.progress


class LiveFleet:
    """Implements `Fleet` for one run. `post` may be called from any thread, all else from the run's."""

    def __init__(self, *, run: FleetRun, link: Mail, roster: Roster, bell: Bell, clock: Callable[[], float]) -> None:
        self.roster, self.clock, self.progress = roster, clock, dict[str, Progress]()
        self._run = run
        self._queue: queue.SimpleQueue[_Item] = queue.SimpleQueue()
        self._out = Outstanding(mail=link, bell=bell, node_of=roster.node_of, on_unsendable=self._note_unsendable)
        self._participants = Participants(run, roster)
        self._encoded: tuple[int, PreparedBody] | None = None
        self._end_listening = roster.listen(self._queue.put)

    def post(self, item: Reply | Progress | Stop | InterruptedRunError) -> None:
        self._queue.put(item)

    def close(self) -> None:
        """Stops listening, recalls what is out, and closes the run in Flower's books."""
        self._end_listening()
        self._out.close()

    def eligible(self) -> dict[str, DeviceInfo]:
        return self._participants.present()

    def busy(self) -> dict[str, list[str]]:
        busy: dict[str, list[str]] = {}
        for pending in self._out:
            if isinstance(pending.order, Assignment):
                busy.setdefault(pending.order.device_id, []).append(pending.order.assignment_id)
        return busy

    def view(self) -> LiveView:
        return LiveView(self)

    def dispatch(self, orders: Sequence[Order], source: ModelSource) -> None:
        """Sends every order and rings the bells; one that cannot be sent comes back as `Lost`."""
        for order in orders:
            if isinstance(order, Recall):
                self._out.recall(wire_id(self._run.run_id, order.assignment_id), order.device_id)
                continue
            if isinstance(order, Assignment):
                self._participants.begin()
            self._give(order, source)

    def _give(self, order: Assignment | Evaluation, source: ModelSource) -> None:
        now_s = self.clock()
        deadline_s = order.deadline_s if isinstance(order, Assignment) else EVALUATION_DEADLINE_S
        pending = Pending(
            key=wire_id(self._run.run_id, order.assignment_id),
            order=order,
            header={**self._run.header, **order_header(self._run.run_id, order)},
            body=self._body(source),
            given_s=now_s,
            deadline_s=None if deadline_s is None else now_s + deadline_s,
            sent_s=now_s,
        )
        self._out.give(pending)

    def _body(self, source: ModelSource) -> PreparedBody:
        if self._encoded is None or self._encoded[0] != source.version:
            body = self._run.encode(source.model(), source.version)
            self._encoded = source.version, prepare_body(body)
        return self._encoded[1]

    def _note_unsendable(self, key: str, reason: str) -> None:
        self._queue.put(_Unsendable(key=key, reason=reason))

    def wait(self, until_s: float) -> Sequence[Event]:
        """Returns what happened, at once when something has, else at `until_s` at the latest.

        Raises:
            InterruptedRunError: the coordinator stops.
        """
        while True:
            events = self._overdue()
            arrived = self._arrived(0.0 if events else self._next_wake_s(until_s) - self.clock())
            # Replies first: what a device no longer holds may have been answered in the same breath.
            for item in sorted(arrived, key=lambda item: not isinstance(item, Reply)):
                events += self._understood(item)
            if events or self.clock() >= until_s:
                return events

    def _next_wake_s(self, until_s: float) -> float:
        deadlines = (pending.deadline_s for pending in self._out if pending.deadline_s is not None)
        return min([until_s, *deadlines])

    def _arrived(self, timeout_s: float) -> list[_Item]:
        items: list[_Item] = []
        try:
            items.append(self._queue.get(timeout=max(0.0, timeout_s)))
            while True:
                items.append(self._queue.get_nowait())
        except queue.Empty:
            return items

    def _overdue(self) -> list[Event]:
        now_s, events = self.clock(), list[Event]()
        for pending in self._out:
            if pending.deadline_s is not None and now_s >= pending.deadline_s:
                self._out.recall(pending.key, pending.order.device_id)
                allowed_s = pending.deadline_s - pending.given_s
                events.append(self._lose(pending, Outcome.LOST, f"not back within {allowed_s:g} s"))
        return events

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
        match event:
            case Transition(after=DeviceState.GONE | DeviceState.OFFLINE):
                return self._lose_all(event.device_id, f"device {event.after}: {event.reason}")
            case Removed():
                return self._lose_all(event.device_id, "device removed")
            case Transition(after=DeviceState.ONLINE, before=before) if before is not DeviceState.LATE:
                return [Joined(device_id=event.device_id)]
            case Changed():
                return [Joined(device_id=event.device_id)]
            case Restarted():
                self._out.send_again(event.device_id, "its agent restarted")
            case Holding():
                self._out.compare(event)
            case Transition() | Flapping():
                pass
        return []

    def _progressed(self, report: Progress) -> list[Event]:
        pending = self._out.get(report.assignment_id)
        if pending is None or pending.order.device_id != report.device_id:
            return []
        progress = replace(report, assignment_id=pending.order.assignment_id)
        self.progress[report.device_id] = progress
        return [progress]

    def _lose_all(self, device_id: str, reason: str) -> list[Event]:
        return [self._lose(pending, Outcome.LOST, reason) for pending in self._out.of(device_id)]

    def _lose(self, pending: Pending, outcome: Outcome, reason: str) -> Lost:
        self._out.settle(pending)
        order = pending.order
        return Lost(
            device_id=order.device_id,
            assignment_id=order.assignment_id,
            outcome=outcome,
            reason=reason[:MAX_REASON_CHARS],
        )

    def _replied(self, reply: Reply) -> list[Event]:
        """Turns a reply into an event; one that nobody waits for (a repeat, a late one) is dropped."""
        device_id, named = self.roster.device_of(reply.node_id), str(reply.header.get("assignment"))
        pending = self._out.get(named)
        if pending is None or pending.order.device_id != device_id:
            pending = self._out.answered_by(reply.instruction_id)
        if pending is None or pending.order.device_id != device_id:
            log.info("dropped a reply of %s for %.80s: nobody waits for it", device_id, named)
            return []
        if "error" in reply.header:
            return [self._lose(pending, Outcome.FAILED, str(reply.header["error"]))]
        try:
            event = self._event(pending, reply)
        except (CodecError, TypeError, ValueError, KeyError, ArithmeticError) as error:
            return [self._lose(pending, Outcome.REFUSED, f"unusable reply: {error}")]
        self._out.settle(pending)
        return [event]

    def _event(self, pending: Pending, reply: Reply) -> Update | Evaluated:
        order, header = pending.order, reply.header
        if header.get("assignment") != pending.key:
            raise ValueError(f"it names {header.get('assignment')!r:.80}, asked was {pending.key!r}")
        if isinstance(order, Evaluation):
            info = self.roster.info(order.device_id)
            made = evaluated(order, header["metrics"], info.source if info else "device")
            return replace(made, bytes_up=reply.bytes_up, bytes_down=reply.bytes_down)
        tensors = self._run.decode(reply.body)
        check_finite(tensors)
        metrics = update_metrics(
            header["metrics"],
            turnaround_s=self.clock() - pending.given_s,
            bytes_up=reply.bytes_up,
            bytes_down=reply.bytes_down,
        )
        if metrics.iterations > 0:
            self.roster.note_speed(order.device_id, metrics.compute_s / metrics.iterations)
        return Update(
            assignment_id=order.assignment_id,
            device_id=order.device_id,
            base_version=order.base_version,
            tensors=tensors,
            metrics=metrics,
            body=reply.body,
            received_s=self.clock(),
        )

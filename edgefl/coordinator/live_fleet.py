"""The live fleet: gives orders to real boards through Flower and MQTT, and turns what comes back into events.

Replies, presence and progress arrive in other threads and go into one queue; all else happens in the thread of the
run, inside `dispatch` and `wait`. A device that dies, fails or takes too long leaves `busy`, and a `Lost` says why.
"""

from __future__ import annotations

import logging
import queue
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

from edgefl.coordinator.presence import DeviceState, Transition
from edgefl.coordinator.roster import Changed, Holding, Restarted, Roster, RosterEvent
from edgefl.coordinator.superlink import FlowerRun, PreparedBody, Reply, prepare_body
from edgefl.errors import CodecError, EdgeflError, NetworkError
from edgefl.protocol import HEARTBEAT_S, Command, CommandKind, finite
from edgefl.types import (
    Assignment,
    DeviceInfo,
    Evaluated,
    Evaluation,
    Event,
    Joined,
    Json,
    Lost,
    ModelSource,
    Order,
    Outcome,
    Progress,
    Recall,
    Role,
    Speed,
    Stop,
    Tensors,
    Update,
    UpdateMetrics,
)

log = logging.getLogger(__name__)

EVALUATION_DEADLINE_S = 600.0
LOST_AFTER_S = 3 * HEARTBEAT_S
"""An assignment that was handed out so long ago and that its device does not know has been lost on the way."""


class InterruptedRunError(EdgeflError):
    """The coordinator stops; the run can be taken up again."""


class Bell(Protocol):
    """The coordinator's end of the MQTT connection."""

    def ring(self, device_id: str) -> None: ...
    def command(self, device_id: str, command: Command) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetRun:
    """What the live fleet has to know of a run.

    Attributes:
        run_id: as in the store.
        header: what every device is told: task, options, seed.
        groups, names: who takes part; empty for everybody with a shard for `task`.
        join_at_start: only devices that are there when the first work is given out take part.
        encode: (model, version) -> body for the devices.
        decode: body -> displacement; raises CodecError.
    """

    run_id: str
    task: str
    header: Json
    groups: tuple[str, ...]
    names: tuple[str, ...]
    join_at_start: bool
    encode: Callable[[Tensors, int], bytes]
    decode: Callable[[bytes], Tensors]


@dataclass(slots=True)
class _Pending:
    order: Assignment | Evaluation
    kind: str
    header: Json
    body: PreparedBody
    instruction_id: str
    dispatched_s: float
    deadline_s: float | None


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
    """Implements `Fleet` for one run. `post_*` may be called from any thread."""

    def __init__(
        self, *, run: FleetRun, link: FlowerRun, roster: Roster, bell: Bell, clock: Callable[[], float]
    ) -> None:
        self.roster, self.clock, self.progress = roster, clock, dict[str, Progress]()
        self._run, self._link, self._bell = run, link, bell
        self._queue: queue.SimpleQueue[Reply | RosterEvent | Progress | Stop | InterruptedRunError] = (
            queue.SimpleQueue()
        )
        self._pending: dict[str, _Pending] = {}
        self._recalled: set[str] = set()
        self._members: frozenset[str] | None = None
        self._encoded: tuple[int, PreparedBody] | None = None
        self._end_listening = roster.listen(self._queue.put)

    def post(self, item: Reply | Progress | Stop | InterruptedRunError) -> None:
        self._queue.put(item)

    def close(self) -> None:
        """Stops listening, recalls what is out, and closes the run in Flower's books."""
        self._end_listening()
        for assignment_id, pending in self._pending.items():
            self._recall(assignment_id, pending.order.device_id)
        self._link.close()

    def eligible(self) -> dict[str, DeviceInfo]:
        """Returns the present devices that take part in this run, by id."""
        run = self._run
        return {
            info.device_id: info
            for info in self.roster.workers()
            if run.task in info.tasks
            and (not run.groups or set(run.groups) & set(info.groups) or info.role == Role.EVALUATOR)
            and (not run.names or info.device_id in run.names or info.role == Role.EVALUATOR)
            and (self._members is None or info.device_id in self._members or info.role == Role.EVALUATOR)
        }

    def busy(self) -> dict[str, list[str]]:
        busy: dict[str, list[str]] = {}
        for assignment_id, pending in self._pending.items():
            if isinstance(pending.order, Assignment):
                busy.setdefault(pending.order.device_id, []).append(assignment_id)
        return busy

    def view(self) -> LiveView:
        return LiveView(self)

    def dispatch(self, orders: Sequence[Order], source: ModelSource) -> None:
        """Sends every order and rings the bells; one that cannot be sent comes back as `Lost`."""
        for order in orders:
            if isinstance(order, Recall):
                self._recall(order.assignment_id, order.device_id)
                continue
            if self._members is None and self._run.join_at_start and isinstance(order, Assignment):
                self._members = frozenset(self.eligible())
            self._give(order, source)

    def _give(self, order: Assignment | Evaluation, source: ModelSource) -> None:
        now_s = self.clock()
        is_training = isinstance(order, Assignment)
        deadline_s = order.deadline_s if isinstance(order, Assignment) else EVALUATION_DEADLINE_S
        pending = _Pending(
            order=order,
            kind="train" if is_training else "evaluate",
            header={**self._run.header, **_order_header(order)},
            body=self._body(source),
            instruction_id="",
            dispatched_s=now_s,
            deadline_s=None if deadline_s is None else now_s + deadline_s,
        )
        self._pending[order.assignment_id] = pending
        self._send(pending)

    def _send(self, pending: _Pending) -> None:
        """Hands the instruction to Flower; what Flower refuses waits for its device to be lost or to come back."""
        device_id = pending.order.device_id
        node_id = self.roster.node_of(device_id)
        if node_id is None:
            self._queue.put(Transition(device_id=device_id, before=None, after=DeviceState.GONE, reason="not joined"))
            return
        try:
            pending.instruction_id = self._link.send(
                node_id, kind=pending.kind, header=pending.header, body=pending.body
            )
        except NetworkError as error:
            self._queue.put(Transition(device_id=device_id, before=None, after=DeviceState.GONE, reason=str(error)))
            return
        self._bell.ring(device_id)

    def _body(self, source: ModelSource) -> PreparedBody:
        if self._encoded is None or self._encoded[0] != source.version:
            body = self._run.encode(source.model(), source.version)
            self._encoded = source.version, prepare_body(body)
        return self._encoded[1]

    def _recall(self, assignment_id: str, device_id: str) -> None:
        if assignment_id not in self._recalled:
            self._recalled.add(assignment_id)
            command = Command(id=uuid.uuid4().hex, kind=CommandKind.RECALL, argument=assignment_id)
            self._bell.command(device_id, command)

    def wait(self, until_s: float) -> Sequence[Event]:
        """Returns what happened, at once when something has, else at `until_s` at the latest.

        Raises:
            InterruptedRunError: the coordinator stops.
        """
        while True:
            events = self._overdue()
            for item in self._arrived(0.0 if events else self._next_wake_s(until_s) - self.clock()):
                events += self._understood(item)
            if events or self.clock() >= until_s:
                return events

    def _next_wake_s(self, until_s: float) -> float:
        deadlines = (p.deadline_s for p in self._pending.values() if p.deadline_s is not None)
        return min([until_s, *deadlines])

    def _arrived(self, timeout_s: float) -> list[Any]:
        items: list[Any] = []
        try:
            items.append(self._queue.get(timeout=max(0.0, timeout_s)))
            while True:
                items.append(self._queue.get_nowait())
        except queue.Empty:
            return items

    def _overdue(self) -> list[Event]:
        now_s, events = self.clock(), list[Event]()
        for assignment_id, pending in list(self._pending.items()):
            if pending.deadline_s is not None and now_s >= pending.deadline_s:
                allowed_s = pending.deadline_s - pending.dispatched_s
                self._recall(assignment_id, pending.order.device_id)
                events.append(self._lose(assignment_id, Outcome.LOST, f"not back within {allowed_s:g} s"))
        return events

    def _understood(self, item: Any) -> list[Event]:
        match item:
            case InterruptedRunError():
                raise item
            case Reply():
                return self._replied(item)
            case Transition():
                return self._moved(item)
            case Restarted():
                self._send_again(item.device_id, "its agent restarted")
            case Holding():
                self._compare(item)
            case Changed():
                return [Joined(device_id=item.device_id)]
            case Progress():
                self.progress[item.device_id] = item
                return [item]
            case Stop():
                return [item]
        return []

    def _moved(self, transition: Transition) -> list[Event]:
        if transition.after in {DeviceState.GONE, DeviceState.OFFLINE}:
            return [
                self._lose(assignment_id, Outcome.LOST, f"device {transition.after}: {transition.reason}")
                for assignment_id, pending in list(self._pending.items())
                if pending.order.device_id == transition.device_id
            ]
        if transition.after is DeviceState.ONLINE and transition.before is not DeviceState.LATE:
            return [Joined(device_id=transition.device_id)]
        return []

    def _lose(self, assignment_id: str, outcome: Outcome, reason: str) -> Lost:
        pending = self._pending.pop(assignment_id)
        self._link.cancel(pending.instruction_id)
        return Lost(device_id=pending.order.device_id, assignment_id=assignment_id, outcome=outcome, reason=reason)

    def _send_again(self, device_id: str, why: str) -> None:
        for assignment_id, pending in self._pending.items():
            if pending.order.device_id == device_id:
                log.warning("sending %s to %s again: %s", assignment_id, device_id, why)
                self._link.cancel(pending.instruction_id)
                self._send(pending)

    def _compare(self, holding: Holding) -> None:
        """Sends again what was handed out and yet is not held: the answer to the device's pull was lost."""
        for assignment_id, pending in self._pending.items():
            if pending.order.device_id != holding.device_id or assignment_id in holding.assignment_ids:
                continue
            was_due_s = pending.dispatched_s + LOST_AFTER_S
            if holding.at_s >= was_due_s and self._link.is_delivered(pending.instruction_id):
                log.warning("sending %s to %s again: it got lost on the way", assignment_id, holding.device_id)
                self._link.cancel(pending.instruction_id)
                pending.dispatched_s = holding.at_s
                self._send(pending)

    def _replied(self, reply: Reply) -> list[Event]:
        """Turns a reply into an event; one that nobody waits for (a repeat, a late one) is dropped."""
        device_id = self.roster.device_of(reply.node_id)
        assignment_id = reply.header.get("assignment")
        pending = self._pending.get(assignment_id) if isinstance(assignment_id, str) else None
        if pending is None or pending.order.device_id != device_id or reply.header.get("run") != self._run.run_id:
            log.info("dropped a reply of %s for %s: nobody waits for it", device_id, assignment_id)
            return []
        if "error" in reply.header:
            return [self._lose(pending.order.assignment_id, Outcome.FAILED, str(reply.header["error"])[:500])]
        try:
            event = self._event(pending, reply)
        except (CodecError, TypeError, ValueError, KeyError) as error:
            return [self._lose(pending.order.assignment_id, Outcome.REFUSED, f"unusable reply: {error}")]
        del self._pending[pending.order.assignment_id]
        return [event]

    def _event(self, pending: _Pending, reply: Reply) -> Update | Evaluated:
        order, metrics = pending.order, reply.header["metrics"]
        if isinstance(order, Evaluation):
            info = self.roster.info(order.device_id)
            return Evaluated(
                assignment_id=order.assignment_id,
                device_id=order.device_id,
                version=order.version,
                round=order.round,
                source=info.source if info else "device",
                num_examples=int(metrics["num_examples"]),
                loss=float(metrics["loss"]),
                accuracy=float(metrics["accuracy"]),
            )
        measured = _update_metrics(metrics, reply, self.clock() - pending.dispatched_s)
        if measured.iterations > 0:
            self.roster.note_speed(order.device_id, measured.compute_s / measured.iterations)
        return Update(
            assignment_id=order.assignment_id,
            device_id=order.device_id,
            base_version=order.base_version,
            tensors=self._run.decode(reply.body),
            metrics=measured,
            body=reply.body,
            received_s=self.clock(),
        )


def _order_header(order: Assignment | Evaluation) -> Json:
    header: Json = {"assignment": order.assignment_id}
    if isinstance(order, Evaluation):
        return {**header, "version": order.version}
    plan = {name: value for name, value in asdict(order.plan).items() if value is not None and name != "inbox"}
    return {
        **header,
        "version": order.base_version,
        "plan": plan,
        "codec": order.codec or "dense",
        "settled": list(order.settled),
    }


def _update_metrics(metrics: Json, reply: Reply, turnaround_s: float) -> UpdateMetrics:
    """Returns what the device measured, and as sending time all of the turnaround that was not computing."""
    compute_s = max(0.0, float(metrics["compute_s"]))
    measured = UpdateMetrics(
        iterations=max(0, int(metrics["iterations"])),
        num_examples=max(0, int(metrics["num_examples"])),
        loss=finite(metrics.get("loss")),
        compute_s=compute_s,
        send_s=max(0.0, turnaround_s - compute_s),
        bytes_up=reply.bytes_up,
        bytes_down=reply.bytes_down,
    )
    extra = metrics.get("extra")
    if isinstance(extra, dict):
        numbers = {str(name): finite(value) for name, value in extra.items()}
        return replace(measured, extra={name: value for name, value in numbers.items() if value is not None})
    return measured

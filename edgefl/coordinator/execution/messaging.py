"""Messages to and from devices: instructions in flight, the queue of what comes back, and request/response calls.

Instructions go through Flower, are resent when lost, and completed at most once. Calls go over MQTT, and are answered
also during training.

A thousand devices may answer within a second with a model each. The run's thread takes them in batches, and threads
that put more wait, so that the rest stays where it is: on disk, or with the devices. No thread waits for long, since
a run may pause for minutes: bodies that arrive meanwhile are spooled. The thread of an event loop never waits: it
would block every connection.
"""

from __future__ import annotations

import asyncio
import heapq
import json
import logging
import queue
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from edgefl.coordinator.fleet.presence import DevicePresence
from edgefl.coordinator.fleet.registry import DeviceRegistry, HeldInstructions
from edgefl.coordinator.flower.messages import PreparedBody
from edgefl.core.errors import NetworkError, NotFoundError
from edgefl.core.protocol import HEARTBEAT_S, Command, CommandKind, CommandReply
from edgefl.core.types import EvaluateInstruction, Json, TrainInstruction

log = logging.getLogger(__name__)

RESEND_AFTER_S = 3 * HEARTBEAT_S
"""An instruction delivered longer ago than this that its device does not hold counts as lost."""

MAX_BATCH_BYTES = 16 * 1024 * 1024
"""A batch ends with the item that exceeds this."""
MAX_MEMORY_BYTES = 32 * 1024 * 1024
"""While more than this is queued in memory, `put` of a body waits."""
PUT_TIMEOUT_S = 2.0
"""How long `put` waits before it spools: a paused run must not hold up the other devices."""

T = TypeVar("T")

LoadItem = Callable[[], T | None]
"""() -> spooled item; None when it cannot be loaded"""

REPLY_TIMEOUT_S = 10.0
_REACHABLE_STATES = frozenset({DevicePresence.ONLINE, DevicePresence.LATE})


class DeviceNotifier(Protocol):
    """The coordinator's end of the MQTT connection."""

    def notify(self, device_id: str) -> None: ...
    def send_command(self, device_id: str, command: Command) -> None: ...


class InstructionTransport(Protocol):
    """Messages of one Flower run (`superlink.FlowerRun`)."""

    def send(self, node_id: int, *, kind: str, header: Mapping[str, object], body: PreparedBody) -> str: ...
    def is_known(self, message_id: str) -> bool: ...
    def is_delivered(self, message_id: str) -> bool: ...
    def cancel(self, message_id: str) -> None: ...
    def close(self) -> None: ...


@dataclass(slots=True)
class PendingInstruction:
    """One in-flight instruction.

    `wire_id` is its id on the wire, `message_id` that of its newest message, sent at `sent_s`; `model_header` says
    which part of the model the message carries (see `model_distribution`), `store_header` which state of the store it
    came from. Since `not_held_since_s` it is delivered and the device does not report it as held: it may still be on
    the way. `paused_s` are seconds of the coordinator's
    absence since `dispatched_s`, which do not count for the deadline.
    """

    wire_id: str
    instruction: TrainInstruction | EvaluateInstruction
    header: Json
    body: PreparedBody
    dispatched_s: float
    deadline_s: float | None
    sent_s: float
    message_id: str = ""
    model_header: Json = field(default_factory=dict)
    store_header: Json = field(default_factory=dict)
    not_held_since_s: float | None = None
    paused_s: float = 0.0
    is_finishing_early: bool = False
    num_foreign_replies: int = 0
    num_lost_sessions: int = 0


class InFlightInstructions:
    """All in-flight instructions, in the order of dispatch. Not thread-safe: used by the run's thread alone.

    Args:
        transport: where instructions go.
        notifier: sends wake-ups and commands to devices.
        get_node_id: device id -> Flower's node id, None for one that has not joined.
        on_send_failed: called with the wire id and the reason when an instruction could not be sent.
        make_store_header: () -> header fields of the store's present state, for each message.
    """

    def __init__(
        self,
        *,
        transport: InstructionTransport,
        notifier: DeviceNotifier,
        get_node_id: Callable[[str], int | None],
        on_send_failed: Callable[[str, str], None],
        make_store_header: Callable[[], Json] = dict,
    ) -> None:
        self._transport, self._notifier, self._get_node_id, self._on_send_failed = (
            transport,
            notifier,
            get_node_id,
            on_send_failed,
        )
        self._make_store_header = make_store_header
        self._pending: dict[str, PendingInstruction] = {}
        self._by_device: dict[str, dict[str, PendingInstruction]] = {}
        self._deadlines: list[tuple[float, str]] = []

    def __iter__(self) -> Iterator[PendingInstruction]:
        return iter(list(self._pending.values()))

    def get(self, wire_id: str) -> PendingInstruction | None:
        return self._pending.get(wire_id)

    def list_for_device(self, device_id: str) -> list[PendingInstruction]:
        return list(self._by_device.get(device_id, {}).values())

    def find_by_message(self, message_id: str) -> PendingInstruction | None:
        """Returns the instruction of a message, for a reply that does not name its assignment."""
        return next((pending for pending in self if pending.message_id == message_id), None)

    def dispatch(self, pending: PendingInstruction) -> None:
        self.add(pending)
        self._send(pending)

    def add(self, pending: PendingInstruction) -> None:
        """Adds an instruction that an earlier coordinator dispatched; sends nothing."""
        self._pending[pending.wire_id] = pending
        self._by_device.setdefault(pending.instruction.device_id, {})[pending.wire_id] = pending
        if pending.deadline_s is not None:
            heapq.heappush(self._deadlines, (pending.deadline_s, pending.wire_id))

    def request_heartbeat(self, device_id: str) -> None:
        """Requests a heartbeat, which lists held instructions, if one of an earlier coordinator is in flight."""
        if any(not pending.message_id for pending in self.list_for_device(device_id)):
            self._notifier.send_command(device_id, Command(id=uuid.uuid4().hex, kind=CommandKind.HEARTBEAT))

    def complete(self, pending: PendingInstruction) -> None:
        """Removes an instruction that was answered or given up. A later reply is rejected."""
        del self._pending[pending.wire_id]
        device_pending = self._by_device[pending.instruction.device_id]
        del device_pending[pending.wire_id]
        if not device_pending:
            del self._by_device[pending.instruction.device_id]
        self._cancel(pending)

    def next_deadline_s(self) -> float | None:
        """Returns the earliest deadline of an in-flight instruction."""
        while self._deadlines and self._deadlines[0][1] not in self._pending:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    def finish_overdue(self, now_s: float) -> list[PendingInstruction]:
        """Returns the instructions whose deadline has passed; their devices are asked to finish early."""
        overdue = []
        while (deadline_s := self.next_deadline_s()) is not None and deadline_s <= now_s:
            pending = self._pending[heapq.heappop(self._deadlines)[1]]
            self.finish_early(pending.wire_id)
            overdue.append(pending)
        return overdue

    def finish_early(self, wire_id: str) -> None:
        """Asks a device to finish now, once per instruction."""
        pending = self._pending.get(wire_id)
        if pending is not None and not pending.is_finishing_early:
            pending.is_finishing_early = True
            self._send_finish_early(pending)

    def continue_training(self, wire_id: str, iteration: int) -> None:
        """Answers a device's query after an iteration; one that was asked to finish has its answer."""
        pending = self._pending.get(wire_id)
        if pending is not None and not pending.is_finishing_early:
            command = Command(id=uuid.uuid4().hex, kind=CommandKind.CONTINUE, argument=f"{wire_id} {iteration}")
            self._notifier.send_command(pending.instruction.device_id, command)

    def resend(self, pending: PendingInstruction, reason: str) -> None:
        """Sends an instruction again, with its present header and body."""
        log.warning("sending %s to %s again: %s", pending.wire_id, pending.instruction.device_id, reason)
        self._cancel(pending)
        self._send(pending)
        if pending.is_finishing_early:  # a restarted agent has not received it
            self._send_finish_early(pending)

    def reconcile(self, held: HeldInstructions) -> None:
        """Resends lost instructions: delivered and not held, or answered by a reply that did not arrive."""
        for pending in self.list_for_device(held.device_id):
            is_known = self._transport.is_known(pending.message_id)
            is_held = pending.wire_id in held.assignment_ids
            if is_held or not self._transport.is_delivered(pending.message_id):
                pending.not_held_since_s = None
            elif pending.not_held_since_s is None:
                pending.not_held_since_s = held.at_s
            since_s = pending.not_held_since_s if is_known else pending.sent_s
            if since_s is not None and held.at_s >= since_s + RESEND_AFTER_S:
                pending.sent_s, pending.not_held_since_s = held.at_s, None
                self.resend(pending, "it got lost on the way")

    def close(self, *, should_finish_early: bool = True) -> None:
        """Closes the Flower run; unless it will be resumed, devices are asked to finish early."""
        for pending in self if should_finish_early else ():
            self.finish_early(pending.wire_id)
        self._transport.close()

    def _cancel(self, pending: PendingInstruction) -> None:
        if pending.message_id:
            self._transport.cancel(pending.message_id)

    def _send_finish_early(self, pending: PendingInstruction) -> None:
        command = Command(id=uuid.uuid4().hex, kind=CommandKind.FINISH_EARLY, argument=pending.wire_id)
        self._notifier.send_command(pending.instruction.device_id, command)

    def _send(self, pending: PendingInstruction) -> None:
        """Sends the instruction through Flower, with a new message id, and wakes the device."""
        device_id = pending.instruction.device_id
        node_id = self._get_node_id(device_id)
        if node_id is None:
            self._on_send_failed(pending.wire_id, f"{device_id} has not joined")
            return
        kind = "train" if isinstance(pending.instruction, TrainInstruction) else "evaluate"
        pending.store_header = self._make_store_header()
        header = {**pending.header, **pending.model_header, **pending.store_header}
        try:
            pending.message_id = self._transport.send(node_id, kind=kind, header=header, body=pending.body)
        except NetworkError as error:
            self._on_send_failed(pending.wire_id, str(error))
            return
        self._notifier.notify(device_id)


@dataclass(frozen=True, slots=True)
class _QueuedItem(Generic[T]):
    load: LoadItem[T]
    num_bytes: int
    num_memory_bytes: int


class BoundedEventQueue(Generic[T]):
    """Thread-safe queue from many threads to one.

    Args:
        spool: moves an item's body out of memory; returns None where there is no other place for it.
    """

    def __init__(self, spool: Callable[[T], LoadItem[T] | None] = lambda _: None) -> None:
        self._spool = spool
        self._items: deque[_QueuedItem[T]] = deque()
        self._num_memory_bytes = 0
        self._is_closed = False
        self._lock = threading.Lock()
        self._not_empty, self._not_full = threading.Condition(self._lock), threading.Condition(self._lock)

    @property
    def num_memory_bytes(self) -> int:
        """Returns the bytes of bodies queued in memory."""
        return self._num_memory_bytes

    def put(self, item: T, num_bytes: int = 0) -> None:
        """Adds an item; one with a body waits up to `PUT_TIMEOUT_S` for room, never in an event loop."""
        load = self._spool(item) if num_bytes and not self._wait_for_room() else None
        with self._lock:
            queued = _QueuedItem(load or (lambda: item), num_bytes, 0 if load else num_bytes)
            self._items.append(queued)
            self._num_memory_bytes += queued.num_memory_bytes
            self._not_empty.notify()

    def get_batch(self, timeout_s: float) -> list[T]:
        """Returns the queued items, one batch at most; waits up to `timeout_s` for the first."""
        batch: list[_QueuedItem[T]] = []
        until_s, num_bytes = time.monotonic() + timeout_s, 0
        with self._lock:
            while not self._items and (remaining_s := until_s - time.monotonic()) > 0:
                self._not_empty.wait(remaining_s)
            while self._items and num_bytes < MAX_BATCH_BYTES:
                batch.append(self._items.popleft())
                num_bytes += batch[-1].num_bytes
            self._num_memory_bytes -= sum(queued.num_memory_bytes for queued in batch)
            if num_bytes:
                self._not_full.notify_all()
        return [item for queued in batch if (item := queued.load()) is not None]

    def close(self) -> None:
        """Ends all waiting for room."""
        with self._lock:
            self._is_closed = True
            self._not_full.notify_all()

    def _wait_for_room(self) -> bool:
        timeout_s = 0.0 if _is_in_event_loop() else PUT_TIMEOUT_S
        with self._lock:
            return self._not_full.wait_for(
                lambda: self._num_memory_bytes <= MAX_MEMORY_BYTES or self._is_closed, timeout_s
            )


def _is_in_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


class DeviceRpc:
    """Thread-safe: `call` blocks the calling thread, `on_reply` is called by the MQTT client."""

    def __init__(
        self, notifier: DeviceNotifier, registry: DeviceRegistry, *, timeout_s: float = REPLY_TIMEOUT_S
    ) -> None:
        self._notifier, self._registry, self._timeout_s = notifier, registry, timeout_s
        self._pending_calls: dict[str, tuple[str, queue.SimpleQueue[CommandReply]]] = {}
        self._lock = threading.Lock()

    def call(
        self, device_id: str, kind: CommandKind, argument: Mapping[str, Any], *, timeout_s: float | None = None
    ) -> Json:
        """Returns the content of a device's reply, which may take `timeout_s` seconds.

        Raises:
            NotFoundError: there is no such device.
            NetworkError: the device is away, did not answer in time, or reported an error.
        """
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        if self._registry.get_device(device_id) is None:
            raise NotFoundError(f"no device {device_id!r}; `edgefl devices list` shows them")
        state = self._registry.get_state(device_id)
        if state not in {*_REACHABLE_STATES, DevicePresence.DRAINING}:
            raise NetworkError(f"{device_id} is {state or 'away'}: it can be asked when it is back")
        command = Command(id=uuid.uuid4().hex, kind=kind, argument=json.dumps(argument))
        replies: queue.SimpleQueue[CommandReply] = queue.SimpleQueue()
        with self._lock:
            self._pending_calls[command.id] = device_id, replies
        try:
            self._notifier.send_command(device_id, command)
            reply = replies.get(timeout=timeout_s)
        except queue.Empty:
            raise NetworkError(
                f"{device_id} did not answer within {timeout_s:g} s; it may be of an older edgefl, or your "
                "broker may not let it write its topic answer"
            ) from None
        finally:
            with self._lock:
                del self._pending_calls[command.id]
        if reply.error is not None:
            raise NetworkError(f"{device_id}: {reply.error}")
        return dict(reply.content)

    def on_reply(self, device_id: str, payload: bytes) -> None:
        """Passes a reply to the pending call; drops one without a call.

        Raises:
            NetworkError: it is malformed.
        """
        reply = CommandReply.load(payload)
        with self._lock:
            called_id, replies = self._pending_calls.get(reply.id, ("", None))
        if replies is not None and called_id == device_id:
            replies.put(reply)

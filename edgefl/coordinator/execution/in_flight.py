"""In-flight instructions: sent through Flower, resent when lost, and completed at most once."""

from __future__ import annotations

import heapq
import logging
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from edgefl.coordinator.fleet.registry import HeldInstructions
from edgefl.coordinator.flower.messages import PreparedBody
from edgefl.core.errors import NetworkError
from edgefl.core.protocol import HEARTBEAT_S, Command, CommandKind
from edgefl.core.types import EvaluateInstruction, Json, TrainInstruction

log = logging.getLogger(__name__)

RESEND_AFTER_S = 3 * HEARTBEAT_S
"""An instruction delivered longer ago than this that its device does not hold counts as lost."""


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
    which part of the model the message carries (see `model_distribution`). Since `not_held_since_s` it is delivered
    and the device does not report it as held: it may still be on the way.
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
    not_held_since_s: float | None = None


class InFlightInstructions:
    """All in-flight instructions, in the order of dispatch. Not thread-safe: used by the run's thread alone.

    Args:
        transport: where instructions go.
        notifier: sends wake-ups and commands to devices.
        get_node_id: device id -> Flower's node id, None for one that has not joined.
        on_send_failed: called with the wire id and the reason when an instruction could not be sent.
    """

    def __init__(
        self,
        *,
        transport: InstructionTransport,
        notifier: DeviceNotifier,
        get_node_id: Callable[[str], int | None],
        on_send_failed: Callable[[str, str], None],
    ) -> None:
        self._transport, self._notifier, self._get_node_id, self._on_send_failed = (
            transport,
            notifier,
            get_node_id,
            on_send_failed,
        )
        self._pending: dict[str, PendingInstruction] = {}
        self._by_device: dict[str, dict[str, PendingInstruction]] = {}
        self._deadlines: list[tuple[float, str]] = []
        self._finishing_early: set[str] = set()

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
            self._notifier.send_command(device_id, Command(id=uuid.uuid4().hex, kind=CommandKind.BEAT))

    def complete(self, pending: PendingInstruction) -> None:
        """Removes an instruction that was answered or given up. A later reply is rejected."""
        del self._pending[pending.wire_id]
        device_pending = self._by_device[pending.instruction.device_id]
        del device_pending[pending.wire_id]
        if not device_pending:
            del self._by_device[pending.instruction.device_id]
        self._finishing_early.discard(pending.wire_id)
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
            self.finish_early(pending.wire_id, pending.instruction.device_id)
            overdue.append(pending)
        return overdue

    def finish_early(self, wire_id: str, device_id: str) -> None:
        """Asks a device to finish now, once per instruction."""
        if wire_id in self._pending and wire_id not in self._finishing_early:
            self._finishing_early.add(wire_id)
            self._send_finish_early(wire_id, device_id)

    def resend(self, pending: PendingInstruction, reason: str) -> None:
        """Sends an instruction again, with its present header and body."""
        log.warning("sending %s to %s again: %s", pending.wire_id, pending.instruction.device_id, reason)
        self._cancel(pending)
        self._send(pending)
        if pending.wire_id in self._finishing_early:  # a restarted agent has not received it
            self._send_finish_early(pending.wire_id, pending.instruction.device_id)

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
            self.finish_early(pending.wire_id, pending.instruction.device_id)
        self._transport.close()

    def _cancel(self, pending: PendingInstruction) -> None:
        if pending.message_id:
            self._transport.cancel(pending.message_id)

    def _send_finish_early(self, wire_id: str, device_id: str) -> None:
        self._notifier.send_command(
            device_id, Command(id=uuid.uuid4().hex, kind=CommandKind.RECALL, argument=wire_id)
        )

    def _send(self, pending: PendingInstruction) -> None:
        """Sends the instruction through Flower, with a new message id, and wakes the device."""
        device_id = pending.instruction.device_id
        node_id = self._get_node_id(device_id)
        if node_id is None:
            self._on_send_failed(pending.wire_id, f"{device_id} has not joined")
            return
        kind = "train" if isinstance(pending.instruction, TrainInstruction) else "evaluate"
        header = {**pending.header, **pending.model_header}
        try:
            pending.message_id = self._transport.send(node_id, kind=kind, header=header, body=pending.body)
        except NetworkError as error:
            self._on_send_failed(pending.wire_id, str(error))
            return
        self._notifier.notify(device_id)

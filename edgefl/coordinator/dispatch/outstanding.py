"""The orders that are out: handed to Flower, handed out again when they got lost, and settled once."""

from __future__ import annotations

import heapq
import logging
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from edgefl.coordinator.fleet.roster import Holding
from edgefl.coordinator.mail import PreparedBody
from edgefl.errors import NetworkError
from edgefl.protocol import HEARTBEAT_S, Command, CommandKind
from edgefl.types import Assignment, Evaluation, Json

log = logging.getLogger(__name__)

LOST_AFTER_S = 3 * HEARTBEAT_S
"""An order that was handed out so long ago and that its device does not know has been lost on the way."""


class Bell(Protocol):
    """The coordinator's end of the MQTT connection."""

    def ring(self, device_id: str) -> None: ...
    def command(self, device_id: str, command: Command) -> None: ...


class Mail(Protocol):
    """One run in Flower's books (`superlink.FlowerRun`)."""

    def send(self, node_id: int, *, kind: str, header: Mapping[str, object], body: PreparedBody) -> str: ...
    def is_known(self, instruction_id: str) -> bool: ...
    def is_delivered(self, instruction_id: str) -> bool: ...
    def cancel(self, instruction_id: str) -> None: ...
    def close(self) -> None: ...


@dataclass(slots=True)
class Pending:
    """One order that is out.

    `key` is its id on the wire, `instruction_id` the newest message about it, which left at `sent_s`; `model` says
    which part of the model the message carries (see `downlink`). Since `missed_s` it was handed out, and the device
    has said that it does not hold it: it may still be on the way.
    """

    key: str
    order: Assignment | Evaluation
    header: Json
    body: PreparedBody
    given_s: float
    deadline_s: float | None
    sent_s: float
    instruction_id: str = ""
    model: Json = field(default_factory=dict)
    missed_s: float | None = None


class Outstanding:
    """All orders that are out, in the order in which they were given. Used by the thread of the run alone.

    Args:
        mail: where instructions go.
        bell: tells devices.
        node_of: device id -> Flower's node id, None for one that has not joined.
        on_unsendable: told the key and the reason when an order could not be handed over.
    """

    def __init__(
        self,
        *,
        mail: Mail,
        bell: Bell,
        node_of: Callable[[str], int | None],
        on_unsendable: Callable[[str, str], None],
    ) -> None:
        self._mail, self._bell, self._node_of, self._on_unsendable = mail, bell, node_of, on_unsendable
        self._pending: dict[str, Pending] = {}
        self._by_device: dict[str, dict[str, Pending]] = {}
        self._deadlines: list[tuple[float, str]] = []
        self._recalled: set[str] = set()

    def __iter__(self) -> Iterator[Pending]:
        return iter(list(self._pending.values()))

    def get(self, key: str) -> Pending | None:
        return self._pending.get(key)

    def of(self, device_id: str) -> list[Pending]:
        return list(self._by_device.get(device_id, {}).values())

    def answered_by(self, instruction_id: str) -> Pending | None:
        """Returns the order that an instruction was about, for a reply that does not say so."""
        return next((pending for pending in self if pending.instruction_id == instruction_id), None)

    def give(self, pending: Pending) -> None:
        self.adopt(pending)
        self._send(pending)

    def adopt(self, pending: Pending) -> None:
        """Takes up an order that an earlier coordinator gave; nothing is sent."""
        self._pending[pending.key] = pending
        self._by_device.setdefault(pending.order.device_id, {})[pending.key] = pending
        if pending.deadline_s is not None:
            heapq.heappush(self._deadlines, (pending.deadline_s, pending.key))

    def inquire(self, device_id: str) -> None:
        """Asks a device for a heartbeat, which says what it holds, when an order of an earlier coordinator is out."""
        if any(not pending.instruction_id for pending in self.of(device_id)):
            self._bell.command(device_id, Command(id=uuid.uuid4().hex, kind=CommandKind.BEAT))

    def settle(self, pending: Pending) -> None:
        """Takes an order out: it was answered, or nobody waits for it any more. A later reply is refused."""
        del self._pending[pending.key]
        own = self._by_device[pending.order.device_id]
        del own[pending.key]
        if not own:
            del self._by_device[pending.order.device_id]
        self._recalled.discard(pending.key)
        self._cancel(pending)

    def next_deadline_s(self) -> float | None:
        """Returns the earliest deadline of an order that is out."""
        while self._deadlines and self._deadlines[0][1] not in self._pending:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    def overdue(self, now_s: float) -> list[Pending]:
        """Returns the orders whose deadline has passed; each of them is recalled."""
        late = []
        while (deadline_s := self.next_deadline_s()) is not None and deadline_s <= now_s:
            pending = self._pending[heapq.heappop(self._deadlines)[1]]
            self.recall(pending.key, pending.order.device_id)
            late.append(pending)
        return late

    def recall(self, key: str, device_id: str) -> None:
        """Asks a device to finish now, once per order."""
        if key in self._pending and key not in self._recalled:
            self._recalled.add(key)
            self._command_recall(key, device_id)

    def send_again(self, pending: Pending, why: str) -> None:
        """Hands an order out once more, with the header and the body that it has now."""
        log.warning("sending %s to %s again: %s", pending.key, pending.order.device_id, why)
        self._cancel(pending)
        self._send(pending)
        if pending.key in self._recalled:  # an agent that is new has not heard of it
            self._command_recall(pending.key, pending.order.device_id)

    def compare(self, holding: Holding) -> None:
        """Sends again what got lost: handed out and yet not held, or answered with something that did not arrive."""
        for pending in self.of(holding.device_id):
            is_known = self._mail.is_known(pending.instruction_id)
            is_held = pending.key in holding.assignment_ids
            if is_held or not self._mail.is_delivered(pending.instruction_id):
                pending.missed_s = None
            elif pending.missed_s is None:
                pending.missed_s = holding.at_s
            since_s = pending.missed_s if is_known else pending.sent_s
            if since_s is not None and holding.at_s >= since_s + LOST_AFTER_S:
                pending.sent_s, pending.missed_s = holding.at_s, None
                self.send_again(pending, "it got lost on the way")

    def close(self, *, recalls: bool = True) -> None:
        """Closes the run in Flower's books, and recalls what is out unless somebody will ask for it."""
        for pending in self if recalls else ():
            self.recall(pending.key, pending.order.device_id)
        self._mail.close()

    def _cancel(self, pending: Pending) -> None:
        if pending.instruction_id:
            self._mail.cancel(pending.instruction_id)

    def _command_recall(self, key: str, device_id: str) -> None:
        self._bell.command(device_id, Command(id=uuid.uuid4().hex, kind=CommandKind.RECALL, argument=key))

    def _send(self, pending: Pending) -> None:
        """Hands the order to Flower and rings; every time under a new instruction id."""
        device_id = pending.order.device_id
        node_id = self._node_of(device_id)
        if node_id is None:
            self._on_unsendable(pending.key, f"{device_id} has not joined")
            return
        kind = "train" if isinstance(pending.order, Assignment) else "evaluate"
        header = {**pending.header, **pending.model}
        try:
            pending.instruction_id = self._mail.send(node_id, kind=kind, header=header, body=pending.body)
        except NetworkError as error:
            self._on_unsendable(pending.key, str(error))
            return
        self._bell.ring(device_id)

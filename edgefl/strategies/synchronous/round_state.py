"""State of a strategy in rounds, and of an open round: asked devices and received updates."""

from __future__ import annotations

from dataclasses import dataclass, field

from edgefl.core.types import Array, FleetView
from edgefl.strategies.server_optimizers import ServerMoments
from edgefl.strategies.synchronous.streaming_mean import StreamingMean

TICK_S = 1e-6
"""Times closer than this are equal: a sum of floats may miss the exact wake-up time."""


@dataclass(slots=True)
class OpenRound:
    """An open round: assignments and the slots that they fill; the first update for a slot counts.

    Attributes:
        fold: the sum so far.
        asked: assignment id -> device and slot; `order` has its keys in dispatch order, `cursor` is behind those
            that are final.
        since_s: when the present wait began, None while nothing is waited for or the round before is still open.
        alarm_s: next wake-up of the strategy, None for never.
        is_rescued: the barrier has passed once.
        is_given_up: the round closes with the updates received.
        recalled: assignments that were recalled.
        copies: slot -> assignments, of the slots that several may fill.
        queued: device -> blocks of its redundant shard still to be assigned, in order.
        needless: slots filled just now, whose other copies are redundant.
        num_retries: number of requests to other devices for missing slots.
    """

    fold: StreamingMean = field(default_factory=StreamingMean)
    asked: dict[str, tuple[str, str]] = field(default_factory=dict)
    order: list[str] = field(default_factory=list)
    cursor: int = 0
    since_s: float | None = None
    alarm_s: float | None = None
    is_rescued: bool = False
    is_given_up: bool = False
    recalled: set[str] = field(default_factory=set)
    copies: dict[str, list[str]] = field(default_factory=dict)
    queued: dict[str, list[int]] = field(default_factory=dict)
    needless: list[str] = field(default_factory=list)
    num_retries: int = 0

    @property
    def num_received(self) -> int:
        return self.fold.num_received

    def add_assignment(self, assignment_id: str, device_id: str, slot: str | None = None) -> None:
        """Adds an assignment; one without a slot gets a new one, behind the others."""
        if slot is None:
            slot = assignment_id
            self.fold.expected.append(slot)
        else:
            self.copies.setdefault(slot, []).append(assignment_id)
        self.asked[assignment_id] = device_id, slot
        self.order.append(assignment_id)

    def is_waiting_for(self, assignment_id: str, view: FleetView) -> bool:
        """Returns whether an assignment may still fill its slot: ids that left `busy` are lost for good."""
        device_id, slot = self.asked[assignment_id]
        return not self.fold.has_update(slot) and assignment_id in view.busy.get(device_id, ())

    def is_pending(self, view: FleetView) -> bool:
        """Returns whether any assignment may still be answered; over a round it checks each one once."""
        while self.cursor < len(self.order):
            if self.is_waiting_for(self.order[self.cursor], view):
                return True
            self.cursor += 1
        return False

    def list_pending(self, view: FleetView) -> list[str]:
        """Returns the assignments that may still fill a slot, in their order; scans all of them."""
        return [
            assignment_id for assignment_id in self.order[self.cursor :] if self.is_waiting_for(assignment_id, view)
        ]

    def find_delivered(self) -> set[str]:
        """Returns the devices that have delivered an update."""
        return {device_id for device_id, slot in self.asked.values() if self.fold.has_update(slot)}


@dataclass(slots=True)
class RoundState:
    """State of a strategy in rounds, which owns `model` and updates it in place.

    Attributes:
        model, version: the newest.
        attempt: number of requests at this version; part of the assignments' ids.
        open: rounds that are not closed, oldest first; two with double buffering.
        moments: of the server optimiser.
        used: assignments whose updates went into the newest version.
        silent: devices asked in the last closed round without an update.
        settled: device -> its used assignments and the version they went into: the newest two, and older ones until
            the device is notified.
        is_over: nothing more will be assigned.
    """

    model: dict[str, Array]
    version: int = 0
    attempt: int = 0
    open: list[OpenRound] = field(default_factory=list)
    moments: ServerMoments = field(default_factory=dict)
    used: tuple[str, ...] = ()
    silent: set[str] = field(default_factory=set)
    settled: dict[str, dict[str, int]] = field(default_factory=dict)
    is_over: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotRequest:
    """A request to a device to fill a slot (a new one when None), on its whole shard or one block."""

    device_id: str
    slot: str | None = None
    block: int | None = None

"""The state of a strategy in rounds, and of one that is open: who was asked, what has come, who may still answer."""

from __future__ import annotations

from dataclasses import dataclass, field

from edgefl.strategies.fold import Fold
from edgefl.strategies.server_optimizers import Moments
from edgefl.types import Array, FleetView

TICK_S = 1e-6
"""Times closer than this are the same: a sum of floats may miss the very moment that it was asked to wait for."""


@dataclass(slots=True)
class OpenRound:
    """Assignments and the slots that they fill; several assignments may fill one slot, the first to come does.

    Attributes:
        fold: the sum so far.
        asked: assignment id -> device and slot; `order` has its keys as they were given, `cursor` is behind those
            that can bring nothing any more.
        since_s: when the present wait began, None while nobody is waited for or the round before is still open.
        alarm_s: when the strategy wants to look again, None for never.
        is_rescued: the barrier has passed once.
        is_given_up: the round closes with what it has.
        recalled: assignments that were recalled.
        copies: slot -> assignments, of the slots that several may fill.
        queued: device -> blocks of its redundant shard that it is still to be asked for, in order.
        needless: slots that were filled just now, whose other copies are needless.
        num_retries: how often others were asked for what is missing.
    """

    fold: Fold = field(default_factory=Fold)
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

    def ask(self, assignment_id: str, device_id: str, slot: str | None = None) -> None:
        """Notes an assignment; one without a slot gets a new one, behind the others."""
        if slot is None:
            slot = assignment_id
            self.fold.expected.append(slot)
        else:
            self.copies.setdefault(slot, []).append(assignment_id)
        self.asked[assignment_id] = device_id, slot
        self.order.append(assignment_id)

    def is_waiting_for(self, assignment_id: str, view: FleetView) -> bool:
        """Returns whether an assignment may still bring what has not come: ids that left `busy` are lost for good."""
        device_id, slot = self.asked[assignment_id]
        return not self.fold.has(slot) and assignment_id in view.busy.get(device_id, ())

    def is_pending(self, view: FleetView) -> bool:
        """Returns whether anybody may still answer; over the whole round it looks at each assignment once."""
        while self.cursor < len(self.order):
            if self.is_waiting_for(self.order[self.cursor], view):
                return True
            self.cursor += 1
        return False

    def pending(self, view: FleetView) -> list[str]:
        """Returns the assignments that may still bring something, in their order; looks at all of them."""
        return [each for each in self.order[self.cursor :] if self.is_waiting_for(each, view)]

    def delivered(self) -> set[str]:
        """Returns the devices that have brought something."""
        return {device_id for device_id, slot in self.asked.values() if self.fold.has(slot)}


@dataclass(slots=True)
class RoundState:
    """`model` is owned by the state and updated in place.

    Attributes:
        model, version: the newest.
        attempt: how often devices were asked at this version; part of the assignments' ids.
        open: rounds that are not closed, oldest first; two with double buffering.
        moments: what the server optimiser remembers.
        used: assignments whose updates went into the newest version.
        silent: devices that were asked in the round that was closed last, and brought nothing.
        settled: device -> its used assignments and the version they went into: the newest two, and older ones until
            it has been told.
        is_over: nothing more will be assigned.
    """

    model: dict[str, Array]
    version: int = 0
    attempt: int = 0
    open: list[OpenRound] = field(default_factory=list)
    moments: Moments = field(default_factory=dict)
    used: tuple[str, ...] = ()
    silent: set[str] = field(default_factory=set)
    settled: dict[str, dict[str, int]] = field(default_factory=dict)
    is_over: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One thing to ask of a device: to fill a slot (a new one when None), on its whole shard or on one block."""

    device_id: str
    slot: str | None = None
    block: int | None = None

"""State of a strategy in rounds, and of an open round: asked devices, received updates, and the deadline.

As `ssgd_timeout_limit` of Parallel-SGD: `on_timeout` is applied once when the time-out passes, and after the same
time again the run ends and names the missing devices.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum, auto

from edgefl.core.errors import StrategyError
from edgefl.core.types import Array, FleetView, Update
from edgefl.strategies.aggregation import ServerMoments, StreamingMean
from edgefl.strategies.strategy_config import TICK_S, RoundRules
from edgefl.strategies.utility_selection import RoundAnswers, SelectionRecord

MAX_LISTED_DEVICES = 10
"""Maximum of devices named in a message."""


@dataclass(slots=True)
class OpenRound:
    """An open round: assignments and the slots that they fill; the first update for a slot counts.

    Attributes:
        fold: the sum so far.
        answers: of whom it asked, where devices are selected by utility.
        assigned: assignment id -> device and slot; `order` has its keys in dispatch order, `cursor` is behind those
            that are final.
        since_s: when the present wait began, None while nothing is waited for or the round before is still open.
        alarm_s: next wake-up of the strategy, None for never.
        has_timed_out: the time-out has passed once.
        is_abandoned: the round closes with the updates received.
        cancelled: assignments that were asked to finish early.
        copies: slot -> assignments, of the slots that several may fill.
        queued: device -> blocks of its redundant shard still to be assigned, in order.
        needless: slots filled just now, whose other copies are redundant.
        num_retries: number of requests to other devices for missing slots.
        reduced: slot -> all-reduces behind its update, and whether that has tensors; see `collective_rounds`.
        resent: assignments that ask for the displacement of an earlier one, and that one.
        below_clip: in a private round, device -> 1/2 where its update was not clipped, else -1/2.
    """

    fold: StreamingMean = field(default_factory=StreamingMean)
    answers: RoundAnswers = field(default_factory=RoundAnswers)
    assigned: dict[str, tuple[str, str]] = field(default_factory=dict)
    order: list[str] = field(default_factory=list)
    cursor: int = 0
    since_s: float | None = None
    alarm_s: float | None = None
    has_timed_out: bool = False
    is_abandoned: bool = False
    cancelled: set[str] = field(default_factory=set)
    copies: dict[str, list[str]] = field(default_factory=dict)
    queued: dict[str, list[int]] = field(default_factory=dict)
    needless: list[str] = field(default_factory=list)
    num_retries: int = 0
    reduced: dict[str, tuple[int, bool]] = field(default_factory=dict)
    resent: dict[str, str] = field(default_factory=dict)
    below_clip: dict[str, float] = field(default_factory=dict)

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
        self.assigned[assignment_id] = device_id, slot
        self.order.append(assignment_id)

    def is_waiting_for(self, assignment_id: str, view: FleetView) -> bool:
        """Returns whether an assignment may still fill its slot: ids that left `busy` are lost for good."""
        device_id, slot = self.assigned[assignment_id]
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

    def pop_updates(self) -> list[Update]:
        """Returns the updates that were stored, in the order of their slots, and counts them as used."""
        slots = [slot for slot in self.fold.expected if slot in self.fold.waiting]
        updates = [self.fold.waiting[slot] for slot in slots]
        self.fold.used = {slot: update.assignment_id for slot, update in zip(slots, updates, strict=True)}
        self.fold.waiting.clear()
        return updates

    def find_delivered(self) -> set[str]:
        """Returns the devices that have delivered an update."""
        return {device_id for device_id, slot in self.assigned.values() if self.fold.has_update(slot)}


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
        used_assignments: device -> its used assignments and the version that they went into: the newest two, and
            older ones until the device is notified.
        is_over: nothing more will be assigned.
        halvings: versions from which on the learning rate is half of what it was.
        num_holders: largest number of devices with blocks in a round of `redundant` so far.
        clip: in a private run, most norm of an update of the open round; None before the first.
        participations: with correlated noise, device -> how often it took part, and the last version that it took
            part in, 0 where that was before the noise began anew.
        waiting_since_s: since when limits of participation have kept all boards that are there out of a round; None
            where they do not.
        epsilon: with private examples, the most that a device reported to have spent.
        selections: device -> its record, where devices are selected by utility.
    """

    model: dict[str, Array]
    version: int = 0
    attempt: int = 0
    open: list[OpenRound] = field(default_factory=list)
    moments: ServerMoments = field(default_factory=dict)
    used: tuple[str, ...] = ()
    silent: set[str] = field(default_factory=set)
    used_assignments: dict[str, dict[str, int]] = field(default_factory=dict)
    is_over: bool = False
    halvings: tuple[int, ...] = ()
    num_holders: int = 0
    clip: float | None = None
    participations: dict[str, tuple[int, int]] = field(default_factory=dict)
    waiting_since_s: float | None = None
    epsilon: float = 0.0
    selections: dict[str, SelectionRecord] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotRequest:
    """A request to a device to fill a slot (a new one when None), on its whole shard or one block.

    `part` is the part of the update to send, and of how many; None for all of it. With `resend` it asks for the
    displacement that the device holds of that assignment.
    """

    device_id: str
    slot: str | None = None
    block: int | None = None
    part: tuple[int, int] | None = None
    resend: str = ""


class DeadlineAction(Enum):
    """Action on a round that waits."""

    WAIT = auto()
    RECOVER = auto()
    CLOSE = auto()
    FAIL = auto()


def check_round_deadline(current_round: OpenRound, rules: RoundRules, now_s: float) -> DeadlineAction:
    """Returns the action on a waiting round; the time-out action is due once."""
    # The clock of a restarted coordinator may be behind that of the one before.
    current_round.since_s = now_s if current_round.since_s is None else min(current_round.since_s, now_s)
    due_s = compute_alarm_s(current_round, rules)
    if due_s is None or current_round.is_abandoned or now_s + TICK_S < due_s:
        return DeadlineAction.WAIT
    if not current_round.has_timed_out:
        current_round.has_timed_out = True
        return DeadlineAction.RECOVER
    return (
        DeadlineAction.CLOSE
        if rules.on_timeout == "aggregate" and current_round.num_received
        else DeadlineAction.FAIL
    )


def compute_alarm_s(current_round: OpenRound, rules: RoundRules) -> float | None:
    """Returns when `check_round_deadline` is due next, None for never."""
    if rules.round_timeout_s is None or current_round.since_s is None:
        return None
    return current_round.since_s + rules.round_timeout_s * (1 + current_round.has_timed_out)


def make_timeout_error(
    current_round: OpenRound, rules: RoundRules, *, number: int, now_s: float, missing: Iterable[str]
) -> StrategyError:
    """Returns the error of a round that missed its deadline in spite of the time-out action.

    Args:
        current_round: the round.
        rules: with the time-out that has passed twice.
        number: of the round, from 1.
        now_s: on the fleet's clock.
        missing: names of the pending devices.
    """
    names = list(dict.fromkeys(missing))
    suffix = f" and {len(names) - MAX_LISTED_DEVICES} more" if len(names) > MAX_LISTED_DEVICES else ""
    waited_s = now_s - (now_s if current_round.since_s is None else current_round.since_s)
    return StrategyError(
        f"round {number} waited {waited_s:g} s for {', '.join(names[:MAX_LISTED_DEVICES])}{suffix}: "
        f"round_timeout_s = {rules.round_timeout_s:g} passed twice and on_timeout = {rules.on_timeout!r} did not help"
    )

"""The book of an asynchronous strategy: who works on what, who was lost, and who shall rest before the next try.

An assignment that is neither answered nor in `view.busy` is lost for good. That is found out when its device is asked
again, and otherwise by looking at a few devices at a time, in turn.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from edgefl.types import FleetView, derived_rng, derived_seed

NAMED = 2
"""So many of its newest used updates a device is always told, heard of or not: a board whose card lost the last
minutes learns from them that it did. Error feedback relies on it."""
LOOKED_AT = 3
"""So many devices are looked at for each question: all of them have been, after a third as many."""
MAX_REST_S = 60.0


@dataclass(slots=True)
class Seat:
    """One device: its assignment ("" when none is out), and which used updates it is to be told of.

    `told` of the `settled` ones went out with the assignment; they are crossed off when its update is here, but for
    the newest two.
    """

    assignment_id: str = ""
    base_version: int = 0
    learning_rate: float = 0.0
    settled: tuple[str, ...] = ()
    told: int = 0
    losses: int = 0


@dataclass(slots=True)
class Seats:
    """All devices that were ever asked; `resting` says until when."""

    by_device: dict[str, Seat] = field(default_factory=dict)
    turn: deque[str] = field(default_factory=deque)
    resting: dict[str, float] = field(default_factory=dict)

    def give(self, device_id: str, assignment_id: str, *, base_version: int, learning_rate: float) -> tuple[str, ...]:
        """Notes an assignment and returns which updates its device shall be told to be used."""
        seat = self.by_device.get(device_id)
        if seat is None:
            seat = self.by_device[device_id] = Seat()
            self.turn.append(device_id)
        seat.assignment_id, seat.base_version, seat.learning_rate = assignment_id, base_version, learning_rate
        seat.told = len(seat.settled)
        return seat.settled

    def answer(self, device_id: str, assignment_id: str) -> Seat | None:
        """Returns the seat whose assignment this is and takes it off; None when nobody waits for it."""
        seat = self.by_device.get(device_id)
        if seat is None or not assignment_id or seat.assignment_id != assignment_id:
            return None
        settled = (*seat.settled, assignment_id)
        seat.settled = settled[-max(NAMED, len(settled) - seat.told) :]
        seat.assignment_id, seat.told, seat.losses = "", 0, 0
        return seat

    def is_out(self, device_id: str) -> bool:
        seat = self.by_device.get(device_id)
        return seat is not None and seat.assignment_id != ""

    def is_at_work(self, device_id: str, view: FleetView) -> bool:
        """Returns whether its assignment may still be answered."""
        seat = self.by_device.get(device_id)
        return seat is not None and seat.assignment_id in view.busy.get(device_id, ())

    def lose(self, device_id: str, now_s: float) -> int:
        """Takes off an assignment that brings nothing and returns the version that it began with.

        One loss may be a device that left and came back. From the second in a row on it rests, longer each time, or a
        board that fails at once would be asked without a pause.
        """
        seat = self.by_device[device_id]
        seat.assignment_id, seat.losses = "", seat.losses + 1
        if seat.losses > 1:
            self.resting[device_id] = now_s + min(MAX_REST_S, 2.0 ** min(seat.losses - 2, 10))
        return seat.base_version

    def next_in_turn(self) -> Iterator[str]:
        """Gives the few devices that are looked at now."""
        for _ in range(min(LOOKED_AT, len(self.turn))):
            device_id = self.turn[0]
            self.turn.rotate(-1)
            yield device_id

    def rests(self, device_id: str) -> bool:
        return device_id in self.resting

    def wake(self, now_s: float) -> None:
        """Ends the rests that are over; so is one beyond all bounds, which was noted by another clock."""
        for device_id, until_s in list(self.resting.items()):
            if not now_s < until_s <= now_s + MAX_REST_S:
                del self.resting[device_id]

    def next_wake_s(self, now_s: float, longest_s: float) -> float:
        return min([longest_s, *(until_s - now_s for until_s in self.resting.values())])


def draws(num_idle: int, num_wanted: int, *seed: int | str) -> Iterable[int]:
    """Returns places among `num_idle`, at random: enough to find `num_wanted` different ones, or nearly so."""
    if 8 * num_wanted >= num_idle:
        drawn: list[int] = derived_rng(*seed).permutation(num_idle).tolist()
        return drawn
    # A generator for each event would cost more than all else; a hash does for one or two numbers.
    return (derived_seed(*seed, number) % num_idle for number in range(4 * num_wanted + 4))

"""In-flight work of an asynchronous strategy: assignments, losses, and back-off by device.

An assignment that is neither answered nor in `view.busy` is lost for good. That is detected when its device is asked
again, and otherwise by a round-robin check of a few devices at a time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from edgefl.core.types import FleetView, derive_rng, derive_seed

MIN_SETTLED_IDS = 2
"""Number of newest used updates that a device is always told of: a board whose card lost the last minutes learns from
them that it did. Error feedback relies on it."""
NUM_CHECKS_PER_CALL = 3
"""Devices checked per call; a third as many calls check all of them."""
MAX_BACKOFF_S = 60.0


@dataclass(slots=True)
class WorkSlot:
    """Work slot of one device: its assignment ("" for none), and its used updates to acknowledge.

    `told` of the `settled` ones were sent with the assignment; they are dropped when its update arrives, but for the
    newest two.
    """

    assignment_id: str = ""
    base_version: int = 0
    learning_rate: float = 0.0
    settled: tuple[str, ...] = ()
    told: int = 0
    losses: int = 0


@dataclass(slots=True)
class WorkSlots:
    """Work slots of all devices ever asked; `resting` holds the ends of back-offs."""

    by_device: dict[str, WorkSlot] = field(default_factory=dict)
    turn: deque[str] = field(default_factory=deque)
    resting: dict[str, float] = field(default_factory=dict)

    def assign(
        self, device_id: str, assignment_id: str, *, base_version: int, learning_rate: float
    ) -> tuple[str, ...]:
        """Records an assignment and returns the used updates that its device is to be told of."""
        slot = self.by_device.get(device_id)
        if slot is None:
            slot = self.by_device[device_id] = WorkSlot()
            self.turn.append(device_id)
        slot.assignment_id, slot.base_version, slot.learning_rate = assignment_id, base_version, learning_rate
        slot.told = len(slot.settled)
        return slot.settled

    def complete(self, device_id: str, assignment_id: str) -> WorkSlot | None:
        """Returns the slot of an assignment and clears it; None when it is not in flight."""
        slot = self.by_device.get(device_id)
        if slot is None or not assignment_id or slot.assignment_id != assignment_id:
            return None
        settled_ids = (*slot.settled, assignment_id)
        slot.settled = settled_ids[-max(MIN_SETTLED_IDS, len(settled_ids) - slot.told) :]
        slot.assignment_id, slot.told, slot.losses = "", 0, 0
        return slot

    def has_assignment(self, device_id: str) -> bool:
        slot = self.by_device.get(device_id)
        return slot is not None and slot.assignment_id != ""

    def is_in_flight(self, device_id: str, view: FleetView) -> bool:
        """Returns whether the device's assignment may still be answered."""
        slot = self.by_device.get(device_id)
        return slot is not None and slot.assignment_id in view.busy.get(device_id, ())

    def cancel(self, device_id: str, now_s: float) -> int:
        """Clears a lost assignment and returns its base version.

        One loss may be a device that left and came back. From the second in a row on it backs off, longer each time,
        or a device that fails at once would be asked without a pause.
        """
        slot = self.by_device[device_id]
        slot.assignment_id, slot.losses = "", slot.losses + 1
        if slot.losses > 1:
            self.resting[device_id] = now_s + min(MAX_BACKOFF_S, 2.0 ** min(slot.losses - 2, 10))
        return slot.base_version

    def select_next(self) -> Iterator[str]:
        """Yields the next few devices to check."""
        for _ in range(min(NUM_CHECKS_PER_CALL, len(self.turn))):
            device_id = self.turn[0]
            self.turn.rotate(-1)
            yield device_id

    def is_backing_off(self, device_id: str) -> bool:
        return device_id in self.resting

    def remove_expired_backoffs(self, now_s: float) -> None:
        """Removes expired back-offs, and those beyond the maximum, which another clock set."""
        for device_id, until_s in list(self.resting.items()):
            if not now_s < until_s <= now_s + MAX_BACKOFF_S:
                del self.resting[device_id]

    def compute_wake_s(self, now_s: float, max_s: float) -> float:
        return min([max_s, *(until_s - now_s for until_s in self.resting.values())])


def select_random_indices(num_idle: int, num_required: int, *seed: int | str) -> Iterable[int]:
    """Returns random indices below `num_idle`, with repeats, enough for about `num_required` distinct ones."""
    if 8 * num_required >= num_idle:
        indices: list[int] = derive_rng(*seed).permutation(num_idle).tolist()
        return indices
    # A generator per event would dominate the cost; a hash suffices for one or two numbers.
    return (derive_seed(*seed, number) % num_idle for number in range(4 * num_required + 4))

"""The way into a run: brings devices to its door when they come, and keeps them away when they leave.

A run without terms has no door, and everybody is in.
"""

from __future__ import annotations

from edgefl.coordinator.dispatch.door import Door
from edgefl.coordinator.dispatch.live_view import LiveView
from edgefl.coordinator.fleet.presence import DeviceState, Transition
from edgefl.coordinator.fleet.roster import Added, Changed, Holding, Removed, Restarted, Roster, RosterEvent
from edgefl.coordinator.mail import Reply
from edgefl.types import Joined


class Entrance:
    """Used by the thread of the run alone.

    Args:
        door: asks and lets in; None where nobody is asked.
        view: knows whom the run means, and is told who is in.
        roster: the devices.
    """

    def __init__(self, door: Door | None, view: LiveView, roster: Roster) -> None:
        self._door, self._view, self._roster = door, view, roster
        self._has_begun = False

    def turn(self) -> list[Joined]:
        """Asks who has not been asked yet, and lets in who is ready.

        Not before the run waits for the first time: only then it hears answers, and knows its model.

        Raises:
            RunFailedError: fewer devices are ready than the run requires.
        """
        if self._door is None:
            return []
        if not self._has_begun:
            self._has_begun = True
            for info in self._roster.workers():
                if self._view.accepts(info.device_id):
                    self._door.meet(info.device_id)
        admitted = self._door.turn()
        for device_id in admitted:
            self._view.let_in(device_id)
        return [Joined(device_id=device_id) for device_id in admitted]

    def noticed(self, event: RosterEvent) -> None:
        """Takes note of who comes, leaves, restarts, and holds what it was asked."""
        if self._door is None:
            return
        match event:
            case Transition(after=DeviceState.GONE | DeviceState.OFFLINE | DeviceState.DRAINING) | Removed():
                self._door.leave(event.device_id)
            case Transition(after=DeviceState.ONLINE, before=before) if before is DeviceState.LATE:
                pass
            case Changed() if self._roster.is_drained(event.device_id):
                self._door.leave(event.device_id)
            case Transition(after=DeviceState.ONLINE) | Added() | Changed():
                if self._has_begun and self._view.accepts(event.device_id):
                    self._door.meet(event.device_id)
            case Restarted():
                self._door.restarted(event.device_id)
            case Holding():
                self._door.heard(event.device_id, event.assignment_ids, event.at_s)
            case _:
                pass

    def answered(self, device_id: str, reply: Reply) -> bool:
        """Returns whether a reply was for the door."""
        return self._door is not None and self._door.answered(device_id, reply)

    def take_bytes(self, device_id: str) -> tuple[int, int]:
        """Returns the bytes up and down that a device has spent at the door, once."""
        return self._door.take_bytes(device_id) if self._door is not None else (0, 0)

    def next_deadline_s(self) -> float | None:
        """Returns when the door is to be looked at next."""
        return self._door.next_deadline_s() if self._door is not None else None

    def close(self) -> None:
        if self._door is not None:
            self._door.close()

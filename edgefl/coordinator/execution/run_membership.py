"""Membership of a run: forwards fleet events to its admission.

A run without admission requirements admits every device.
"""

from __future__ import annotations

from edgefl.coordinator.execution.admission import AdmissionController
from edgefl.coordinator.execution.live_fleet_view import LiveFleetView
from edgefl.coordinator.fleet.presence import DevicePresence, PresenceChanged
from edgefl.coordinator.fleet.registry import (
    DeviceAdded,
    DeviceChanged,
    DeviceRegistry,
    DeviceRemoved,
    DeviceRestarted,
    HeldInstructions,
    RegistryEvent,
)
from edgefl.coordinator.flower.messages import Reply
from edgefl.core.types import DeviceAvailable


class RunMembership:
    """Late joiners and leavers of a run. Not thread-safe: used by the run's thread alone.

    Args:
        admission: of the run; None to admit every device.
        view: knows which devices are eligible, and receives the admitted ones.
        roster: the device registry.
    """

    def __init__(self, admission: AdmissionController | None, view: LiveFleetView, roster: DeviceRegistry) -> None:
        self._admission, self._view, self._roster = admission, view, roster
        self._is_started = False

    def poll(self) -> list[DeviceAvailable]:
        """Queries devices not queried yet, and returns the newly admitted.

        Starts when the run first waits: only then replies are processed and the model is known.

        Raises:
            RunFailedError: fewer devices are ready than the run requires.
        """
        if self._admission is None:
            return []
        if not self._is_started:
            self._is_started = True
            for info in self._roster.list_schedulable():
                if self._view.is_eligible(info.device_id):
                    self._admission.query(info.device_id)
        admitted = self._admission.poll()
        for device_id in admitted:
            self._view.admit(device_id)
        return [DeviceAvailable(device_id=device_id) for device_id in admitted]

    def on_roster_event(self, event: RegistryEvent) -> None:
        """Forwards arrivals, departures, restarts and held instructions to admission."""
        if self._admission is None:
            return
        match event:
            case (
                PresenceChanged(after=DevicePresence.GONE | DevicePresence.OFFLINE | DevicePresence.DRAINING)
                | DeviceRemoved()
            ):
                self._admission.remove(event.device_id)
            case PresenceChanged(after=DevicePresence.ONLINE, before=before) if before is DevicePresence.LATE:
                pass
            case DeviceChanged() if self._roster.is_drained(event.device_id):
                self._admission.remove(event.device_id)
            case PresenceChanged(after=DevicePresence.ONLINE) | DeviceAdded() | DeviceChanged():
                if self._is_started and self._view.is_eligible(event.device_id):
                    self._admission.query(event.device_id)
            case DeviceRestarted():
                self._admission.on_restart(event.device_id)
            case HeldInstructions():
                self._admission.on_heartbeat(event.device_id, event.assignment_ids, event.at_s)
            case _:
                pass

    def on_reply(self, device_id: str, reply: Reply) -> bool:
        """Returns whether a reply answered an admission query."""
        return self._admission is not None and self._admission.on_reply(device_id, reply)

    def pop_traffic(self, device_id: str) -> tuple[int, int]:
        """Returns and clears the bytes up and down that a device spent on admission."""
        return self._admission.pop_traffic(device_id) if self._admission is not None else (0, 0)

    def next_deadline_s(self) -> float | None:
        """Returns when to poll admission next."""
        return self._admission.next_deadline_s() if self._admission is not None else None

    def close(self) -> None:
        if self._admission is not None:
            self._admission.close()

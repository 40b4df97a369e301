"""The fleet as a run sees it, kept up to date device by device: reading it never looks at all of them."""

from __future__ import annotations

import threading
from collections.abc import Callable

from edgefl.coordinator.dispatch.fleet_book import FleetBook, SeenVitals
from edgefl.coordinator.dispatch.participants import FleetRun, Participants
from edgefl.coordinator.fleet.presence import Transition
from edgefl.coordinator.fleet.roster import Added, Changed, Removed, Roster, RosterEvent
from edgefl.types import Assignment, DeviceInfo, Progress, Role


class LiveView(FleetBook):
    """Implements `FleetView`: what it gives stays as it is until `refresh`, but for what the run itself gives out.

    Everything but the listening is done by the thread of the run.
    """

    def __init__(
        self,
        run: FleetRun,
        roster: Roster,
        clock: Callable[[], float],
        *,
        admits: Callable[[str], bool] = lambda _: True,
    ) -> None:
        self.seen = SeenVitals(roster.vitals)
        super().__init__(self.seen)
        self._roster, self._clock, self._admits = roster, clock, admits
        self._participants = Participants(run)
        self._stale: set[str] = set()
        self._changed: dict[str, DeviceInfo | None] = {}
        self._reports: list[Progress] = []
        self._lock = threading.Lock()
        self.close = roster.listen(self._heard)
        for info in roster.workers():
            self._look_at(info.device_id)
        self.begin(clock())

    def refresh(self) -> LiveView:
        """Takes in what became of devices since the last time, and returns itself."""
        with self._lock:
            stale, self._stale = self._stale, set()
        for device_id in stale:
            self._look_at(device_id)
        self.begin(self._clock())
        self.seen.begin()
        return self

    def take_changes(self) -> tuple[dict[str, DeviceInfo | None], tuple[Progress, ...]]:
        """Returns what has changed since the last time: devices (None for one that went), and their reports."""
        changed, self._changed = self._changed, {}
        reports, self._reports = self._reports, []
        return changed, tuple(reports)

    def accepts(self, device_id: str) -> bool:
        """Returns whether a trainer is there and meant by the run."""
        info = self._roster.worker(device_id)
        return info is not None and info.role == Role.TRAINER and self._participants.accepts(info)

    def let_in(self, device_id: str) -> None:
        """Looks again at a device that may work now."""
        with self._lock:
            self._stale.add(device_id)

    def give(self, order: Assignment) -> None:
        self._participants.begin(self._devices)
        super().give(order)

    def note_progress(self, progress: Progress) -> None:
        self._reports.append(progress)
        super().note_progress(progress)

    def take_over(self, other: FleetBook) -> None:
        """Goes on where a journal ended: its devices are gone until they are heard of again."""
        if other.busy or other.speeds:
            self._participants.begin(other.devices)
        super().take_over(other)
        gone: dict[str, DeviceInfo | None] = dict.fromkeys(other.devices)
        self._changed = {**gone, **self._devices}

    def _heard(self, event: RosterEvent) -> None:
        if isinstance(event, Transition | Added | Changed | Removed):
            with self._lock:
                self._stale.add(event.device_id)

    def _look_at(self, device_id: str) -> None:
        info = self._roster.worker(device_id)
        is_in = info is not None and (info.role == Role.EVALUATOR or self._admits(device_id))
        found = info if info is not None and is_in and self._participants.accepts(info) else None
        if found != self._devices.get(device_id):
            self._changed[device_id] = found
        self.put(device_id, found)

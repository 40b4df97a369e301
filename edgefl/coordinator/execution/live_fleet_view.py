"""Incrementally updated fleet view of a run; reading costs no pass over all devices."""

from __future__ import annotations

import threading
from collections.abc import Callable

from edgefl.coordinator.execution.eligibility import EligibilityFilter, RunSpec
from edgefl.coordinator.execution.fleet_state import FleetState, HealthSnapshot
from edgefl.coordinator.fleet.presence import PresenceChanged
from edgefl.coordinator.fleet.registry import DeviceAdded, DeviceChanged, DeviceRegistry, DeviceRemoved, RegistryEvent
from edgefl.core.types import DeviceInfo, Progress, Role, TrainInstruction


class LiveFleetView(FleetState):
    """Implements `FleetView`: constant until `refresh`, but for the run's own dispatches.

    Not thread-safe but for the handling of registry events: used by the run's thread alone.
    """

    def __init__(
        self,
        run: RunSpec,
        roster: DeviceRegistry,
        clock: Callable[[], float],
        *,
        is_admitted: Callable[[str], bool] = lambda _: True,
    ) -> None:
        self.health_snapshot = HealthSnapshot(roster.health)
        super().__init__(self.health_snapshot)
        self._roster, self._clock, self._is_admitted = roster, clock, is_admitted
        self._eligibility = EligibilityFilter(run)
        self._stale_ids: set[str] = set()
        self._changes: dict[str, DeviceInfo | None] = {}
        self._progress_reports: list[Progress] = []
        self._lock = threading.Lock()
        self.close = roster.subscribe(self._on_roster_event)
        for info in roster.list_schedulable():
            self._update_from_roster(info.device_id)
        self.start_turn(clock())

    def refresh(self) -> LiveFleetView:
        """Applies the device changes since the last call, and returns itself."""
        with self._lock:
            stale, self._stale_ids = self._stale_ids, set()
        for device_id in stale:
            self._update_from_roster(device_id)
        self.start_turn(self._clock())
        self.health_snapshot.start_turn()
        return self

    def pop_changes(self) -> tuple[dict[str, DeviceInfo | None], tuple[Progress, ...]]:
        """Returns the changes since the last call: devices (None for one that left), and progress reports."""
        changed, self._changes = self._changes, {}
        reports, self._progress_reports = self._progress_reports, []
        return changed, tuple(reports)

    def is_eligible(self, device_id: str) -> bool:
        """Returns whether a device is a present trainer that the run selects."""
        info = self._roster.get_schedulable(device_id)
        return info is not None and info.role == Role.TRAINER and self._eligibility.is_eligible(info)

    def admit(self, device_id: str) -> None:
        """Marks an admitted device for the next `refresh`."""
        with self._lock:
            self._stale_ids.add(device_id)

    def assign(self, instruction: TrainInstruction) -> None:
        self._eligibility.on_first_dispatch(self._devices)
        super().assign(instruction)

    def record_progress(self, progress: Progress) -> None:
        self._progress_reports.append(progress)
        super().record_progress(progress)

    def restore_from(self, other: FleetState) -> None:
        """Restores the state at the end of a journal; its devices are absent until they report again."""
        if other.busy or other.speeds:
            self._eligibility.on_first_dispatch(other.devices)
        super().restore_from(other)
        absent: dict[str, DeviceInfo | None] = dict.fromkeys(other.devices)
        self._changes = {**absent, **self._devices}

    def _on_roster_event(self, event: RegistryEvent) -> None:
        if isinstance(event, PresenceChanged | DeviceAdded | DeviceChanged | DeviceRemoved):
            with self._lock:
                self._stale_ids.add(event.device_id)

    def _update_from_roster(self, device_id: str) -> None:
        info = self._roster.get_schedulable(device_id)
        may_work = info is not None and (info.role == Role.EVALUATOR or self._is_admitted(device_id))
        listed_info = info if info is not None and may_work and self._eligibility.is_eligible(info) else None
        if listed_info != self._devices.get(device_id):
            self._changes[device_id] = listed_info
        self.update_device(device_id, listed_info)

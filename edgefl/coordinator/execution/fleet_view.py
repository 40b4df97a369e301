"""Fleet view of a run, updated incrementally without passes over all devices; and the report of a run that waits.

The live view fills its state from registry events, a resumed run from its journal; both give the same view.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence

from edgefl.coordinator.execution.eligibility import EligibilityFilter, RunSpec
from edgefl.coordinator.fleet.presence import PresenceChanged
from edgefl.coordinator.fleet.registry import (
    DeviceAdded,
    DeviceChanged,
    DeviceRegistry,
    DeviceRemoved,
    RegistryEvent,
)
from edgefl.core.claims import ClaimLimits, OnBounded, ignore_bounded
from edgefl.core.types import DeviceInfo, EvaluateInstruction, HealthMetrics, Progress, Role, TrainInstruction
from edgefl.engine.fleet_state import FleetState

log = logging.getLogger(__name__)

RUN_WAITING = "run-waiting"
"""Kind of the event of a waiting run."""
REPORT_AFTER_S = 30.0
MAX_NAMES = 5


class HealthSnapshot(Mapping[str, HealthMetrics]):
    """Health of devices as last read: constant within a turn, with each change reported once.

    Args:
        source: the current health.
    """

    def __init__(self, source: Mapping[str, HealthMetrics]) -> None:
        self._source = source
        self._by_device: dict[str, HealthMetrics | None] = {}
        self._current_ids: set[str] = set()
        self._changes: dict[str, HealthMetrics | None] = {}

    def start_turn(self, by_device: Mapping[str, HealthMetrics | None] | None = None) -> None:
        """Starts another turn; `by_device` restores the health reported before."""
        self._current_ids.clear()
        if by_device is not None:
            self._by_device = dict(by_device)

    def pop_changes(self) -> dict[str, HealthMetrics | None]:
        """Returns the health read since the last call that had changed."""
        changes, self._changes = self._changes, {}
        return changes

    @property
    def by_device(self) -> Mapping[str, HealthMetrics | None]:
        return self._by_device

    def __getitem__(self, device_id: str) -> HealthMetrics:
        if device_id not in self._current_ids:
            self._current_ids.add(device_id)
            current = self._source.get(device_id)
            if device_id not in self._by_device or self._by_device[device_id] != current:
                self._by_device[device_id] = self._changes[device_id] = current
        health = self._by_device[device_id]
        if health is None:
            raise KeyError(device_id)
        return health

    def __iter__(self) -> Iterator[str]:
        return (device_id for device_id in list(self._source) if device_id in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)


class LiveFleetView(FleetState):
    """Implements `FleetView`: constant until `refresh`, but for the run's own dispatches.

    Not thread-safe but for the handling of registry events: used by the run's thread alone.
    """

    def __init__(
        self,
        run: RunSpec,
        registry: DeviceRegistry,
        clock: Callable[[], float],
        *,
        is_admitted: Callable[[str], bool] = lambda _: True,
        on_bounded: OnBounded = ignore_bounded,
    ) -> None:
        self.health_snapshot = HealthSnapshot(registry.health)
        limits = ClaimLimits(
            task=run.task,
            max_weight_ratio=run.max_weight_ratio,
            test_fraction=float(run.header.get("test_fraction", 0.0)),
            on_bounded=on_bounded,
        )
        super().__init__(self.health_snapshot, limits=limits)
        self._registry, self._clock, self._is_admitted = registry, clock, is_admitted
        self._eligibility = EligibilityFilter(run)
        self._stale_ids: set[str] = set()
        self._changes: dict[str, DeviceInfo | None] = {}
        self._progress_reports: list[Progress] = []
        self._lock = threading.Lock()
        self.close = registry.subscribe(self._on_registry_event)
        for info in registry.list_schedulable():
            self._update_from_registry(info.device_id)
        self.start_turn(clock())

    def refresh(self) -> LiveFleetView:
        """Applies the device changes since the last call, and returns itself."""
        with self._lock:
            stale, self._stale_ids = self._stale_ids, set()
        for device_id in stale:
            self._update_from_registry(device_id)
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
        info = self._registry.get_schedulable(device_id)
        return info is not None and info.role == Role.TRAINER and self._eligibility.is_eligible(info)

    def admit(self, device_id: str) -> None:
        """Marks an admitted device for the next `refresh`."""
        with self._lock:
            self._stale_ids.add(device_id)

    def assign(self, instruction: TrainInstruction | EvaluateInstruction) -> None:
        if isinstance(instruction, TrainInstruction):
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

    def _on_registry_event(self, event: RegistryEvent) -> None:
        if isinstance(event, PresenceChanged | DeviceAdded | DeviceChanged | DeviceRemoved):
            with self._lock:
                self._stale_ids.add(event.device_id)

    def _update_from_registry(self, device_id: str) -> None:
        info = self._registry.get_schedulable(device_id)
        may_work = info is not None and (info.role == Role.EVALUATOR or self._is_admitted(device_id))
        listed_info = info if info is not None and may_work and self._eligibility.is_eligible(info) else None
        if listed_info != self._devices.get(device_id):
            self._changes[device_id] = listed_info
        self.update_device(device_id, listed_info)


class IdleRunReporter:
    """Reports a run without work once per wait. Not thread-safe: used by the run's thread alone.

    Args:
        run: the run.
        clock: seconds, monotonic.
        record_event: (kind, message) -> None; writes an event of the run to the history.
    """

    def __init__(self, run: RunSpec, clock: Callable[[], float], record_event: Callable[[str, str], None]) -> None:
        self._run, self._clock, self._record_event = run, clock, record_event
        self._since_s: float | None = None
        self._is_reported = False

    def poll(self, idle_devices: Sequence[str], *, has_work: bool) -> bool:
        """Reports once that no device has had work for `REPORT_AFTER_S`; returns whether it just did.

        `idle_devices` are those that could work.
        """
        now_s = self._clock()
        if has_work:
            self._since_s, self._is_reported = None, False
            return False
        self._since_s = now_s if self._since_s is None else self._since_s
        if self._is_reported or now_s - self._since_s < REPORT_AFTER_S:
            return False
        self._is_reported = True
        message = self._format_message(idle_devices)
        log.warning("run %s %s", self._run.run_id, message)
        self._record_event(RUN_WAITING, message)
        return True

    def next_poll_s(self) -> float | None:
        """Returns when to poll next; None if there is nothing to report."""
        return None if self._since_s is None or self._is_reported else self._since_s + REPORT_AFTER_S

    def _format_message(self, idle_devices: Sequence[str]) -> str:
        if not idle_devices:
            return f"waits: no device with a shard for {self._run.task} is ready; see edgefl devices list"
        names = ", ".join(idle_devices[:MAX_NAMES]) + (", …" if len(idle_devices) > MAX_NAMES else "")
        return (
            f"waits for more devices: {len(idle_devices)} ready ({names}), and the strategy gives them no work yet; "
            "see [devices] in the run file, and names in its graph"
        )

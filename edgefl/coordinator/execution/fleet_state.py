"""Mutable fleet state of a run, in memory.

The live view fills it from registry events, a resumed run from its journal; both give the same view.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping, Sequence

from edgefl.coordinator.fleet.registry import update_moving_average
from edgefl.core.types import (
    DeviceInfo,
    DeviceThroughput,
    HealthMetrics,
    Progress,
    Role,
    TrainInstruction,
    UpdateMetrics,
)


class FleetState:
    """Implements `FleetView`. `busy` holds training only: evaluations never make a device busy.

    Speeds are those of this run: those of another model or batch are not comparable.
    """

    def __init__(self, health: Mapping[str, HealthMetrics] | None = None) -> None:
        self._now_s = 0.0
        self._devices: dict[str, DeviceInfo] = {}
        self._idle: list[str] = []
        self._busy: dict[str, list[str]] = {}
        self._speeds: dict[str, DeviceThroughput] = {}
        self._progress: dict[str, Progress] = {}
        self._health: Mapping[str, HealthMetrics] = {} if health is None else health

    @property
    def now_s(self) -> float:
        return self._now_s

    @property
    def devices(self) -> Mapping[str, DeviceInfo]:
        return self._devices

    @property
    def idle(self) -> Sequence[str]:
        return self._idle

    @property
    def busy(self) -> Mapping[str, Sequence[str]]:
        return self._busy

    @property
    def speeds(self) -> Mapping[str, DeviceThroughput]:
        return self._speeds

    @property
    def progress(self) -> Mapping[str, Progress]:
        return self._progress

    @property
    def health(self) -> Mapping[str, HealthMetrics]:
        return self._health

    def start_turn(self, now_s: float) -> None:
        """Starts a turn, with its time."""
        self._now_s = now_s

    def update_device(self, device_id: str, info: DeviceInfo | None) -> None:
        """Updates a device; None removes one that may not work any more."""
        if info is not None:
            self._devices[device_id] = info
        else:
            self._devices.pop(device_id, None)
        self._update_idle(device_id)

    def assign(self, instruction: TrainInstruction) -> None:
        """Marks a device as busy with an instruction."""
        self._busy.setdefault(instruction.device_id, []).append(instruction.assignment_id)
        self._update_idle(instruction.device_id)

    def complete(self, instruction: TrainInstruction) -> None:
        """Removes an instruction that was answered or given up."""
        outstanding = self._busy[instruction.device_id]
        outstanding.remove(instruction.assignment_id)
        if not outstanding:
            del self._busy[instruction.device_id]
        report = self._progress.get(instruction.device_id)
        if report is not None and report.assignment_id == instruction.assignment_id:
            del self._progress[instruction.device_id]
        self._update_idle(instruction.device_id)

    def record_progress(self, progress: Progress) -> None:
        self._progress[progress.device_id] = progress

    def record_speed(self, device_id: str, metrics: UpdateMetrics) -> None:
        """Updates the moving average of a device's speed from an update."""
        if metrics.iterations:
            previous_s = self._speeds.get(device_id, DeviceThroughput()).seconds_per_iteration
            average_s = update_moving_average(previous_s, metrics.compute_s / metrics.iterations)
            self._speeds[device_id] = DeviceThroughput(seconds_per_iteration=average_s)

    def restore_measurements(self, speeds: Mapping[str, DeviceThroughput], progress: Mapping[str, Progress]) -> None:
        """Restores earlier measurements."""
        self._speeds, self._progress = dict(speeds), dict(progress)

    def restore_from(self, other: FleetState) -> None:
        """Copies work, speeds and progress from another state; the devices stay its own."""
        self._busy = {device_id: list(names) for device_id, names in other.busy.items()}
        self._speeds, self._progress = dict(other.speeds), dict(other.progress)
        for device_id in [*self._devices]:
            self._update_idle(device_id)

    def _update_idle(self, device_id: str) -> None:
        """Adds a device to the idle list or removes it, by its present state."""
        info = self._devices.get(device_id)
        is_idle = info is not None and info.role == Role.TRAINER and device_id not in self._busy
        index = bisect_left(self._idle, device_id)
        is_listed = index < len(self._idle) and self._idle[index] == device_id
        if is_listed and not is_idle:
            del self._idle[index]
        elif is_idle and not is_listed:
            insort(self._idle, device_id)


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

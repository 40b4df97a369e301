"""The strategies' view of the simulated fleet: live, nothing is copied, and every read costs O(1)."""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import overload

from edgefl.core.types import DeviceInfo, DeviceThroughput, HealthMetrics, Progress
from edgefl.simulation.device import SimulatedDevice
from edgefl.simulation.event_queue import SimulationEventQueue


class IdleDevices(Sequence[str]):
    """Devices without work, always in the fleet's order."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._indices: list[int] = []

    def add(self, index: int) -> None:
        at = bisect.bisect_left(self._indices, index)
        if at == len(self._indices) or self._indices[at] != index:
            self._indices.insert(at, index)

    def remove(self, index: int) -> None:
        at = bisect.bisect_left(self._indices, index)
        if at < len(self._indices) and self._indices[at] == index:
            del self._indices[at]

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[str]: ...
    def __getitem__(self, index: int | slice) -> str | Sequence[str]:
        if isinstance(index, slice):
            return [self._names[position] for position in self._indices[index]]
        return self._names[self._indices[index]]

    def __len__(self) -> int:
        return len(self._indices)

    def __iter__(self) -> Iterator[str]:
        # A copy: a device dispatched to during an iteration would make it skip others.
        return (self._names[position] for position in list(self._indices))


class PresentDevices(Mapping[str, DeviceInfo]):
    """Present devices, always in the fleet's order."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self.present: dict[str, DeviceInfo] = {}

    def __getitem__(self, device_id: str) -> DeviceInfo:
        return self.present[device_id]

    def __contains__(self, device_id: object) -> bool:
        return device_id in self.present

    def __len__(self) -> int:
        return len(self.present)

    def __iter__(self) -> Iterator[str]:
        return iter([name for name in self._names if name in self.present])


class _SpeedView(Mapping[str, DeviceThroughput]):
    """Measured speeds of the devices that have returned an update."""

    def __init__(self, devices: Mapping[str, SimulatedDevice]) -> None:
        self._devices = devices

    def __getitem__(self, device_id: str) -> DeviceThroughput:
        speed = self._devices[device_id].speed
        if speed.seconds_per_iteration is None:
            raise KeyError(device_id)
        return speed

    def __iter__(self) -> Iterator[str]:
        return (name for name, board in self._devices.items() if board.speed.seconds_per_iteration is not None)

    def __len__(self) -> int:
        return sum(1 for _ in self)


class _HealthView(Mapping[str, HealthMetrics]):
    """Health metrics of the devices whose profiles define them."""

    def __init__(self, devices: Mapping[str, SimulatedDevice], event_queue: SimulationEventQueue) -> None:
        self._devices, self._event_queue = devices, event_queue

    def __getitem__(self, device_id: str) -> HealthMetrics:
        vitals = self._devices[device_id].compute_health(self._event_queue.now_s)
        if vitals is None:
            raise KeyError(device_id)
        return vitals

    def __iter__(self) -> Iterator[str]:
        return (
            name for name, board in self._devices.items() if board.compute_health(self._event_queue.now_s) is not None
        )

    def __len__(self) -> int:
        return sum(1 for _ in self)


class SimulatedFleetView:
    """Implements `FleetView`. The fleet changes it; all others only read."""

    def __init__(
        self, event_queue: SimulationEventQueue, devices: Sequence[SimulatedDevice], evaluators: Sequence[DeviceInfo]
    ) -> None:
        self._event_queue = event_queue
        self.simulated_devices = {board.device_id: board for board in devices}
        names = [*self.simulated_devices, *(info.device_id for info in evaluators)]
        self.progress_reports: dict[str, Progress] = {}
        self._devices, self._idle = PresentDevices(names), IdleDevices(names)
        self._devices.present |= {info.device_id: info for info in evaluators}
        self._in_flight: dict[str, list[str]] = {}
        self._busy, self._progress = MappingProxyType(self._in_flight), MappingProxyType(self.progress_reports)
        self._speeds, self._health = (
            _SpeedView(self.simulated_devices),
            _HealthView(self.simulated_devices, event_queue),
        )
        self._members: frozenset[str] | None = None

    @property
    def now_s(self) -> float:
        return self._event_queue.now_s

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

    def freeze_membership(self) -> None:
        """Rejects from now on every device that is not and was not a member."""
        if self._members is None:
            self._members = frozenset(self._devices.present)

    def add_device(self, device: SimulatedDevice) -> bool:
        """Adds a device; False if it is present already or rejected."""
        name = device.device_id
        if name in self._devices.present or (self._members is not None and name not in self._members):
            return False
        self._devices.present[name] = device.info
        self._idle.add(device.index)
        return True

    def remove_device(self, device: SimulatedDevice) -> None:
        self._devices.present.pop(device.device_id, None)
        self._idle.remove(device.index)

    def mark_busy(self, device: SimulatedDevice, assignment_id: str) -> None:
        self._idle.remove(device.index)
        device.in_flight_ids.append(assignment_id)
        self._in_flight[device.device_id] = device.in_flight_ids

    def mark_idle(self, device: SimulatedDevice, assignment_id: str) -> None:
        device.in_flight_ids.remove(assignment_id)
        if not device.in_flight_ids:
            del self._in_flight[device.device_id]
            if device.is_present:
                self._idle.add(device.index)

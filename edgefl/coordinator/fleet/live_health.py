"""Live health of devices, from their heartbeats, read one device at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

from edgefl.core.protocol import Heartbeat
from edgefl.core.types import HealthMetrics


class HeartbeatSource(Protocol):
    """Source of the last heartbeats (the registry)."""

    def get_heartbeat(self, device_id: str) -> Heartbeat | None: ...
    def list_heartbeats(self) -> Mapping[str, Heartbeat]: ...


class LiveHealth(Mapping[str, HealthMetrics]):
    """Current health of the devices that sent a heartbeat."""

    def __init__(self, heartbeats: HeartbeatSource) -> None:
        self._heartbeats = heartbeats

    def __getitem__(self, device_id: str) -> HealthMetrics:
        heartbeat = self._heartbeats.get_heartbeat(device_id)
        if heartbeat is None:
            raise KeyError(device_id)
        throttled = heartbeat.throttled
        return HealthMetrics(
            temperature_c=heartbeat.temperature_c,
            is_throttled=None if throttled is None else throttled != "ok",
            battery_fraction=heartbeat.battery_fraction,
            power_w=heartbeat.power_w,
        )

    def __iter__(self) -> Iterator[str]:
        return iter(self._heartbeats.list_heartbeats())

    def __len__(self) -> int:
        return len(self._heartbeats.list_heartbeats())

"""How boards are, by their heartbeats: one look-up is one look at one device, however many there are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

from edgefl.protocol import Heartbeat
from edgefl.types import Vitals


class Heartbeats(Protocol):
    """Where the last heartbeats are (the roster)."""

    def heartbeat(self, device_id: str) -> Heartbeat | None: ...
    def heartbeats(self) -> Mapping[str, Heartbeat]: ...


class LiveVitals(Mapping[str, Vitals]):
    """Knows the devices that sent a heartbeat; always as it is now."""

    def __init__(self, heartbeats: Heartbeats) -> None:
        self._heartbeats = heartbeats

    def __getitem__(self, device_id: str) -> Vitals:
        heartbeat = self._heartbeats.heartbeat(device_id)
        if heartbeat is None:
            raise KeyError(device_id)
        throttled = heartbeat.throttled
        return Vitals(
            temperature_c=heartbeat.temperature_c,
            is_throttled=None if throttled is None else throttled != "ok",
            battery_fraction=heartbeat.battery_fraction,
            power_w=heartbeat.power_w,
        )

    def __iter__(self) -> Iterator[str]:
        return iter(self._heartbeats.heartbeats())

    def __len__(self) -> int:
        return len(self._heartbeats.heartbeats())

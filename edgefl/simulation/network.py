"""Simulated network: the link of each device, the coordinator's link, and latency."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from edgefl.simulation.device import SimulatedDevice
from edgefl.simulation.event_queue import SimulationEventQueue
from edgefl.simulation.shared_link import SharedLink

Transfer = tuple[Callable[[Any], None], Any, float, float]
"""Callback, its subject, earliest end in seconds, and the latency after the last byte."""


class SimulatedNetwork:
    """Carries models down and updates up; a device's transfers in one direction are sequential.

    Args:
        event_queue: virtual time.
        up_bytes_per_s: inbound rate of the coordinator's link, shared by all devices; None for no limit.
        down_bytes_per_s: its outbound rate.
    """

    def __init__(
        self, event_queue: SimulationEventQueue, *, up_bytes_per_s: float | None, down_bytes_per_s: float | None
    ) -> None:
        self._event_queue = event_queue
        self._uplink = None if up_bytes_per_s is None else SharedLink[Transfer](up_bytes_per_s)
        self._downlink = None if down_bytes_per_s is None else SharedLink[Transfer](down_bytes_per_s)

    def send_down(
        self, device: SimulatedDevice, num_bytes: int, callback: Callable[[Any], None], argument: Any
    ) -> None:
        """Calls `callback` with the subject when the device has received all bytes."""
        device.downlink_free_s = self._compute_link_end_s(
            device, device.downlink_free_s, num_bytes, device.profile.down_bytes_per_s
        )
        self._start_transfer(
            self._downlink,
            num_bytes,
            (callback, argument, device.downlink_free_s, device.compute_latency_s(self._event_queue.now_s)),
        )

    def send_up(
        self, device: SimulatedDevice, num_bytes: int, callback: Callable[[Any], None], argument: Any
    ) -> None:
        """Calls `callback` with the subject when the coordinator has received all bytes."""
        device.uplink_free_s = self._compute_link_end_s(
            device, device.uplink_free_s, num_bytes, device.profile.up_bytes_per_s
        )
        self._start_transfer(
            self._uplink,
            num_bytes,
            (callback, argument, device.uplink_free_s, device.compute_latency_s(self._event_queue.now_s)),
        )

    def _compute_link_end_s(
        self, device: SimulatedDevice, free_s: float, num_bytes: int, bytes_per_s: float
    ) -> float:
        return device.compute_transfer_end_s(max(self._event_queue.now_s, free_s), num_bytes / bytes_per_s)

    def _start_transfer(self, link: SharedLink[Transfer] | None, num_bytes: int, transfer: Transfer) -> None:
        if link is None:
            callback, subject, end_s, latency_s = transfer
            self._event_queue.schedule(end_s + latency_s, callback, subject)
            return
        link.start(self._event_queue.now_s, num_bytes, transfer)
        self._schedule_next_end(link)

    def _schedule_next_end(self, link: SharedLink[Transfer]) -> None:
        end_s = link.compute_next_end_s()
        if end_s is not None:
            self._event_queue.schedule(max(end_s, self._event_queue.now_s), self._on_transfer_end, (link, end_s))

    def _on_transfer_end(self, argument: tuple[SharedLink[Transfer], float]) -> None:
        link, expected_s = argument
        if link.compute_next_end_s() != expected_s:
            return  # stale event: a transfer began or ended meanwhile
        now_s = self._event_queue.now_s
        for callback, subject, own_end_s, latency_s in link.complete_next(now_s):
            self._event_queue.schedule(max(now_s, own_end_s) + latency_s, callback, subject)
        self._schedule_next_end(link)

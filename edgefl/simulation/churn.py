"""Departures and returns of devices: from profiles and fault scripts, and failures at random."""

from __future__ import annotations

import math
from collections.abc import Callable

from numpy.random import Generator

from edgefl.core.types import derive_rng
from edgefl.simulation.device import SimulatedDevice
from edgefl.simulation.event_queue import SimulationEventQueue


class ChurnSimulator:
    """Takes devices down and brings them back.

    Args:
        event_queue: virtual time.
        failure_detection_s: time until the coordinator detects a lost device.
        on_failure: called when a device fails.
        on_failure_detected: called when the coordinator detects it, unless the device is back by then.
        on_recovery: called when it is running again.
    """

    def __init__(
        self,
        event_queue: SimulationEventQueue,
        *,
        failure_detection_s: float,
        on_failure: Callable[[SimulatedDevice], None],
        on_failure_detected: Callable[[SimulatedDevice], None],
        on_recovery: Callable[[SimulatedDevice], None],
    ) -> None:
        self._event_queue, self._failure_detection_s = event_queue, failure_detection_s
        self._on_failure, self._on_failure_detected, self._on_recovery = on_failure, on_failure_detected, on_recovery
        self._rngs: dict[str, Generator] = {}

    def register(self, device: SimulatedDevice) -> None:
        """Schedules a device's first absence; one that is away from the start is marked as such."""
        start_s, end_s = self._compute_next_absence(device)
        if start_s > 0:
            self._schedule_failure(device, start_s, end_s)
            return
        device.is_up = device.is_present = False
        if math.isfinite(end_s):
            self._event_queue.schedule(end_s, self._recover, device)

    def _schedule_failure(self, device: SimulatedDevice, start_s: float, end_s: float) -> None:
        if math.isfinite(start_s):
            self._event_queue.schedule(start_s, self._fail, (device, end_s))

    def _fail(self, argument: tuple[SimulatedDevice, float]) -> None:
        board, end_s = argument
        board.is_up = False
        board.boot_count += 1
        self._on_failure(board)
        self._event_queue.schedule(
            self._event_queue.now_s + self._failure_detection_s, self._detect_failure, (board, board.boot_count)
        )
        if math.isfinite(end_s):
            self._event_queue.schedule(end_s, self._recover, board)

    def _detect_failure(self, argument: tuple[SimulatedDevice, int]) -> None:
        board, boot_count = argument
        if board.boot_count == boot_count and not board.is_up and board.is_present:
            board.is_present = False
            self._on_failure_detected(board)

    def _recover(self, device: SimulatedDevice) -> None:
        device.is_up = device.is_present = True
        self._on_recovery(device)
        self._schedule_failure(device, *self._compute_next_absence(device))

    def _compute_next_absence(self, device: SimulatedDevice) -> tuple[float, float]:
        now_s = self._event_queue.now_s
        scheduled = next((absence for absence in device.profile.offline if absence[1] > now_s), (math.inf, math.inf))
        return min((max(scheduled[0], now_s), scheduled[1]), self._draw_absence(device))

    def _draw_absence(self, device: SimulatedDevice) -> tuple[float, float]:
        profile = device.profile
        if profile.mtbf_s is None or profile.mttr_s is None:
            return math.inf, math.inf
        # A separate stream: the same devices fail at the same times whatever their instructions.
        if device.device_id not in self._rngs:
            self._rngs[device.device_id] = derive_rng(device.seed, "absence", device.device_id)
        rng = self._rngs[device.device_id]
        start_s = self._event_queue.now_s + float(rng.exponential(profile.mtbf_s))
        return start_s, start_s + float(rng.exponential(profile.mttr_s))

"""Thermal pacing: pauses training between iterations above a temperature limit.

The firmware protects the chip by itself; this limit is optional, for a closed case or a bedroom. Only training
pauses: heartbeats, evaluations and replies go on. A board without a sensor does not pause.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from edgefl.core.types import Json
from edgefl.device.hardware.board_reader import BoardReader
from edgefl.device.hardware.health import read_temperature_c

log = logging.getLogger(__name__)

HYSTERESIS_C = 5.0
"""Hysteresis below the limit before training resumes, which avoids pausing at every iteration."""
READ_INTERVAL_S = 1.0
POLL_INTERVAL_S = 0.2
"""Interval at which `should_stop` is polled."""
LOG_INTERVAL_S = 60.0
LIMIT_RANGE_C = (30.0, 110.0)


def create_thermal_pacer(get_limit_c: Callable[[], float | None]) -> ThermalPacer:
    """Returns the pacer of this machine."""
    board = BoardReader()
    return ThermalPacer(get_limit_c, lambda: read_temperature_c(board))


class ThermalPacer:
    """Thermal pacer, reset for each assignment.

    Args:
        get_limit_c: degrees Celsius, read at the start of every assignment; None for no limit.
        get_temperature_c: reads the board; None where it has no sensor.
        clock: monotonic seconds.
        sleep: sleeps for so many seconds.
    """

    def __init__(
        self,
        get_limit_c: Callable[[], float | None],
        get_temperature_c: Callable[[], float | None],
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._get_limit_c, self._get_temperature_c, self._clock, self._sleep = (
            get_limit_c,
            get_temperature_c,
            clock,
            sleep,
        )
        self.start()

    def start(self) -> None:
        """Resets the paced time and reads the limit."""
        self._limit_c = self._get_limit_c()
        self._checked_s: float | None = None
        self._paced_s: float | None = None

    def get_metrics(self) -> Json:
        """Returns `paced_s`, the seconds paused since `start`; empty without a limit or a sensor."""
        return {} if self._paced_s is None else {"paced_s": self._paced_s}

    def wait_until_cool(self, should_stop: Callable[[], bool]) -> None:
        """Returns once the board is cool enough, or `should_stop` returns True."""
        if self._limit_c is None:
            return
        started_s = self._clock()
        if self._checked_s is not None and started_s - self._checked_s < READ_INTERVAL_S:
            return
        self._checked_s, temperature_c = started_s, self._get_temperature_c()
        if temperature_c is None:
            return
        former_paced_s = self._paced_s or 0.0
        self._paced_s = former_paced_s
        if temperature_c > self._limit_c:
            self._wait_for_cooling(self._limit_c, temperature_c, should_stop)
            self._checked_s = self._clock()
            self._paced_s = former_paced_s + self._checked_s - started_s

    def _wait_for_cooling(self, limit_c: float, temperature_c: float, should_stop: Callable[[], bool]) -> None:
        checked_s = logged_s = self._clock()
        log.info("rests: it is at %.0f °C, and its limit is %.0f °C", temperature_c, limit_c)
        while not should_stop():
            self._sleep(POLL_INTERVAL_S)
            now_s = self._clock()
            if now_s - checked_s < READ_INTERVAL_S:
                continue
            checked_s, current_c = now_s, self._get_temperature_c()
            if current_c is None or current_c <= limit_c - HYSTERESIS_C:
                return
            if now_s - logged_s >= LOG_INTERVAL_S:
                logged_s = now_s
                log.warning("still rests: %.0f °C, and its limit is %.0f °C", current_c, limit_c)

"""A board that rests between iterations while it is hotter than its owner wants it to be.

The firmware protects the chip by itself; this limit is a wish, for a closed case or a room that is slept in. Only
training rests: heartbeats, evaluations and answers go on. A board without a sensor does not rest.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from edgefl.device.board.board import Board
from edgefl.device.board.vitals import temperature_c
from edgefl.types import Json

log = logging.getLogger(__name__)

HYSTERESIS_C = 5.0
"""Having been too hot, it trains on when it is so much cooler than its limit: not off and on with every iteration."""
LOOK_EVERY_S = 1.0
NAP_S = 0.2
"""A recall, a stop or the end of the time are noticed after so long."""
TELL_EVERY_S = 60.0
LIMIT_RANGE_C = (30.0, 110.0)


def board_pacer(limit_c: Callable[[], float | None]) -> Pacer:
    """Returns what paces this machine."""
    board = Board()
    return Pacer(limit_c, lambda: temperature_c(board))


class Pacer:
    """Rests for one assignment after the other.

    Args:
        limit_c: degrees Celsius, asked at the begin of every assignment; None for no limit.
        temperature_c: reads the board; None where it has no sensor.
        clock: monotonic seconds.
        nap: sleeps for so many seconds.
    """

    def __init__(
        self,
        limit_c: Callable[[], float | None],
        temperature_c: Callable[[], float | None],
        *,
        clock: Callable[[], float] = time.monotonic,
        nap: Callable[[float], None] = time.sleep,
    ) -> None:
        self._read_limit_c, self._read_c, self._clock, self._nap = limit_c, temperature_c, clock, nap
        self.begin()

    def begin(self) -> None:
        """Begins a new account."""
        self._limit_c = self._read_limit_c()
        self._looked_s: float | None = None
        self._paced_s: float | None = None

    def told(self) -> Json:
        """Returns `paced_s`, how long it rested since `begin`; nothing without a limit or a sensor."""
        return {} if self._paced_s is None else {"paced_s": self._paced_s}

    def rest(self, is_over: Callable[[], bool]) -> None:
        """Returns at once on a board that is cool enough, else when it has cooled down, or `is_over` says so."""
        if self._limit_c is None:
            return
        begun_s = self._clock()
        if self._looked_s is not None and begun_s - self._looked_s < LOOK_EVERY_S:
            return
        self._looked_s, heat = begun_s, self._read_c()
        if heat is None:
            return
        before_s = self._paced_s or 0.0
        self._paced_s = before_s
        if heat > self._limit_c:
            self._cool_down(self._limit_c, heat, is_over)
            self._looked_s = self._clock()
            self._paced_s = before_s + self._looked_s - begun_s

    def _cool_down(self, limit_c: float, heat: float, is_over: Callable[[], bool]) -> None:
        looked_s = told_s = self._clock()
        log.info("rests: it is at %.0f °C, and its limit is %.0f °C", heat, limit_c)
        while not is_over():
            self._nap(NAP_S)
            now_s = self._clock()
            if now_s - looked_s < LOOK_EVERY_S:
                continue
            looked_s, found = now_s, self._read_c()
            if found is None or found <= limit_c - HYSTERESIS_C:
                return
            if now_s - told_s >= TELL_EVERY_S:
                told_s = now_s
                log.warning("still rests: %.0f °C, and its limit is %.0f °C", found, limit_c)

"""Warnings that would come again and again, said once a minute at most."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

LOG_EVERY_S = 60.0


class Complaints:
    """Used by any thread: two that complain at once may both be heard."""

    def __init__(self, log: logging.Logger, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._log, self._clock = log, clock
        self._last_s: dict[str, float] = {}

    def add(self, key: str, text: str, *values: object) -> None:
        """Logs a warning, unless one with this key was logged in the last minute."""
        now_s = self._clock()
        last_s = self._last_s.get(key)
        if last_s is None or now_s - last_s >= LOG_EVERY_S:
            self._last_s[key] = now_s
            self._log.warning(text, *values)

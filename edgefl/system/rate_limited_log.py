"""Rate-limited log warnings: at most one a minute per key."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

LOG_INTERVAL_S = 60.0


class RateLimitedLog:
    """Used by any thread; two simultaneous warnings may both be logged."""

    def __init__(self, log: logging.Logger, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._log, self._clock = log, clock
        self._last_s: dict[str, float] = {}

    def warning(self, key: str, message: str, *values: object) -> None:
        """Logs a warning, unless one with this key was logged in the last minute."""
        now_s = self._clock()
        last_s = self._last_s.get(key)
        if last_s is None or now_s - last_s >= LOG_INTERVAL_S:
            self._last_s[key] = now_s
            self._log.warning(message, *values)

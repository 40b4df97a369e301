"""Retries: pauses between attempts, and warnings that are logged at most once a minute."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from numpy.random import Generator

LOG_INTERVAL_S = 60.0


@dataclass(slots=True, kw_only=True)
class Backoff:
    """Pauses between attempts, each twice as long as the one before, up to `max_s`.

    With `rng` a pause lasts between half of that and all of it: a whole fleet fails at once, and must not come back
    at once. Until the pauses add up to `eager_s` none is longer than `eager_max_s`.
    """

    initial_s: float
    max_s: float
    rng: Generator | None = None
    eager_s: float = 0.0
    eager_max_s: float = 0.0
    _pause_s: float = field(init=False)
    _waited_s: float = field(init=False)

    def __post_init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Begins again with the shortest pause, after a success."""
        self._pause_s, self._waited_s = self.initial_s, 0.0

    def next_s(self) -> float:
        """Returns the pause before the next attempt."""
        max_s = self.max_s if self._waited_s >= self.eager_s else min(self.eager_max_s, self.max_s)
        pause_s = min(self._pause_s, max_s)
        self._pause_s, self._waited_s = min(2 * pause_s, self.max_s), self._waited_s + pause_s
        return pause_s if self.rng is None else pause_s * self.rng.uniform(0.5, 1.0)


class RateLimitedLog:
    """Warnings of any thread, at most one a minute for each key; keys have to come from a small set."""

    def __init__(self, log: logging.Logger, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._log, self._clock, self._lock = log, clock, threading.Lock()
        self._last_s: dict[str, float] = {}

    def warning(self, key: str, message: str, *values: object) -> None:
        """Logs a warning, unless one with this key was logged in the last minute."""
        if self.is_due(key):
            self._log.warning(message, *values)

    def is_due(self, key: str) -> bool:
        """Returns whether a warning with this key may be logged; it counts as logged then."""
        now_s = self._clock()
        with self._lock:
            last_s = self._last_s.get(key)
            if last_s is not None and now_s - last_s < LOG_INTERVAL_S:
                return False
            self._last_s[key] = now_s
            return True

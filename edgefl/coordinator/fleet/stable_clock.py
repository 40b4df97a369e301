"""Wall clock that is trusted only without recent jumps, for deletions that cannot be undone."""

from __future__ import annotations

from collections.abc import Callable

MAX_JUMP_S = 86_400.0
SETTLING_TIME_S = 3600.0
"""A clock is trusted this long after its last jump, or after a start that does not follow the stored times."""


class StableClock:
    """Unix time that ignores recent jumps. Not thread-safe.

    A machine without a clock chip may start in any year, and be set right later.

    Args:
        clock: Unix seconds.
        monotonic: seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float], monotonic: Callable[[], float]) -> None:
        self._clock, self._monotonic = clock, monotonic
        self._offset_s: float | None = None
        self._trusted_from_s = 0.0

    @property
    def is_started(self) -> bool:
        return self._offset_s is not None

    def start(self, newest_at: float | None) -> None:
        """Starts it; `newest_at` is the newest time stored before this start."""
        now, now_s = self._clock(), self._monotonic()
        is_continuous = newest_at is not None and abs(now - newest_at) <= MAX_JUMP_S
        self._offset_s, self._trusted_from_s = now - now_s, now_s if is_continuous else now_s + SETTLING_TIME_S

    def now(self) -> float | None:
        """Returns Unix seconds; None while the clock is not trusted. Call it regularly, to notice jumps."""
        now, now_s = self._clock(), self._monotonic()
        if self._offset_s is None or abs(now - now_s - self._offset_s) > MAX_JUMP_S:
            self._offset_s, self._trusted_from_s = now - now_s, now_s + SETTLING_TIME_S
        return now if now_s >= self._trusted_from_s else None

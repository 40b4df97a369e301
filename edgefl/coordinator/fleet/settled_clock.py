"""Unix time that nobody has just set: what is deleted by a clock that is wrong for a moment does not come back."""

from __future__ import annotations

from collections.abc import Callable

JUMP_S = 86_400.0
SETTLED_S = 3600.0
"""After a jump, and after a start that does not follow what is stored, a clock is believed when so long nothing more
has happened to it."""


class SettledClock:
    """A board without a clock chip may begin in any year, and be set right later. Used by one thread.

    Args:
        clock: Unix seconds.
        monotonic: seconds that nobody sets.
    """

    def __init__(self, clock: Callable[[], float], monotonic: Callable[[], float]) -> None:
        self._clock, self._monotonic = clock, monotonic
        self._ahead_s: float | None = None
        self._believed_from_s = 0.0

    @property
    def has_begun(self) -> bool:
        return self._ahead_s is not None

    def begin(self, newest_at: float | None) -> None:
        """Looks at it the first time; `newest_at` is when something was last stored, before this start."""
        now, now_s = self._clock(), self._monotonic()
        follows = newest_at is not None and abs(now - newest_at) <= JUMP_S
        self._ahead_s, self._believed_from_s = now - now_s, now_s if follows else now_s + SETTLED_S

    def now(self) -> float | None:
        """Returns Unix seconds, None while the clock is not to be believed; to be asked again and again."""
        now, now_s = self._clock(), self._monotonic()
        if self._ahead_s is None or abs(now - now_s - self._ahead_s) > JUMP_S:
            self._ahead_s, self._believed_from_s = now - now_s, now_s + SETTLED_S
        return now if now_s >= self._believed_from_s else None

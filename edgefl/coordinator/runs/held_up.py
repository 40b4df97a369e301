"""Tells which method of a strategy keeps its run from the next turn."""

from __future__ import annotations

import sys
import traceback
from threading import Thread

RUN_HELD_UP = "run-held-up"
TELL_AFTER_S = 60.0
"""A stop that a strategy's method has kept from its turn for so long is told as an event."""
LEAVE_AFTER_S = 45.0
"""A coordinator that ends waits so long for its run: half of its unit's TimeoutStopSec, other parts take time too."""


class CallWatch:
    """Notices when the same call of a strategy's method lasts; for strategies of users, ours return."""

    __slots__ = ("_number", "_since_s")

    def __init__(self) -> None:
        self._number, self._since_s = -1, 0.0

    def lasts_s(self, strategy: object, now_s: float) -> float:
        """Returns for how long the call has been seen that runs now; 0 where none does."""
        number: int = getattr(strategy, "num_calls", 0)
        if number != self._number or not held_up_by(strategy):
            self._number, self._since_s = number, now_s
        return now_s - self._since_s


def held_up_by(strategy: object) -> str:
    """Returns, in words, which method runs at this moment; empty where none does, or the strategy is one of ours."""
    method = getattr(strategy, "calling", "")
    return f"{method} of strategy {getattr(strategy, 'name', '')} has not returned" if method else ""


def place_of(thread: Thread) -> str:
    """Returns file, line and function in which a thread is; empty when it has just ended."""
    frame = sys._current_frames().get(thread.ident or 0)  # noqa: SLF001 the only way to look at another thread
    if frame is None:
        return ""
    innermost = traceback.extract_stack(frame)[-1]
    return f"{innermost.filename}, line {innermost.lineno}, in {innermost.name}"

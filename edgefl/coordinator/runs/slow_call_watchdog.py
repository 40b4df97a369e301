"""Watchdog of slow strategy calls."""

from __future__ import annotations

import sys
import traceback
from threading import Thread

RUN_STALLED = "run-held-up"
REPORT_AFTER_S = 60.0
"""A strategy call that delays a stop for longer is reported as an event."""
STOP_TIMEOUT_S = 45.0
"""How long a stopping coordinator waits for its run: half of its unit's TimeoutStopSec."""


class SlowCallWatchdog:
    """Measures how long one call of a user strategy's method has been running."""

    __slots__ = ("_number", "_since_s")

    def __init__(self) -> None:
        self._number, self._since_s = -1, 0.0

    def compute_call_s(self, strategy: object, now_s: float) -> float:
        """Returns the seconds since the running call was first seen; 0 if none runs."""
        number: int = getattr(strategy, "num_calls", 0)
        if number != self._number or not format_running_call(strategy):
            self._number, self._since_s = number, now_s
        return now_s - self._since_s


def format_running_call(strategy: object) -> str:
    """Returns a description of the running method; empty if none runs, or the strategy is built in."""
    method = getattr(strategy, "calling", "")
    return f"{method} of strategy {getattr(strategy, 'name', '')} has not returned" if method else ""


def format_current_frame(thread: Thread) -> str:
    """Returns file, line and function that a thread is in; empty if it has just ended."""
    frame = sys._current_frames().get(thread.ident or 0)  # noqa: SLF001 the only way to look at another thread
    if frame is None:
        return ""
    innermost = traceback.extract_stack(frame)[-1]
    return f"{innermost.filename}, line {innermost.lineno}, in {innermost.name}"

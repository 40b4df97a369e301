"""The bell: counts its rings, so that a device asks once for each piece of work and never in vain."""

from __future__ import annotations

import contextlib
import queue


class Bell:
    """Rung by any thread, heard by one. One ring stands for one instruction; a lost one costs a poll interval."""

    def __init__(self) -> None:
        self._rings: queue.SimpleQueue[None] = queue.SimpleQueue()

    def ring(self) -> None:
        self._rings.put(None)

    def wait(self, timeout_s: float) -> None:
        """Returns after one ring that nobody has heard yet, or after the timeout."""
        with contextlib.suppress(queue.Empty):
            self._rings.get(timeout=timeout_s)

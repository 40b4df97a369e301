"""The bell: counts its rings, so that a device asks once for each piece of work and never in vain."""

from __future__ import annotations

import contextlib
import queue
import threading


class Bell:
    """Rung by any thread, heard by one. One ring stands for one instruction; a lost one costs a poll interval."""

    def __init__(self) -> None:
        self._rings: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._is_doubted = threading.Event()

    def ring(self) -> None:
        self._rings.put(None)

    def doubt(self) -> None:
        """Says that rings may have been lost: after the next one it is asked until there is nothing more."""
        self._is_doubted.set()

    def take_doubt(self) -> bool:
        """Returns whether rings may have been lost, once for each time that it was said."""
        was_doubted = self._is_doubted.is_set()
        self._is_doubted.clear()
        return was_doubted

    def wait(self, timeout_s: float) -> None:
        """Returns after one ring that nobody has heard yet, or after the timeout."""
        with contextlib.suppress(queue.Empty):
            self._rings.get(timeout=timeout_s)

"""Wake-up signal: a counter of notifications, so that a device polls once per instruction."""

from __future__ import annotations

import contextlib
import queue
import threading


class WakeUpSignal:
    """Counting signal with one waiter; each wake-up is one instruction, a lost one costs a poll interval."""

    def __init__(self) -> None:
        self._notifications: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._is_loss_possible = threading.Event()

    def notify(self) -> None:
        self._notifications.put(None)

    def record_possible_loss(self) -> None:
        """Records that wake-ups may be lost: after the next one, the device polls until no work is left."""
        self._is_loss_possible.set()

    def pop_possible_loss(self) -> bool:
        """Returns and resets whether wake-ups may have been lost."""
        may_have_lost = self._is_loss_possible.is_set()
        self._is_loss_possible.clear()
        return may_have_lost

    def wait(self, timeout_s: float) -> None:
        """Returns after one unconsumed wake-up, or after the timeout."""
        with contextlib.suppress(queue.Empty):
            self._notifications.get(timeout=timeout_s)

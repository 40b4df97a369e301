"""What waits for the thread of a run: as much at a time as it can have in memory, and no more behind it.

A thousand devices may answer within a second with a model each. The run's thread takes them in portions, and those
who bring more wait, so that the rest stays where it is: on disk, or with the devices.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import Generic, TypeVar

PORTION_BYTES = 16 * 1024 * 1024
"""No more than this is taken at a time, and the item that goes beyond it."""
HELD_BYTES = 32 * 1024 * 1024
"""While more than this waits, whoever brings a body waits, too."""
PATIENCE_S = 2.0
"""For so long, and then brings it all the same: a run that stands still must not hold up the other devices."""

T = TypeVar("T")


class Inbox(Generic[T]):
    """A queue from many threads to one."""

    def __init__(self) -> None:
        self._items: deque[tuple[T, int]] = deque()
        self._num_bytes = 0
        self._is_closed = False
        self._lock = threading.Lock()
        self._arrived, self._left = threading.Condition(self._lock), threading.Condition(self._lock)

    def put(self, item: T, num_bytes: int = 0) -> None:
        """Adds an item; one with a body waits for room, for a while."""
        with self._lock:
            if num_bytes:
                self._left.wait_for(lambda: self._num_bytes <= HELD_BYTES or self._is_closed, PATIENCE_S)
            self._items.append((item, num_bytes))
            self._num_bytes += num_bytes
            self._arrived.notify()

    def take(self, timeout_s: float) -> list[T]:
        """Returns what has come, a portion at most; waits so long for the first item."""
        taken: list[T] = []
        until_s, num_bytes = time.monotonic() + timeout_s, 0
        with self._lock:
            while not self._items and (left_s := until_s - time.monotonic()) > 0:
                self._arrived.wait(left_s)
            while self._items and num_bytes < PORTION_BYTES:
                item, size = self._items.popleft()
                taken.append(item)
                num_bytes += size
            self._num_bytes -= num_bytes
            if num_bytes:
                self._left.notify_all()
        return taken

    def close(self) -> None:
        """Nobody waits for room any more."""
        with self._lock:
            self._is_closed = True
            self._left.notify_all()

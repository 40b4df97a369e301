"""Bounded event queue of a run's thread; bodies beyond its memory limit are spooled.

A thousand devices may answer within a second with a model each. The run's thread takes them in batches, and threads
that put more wait, so that the rest stays where it is: on disk, or with the devices. No thread waits for long, since
a run may pause for minutes: bodies that arrive meanwhile are spooled. The thread of an event loop never waits: it
would block every connection.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

MAX_BATCH_BYTES = 16 * 1024 * 1024
"""A batch ends with the item that exceeds this."""
MAX_MEMORY_BYTES = 32 * 1024 * 1024
"""While more than this is queued in memory, `put` of a body waits."""
PUT_TIMEOUT_S = 2.0
"""How long `put` waits before it spools: a paused run must not hold up the other devices."""

T = TypeVar("T")

LoadItem = Callable[[], T | None]
"""() -> spooled item; None when it cannot be loaded"""


@dataclass(frozen=True, slots=True)
class _QueuedItem(Generic[T]):
    load: LoadItem[T]
    num_bytes: int
    num_memory_bytes: int


class BoundedEventQueue(Generic[T]):
    """Thread-safe queue from many threads to one.

    Args:
        spool: moves an item's body out of memory; returns None where there is no other place for it.
    """

    def __init__(self, spool: Callable[[T], LoadItem[T] | None] = lambda _: None) -> None:
        self._spool = spool
        self._items: deque[_QueuedItem[T]] = deque()
        self._num_memory_bytes = 0
        self._is_closed = False
        self._lock = threading.Lock()
        self._not_empty, self._not_full = threading.Condition(self._lock), threading.Condition(self._lock)

    @property
    def num_memory_bytes(self) -> int:
        """Returns the bytes of bodies queued in memory."""
        return self._num_memory_bytes

    def put(self, item: T, num_bytes: int = 0) -> None:
        """Adds an item; one with a body waits up to `PUT_TIMEOUT_S` for room, never in an event loop."""
        load = self._spool(item) if num_bytes and not self._wait_for_room() else None
        with self._lock:
            queued = _QueuedItem(load or (lambda: item), num_bytes, 0 if load else num_bytes)
            self._items.append(queued)
            self._num_memory_bytes += queued.num_memory_bytes
            self._not_empty.notify()

    def get_batch(self, timeout_s: float) -> list[T]:
        """Returns the queued items, one batch at most; waits up to `timeout_s` for the first."""
        batch: list[_QueuedItem[T]] = []
        until_s, num_bytes = time.monotonic() + timeout_s, 0
        with self._lock:
            while not self._items and (remaining_s := until_s - time.monotonic()) > 0:
                self._not_empty.wait(remaining_s)
            while self._items and num_bytes < MAX_BATCH_BYTES:
                batch.append(self._items.popleft())
                num_bytes += batch[-1].num_bytes
            self._num_memory_bytes -= sum(queued.num_memory_bytes for queued in batch)
            if num_bytes:
                self._not_full.notify_all()
        return [item for queued in batch if (item := queued.load()) is not None]

    def close(self) -> None:
        """Ends all waiting for room."""
        with self._lock:
            self._is_closed = True
            self._not_full.notify_all()

    def _wait_for_room(self) -> bool:
        timeout_s = 0.0 if _is_in_event_loop() else PUT_TIMEOUT_S
        with self._lock:
            return self._not_full.wait_for(
                lambda: self._num_memory_bytes <= MAX_MEMORY_BYTES or self._is_closed, timeout_s
            )


def _is_in_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True

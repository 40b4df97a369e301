"""What waits for the thread of a run: as much at a time as it can have in memory, and no more behind it.

A thousand devices may answer within a second with a model each. The run's thread takes them in portions, and those
who bring more wait, so that the rest stays where it is: on disk, or with the devices. Nobody waits for long, since a
run may stand still for minutes: what comes meanwhile is laid aside. The thread of an event loop does not wait at all:
with it everybody would.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

PORTION_BYTES = 16 * 1024 * 1024
"""No more than this is taken at a time, and the item that goes beyond it."""
HELD_BYTES = 32 * 1024 * 1024
"""While more than this waits in memory, whoever brings a body waits, too."""
PATIENCE_S = 2.0
"""For so long, and then lays it aside: a run that stands still must not hold up the other devices."""

T = TypeVar("T")

Load = Callable[[], T | None]
"""Brings an item back that was laid aside; None when it cannot be brought back."""


@dataclass(frozen=True, slots=True)
class _Waiting(Generic[T]):
    load: Load[T]
    num_bytes: int
    num_held: int


class Inbox(Generic[T]):
    """A queue from many threads to one.

    Args:
        lay_aside: takes a body out of memory; None where there is no other place for it.
    """

    def __init__(self, lay_aside: Callable[[T], Load[T] | None] = lambda _: None) -> None:
        self._lay_aside = lay_aside
        self._items: deque[_Waiting[T]] = deque()
        self._num_held = 0
        self._is_closed = False
        self._lock = threading.Lock()
        self._arrived, self._left = threading.Condition(self._lock), threading.Condition(self._lock)

    @property
    def num_held_bytes(self) -> int:
        """Returns how many bytes of bodies wait in memory."""
        return self._num_held

    def put(self, item: T, num_bytes: int = 0) -> None:
        """Adds an item; one with a body waits for room, for a while, or not at all in the thread of an event loop."""
        later = self._lay_aside(item) if num_bytes and not self._gets_room() else None
        with self._lock:
            waiting = _Waiting(later or (lambda: item), num_bytes, 0 if later else num_bytes)
            self._items.append(waiting)
            self._num_held += waiting.num_held
            self._arrived.notify()

    def take(self, timeout_s: float) -> list[T]:
        """Returns what has come, a portion at most; waits so long for the first item."""
        taken: list[_Waiting[T]] = []
        until_s, num_bytes = time.monotonic() + timeout_s, 0
        with self._lock:
            while not self._items and (left_s := until_s - time.monotonic()) > 0:
                self._arrived.wait(left_s)
            while self._items and num_bytes < PORTION_BYTES:
                taken.append(self._items.popleft())
                num_bytes += taken[-1].num_bytes
            self._num_held -= sum(waiting.num_held for waiting in taken)
            if num_bytes:
                self._left.notify_all()
        return [item for waiting in taken if (item := waiting.load()) is not None]

    def close(self) -> None:
        """Nobody waits for room any more."""
        with self._lock:
            self._is_closed = True
            self._left.notify_all()

    def _gets_room(self) -> bool:
        patience_s = 0.0 if _is_in_event_loop() else PATIENCE_S
        with self._lock:
            return self._left.wait_for(lambda: self._num_held <= HELD_BYTES or self._is_closed, patience_s)


def _is_in_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True

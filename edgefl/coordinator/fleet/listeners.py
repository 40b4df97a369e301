"""Those who listen to events of many threads, and hear them in the order in which they happened."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

E = TypeVar("E")


class Listeners(Generic[E]):
    """Events are noted where they happen, under a lock of the caller's, and told outside it; safe from any thread.

    One thread tells at a time, and nobody waits for it: whoever finds another one at it leaves the events to that.
    So a listener may cause events, which are told after the one that it hears.
    """

    def __init__(self) -> None:
        self._heard_by: tuple[Callable[[E], None], ...] = ()
        self._untold: deque[E] = deque()
        self._changing, self._telling = threading.Lock(), threading.Lock()

    def listen(self, listener: Callable[[E], None]) -> Callable[[], None]:
        """Calls `listener` with every event; returns what ends that."""
        with self._changing:
            self._heard_by = (*self._heard_by, listener)

        def end() -> None:
            with self._changing:
                self._heard_by = tuple(other for other in self._heard_by if other is not listener)

        return end

    def note(self, events: Iterable[E]) -> None:
        """Keeps events until `tell`, in the order of these calls: call it where that is the order of the events."""
        self._untold.extend(events)

    def tell(self) -> None:
        """Tells everybody what was noted; what a listener raises comes out here, and the rest is told next time."""
        # Looked at again after the lock is free: what was noted while it was held is left to whoever held it.
        while self._untold and self._telling.acquire(blocking=False):
            try:
                self._tell_all()
            finally:
                self._telling.release()

    def _tell_all(self) -> None:
        while self._untold:
            event = self._untold.popleft()
            for listener in self._heard_by:
                listener(event)

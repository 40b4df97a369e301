"""Thread-safe event bus; subscribers see events in publication order."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

E = TypeVar("E")


class EventBus(Generic[E]):
    """Events are enqueued under the caller's lock and published outside it. Thread-safe.

    One thread publishes at a time, and no other waits for it: a concurrent `publish` leaves its events to that one.
    So a subscriber may cause events, which are published after the present one.
    """

    def __init__(self) -> None:
        self._subscribers: tuple[Callable[[E], None], ...] = ()
        self._pending: deque[E] = deque()
        self._subscribers_lock, self._publish_lock = threading.Lock(), threading.Lock()

    def subscribe(self, subscriber: Callable[[E], None]) -> Callable[[], None]:
        """Calls `subscriber` with every event; returns a function that unsubscribes it."""
        with self._subscribers_lock:
            self._subscribers = (*self._subscribers, subscriber)

        def end() -> None:
            with self._subscribers_lock:
                self._subscribers = tuple(other for other in self._subscribers if other is not subscriber)

        return end

    def enqueue(self, events: Iterable[E]) -> None:
        """Queues events for `publish`, in the order of these calls; call it under the lock that orders the events."""
        self._pending.extend(events)

    def publish(self) -> None:
        """Passes queued events to all subscribers; raises their errors, and leaves the rest for the next call."""
        # Checked again after the release: events enqueued meanwhile were left to the holder of the lock.
        while self._pending and self._publish_lock.acquire(blocking=False):
            try:
                self._publish_all()
            finally:
                self._publish_lock.release()

    def _publish_all(self) -> None:
        while self._pending:
            event = self._pending.popleft()
            for subscriber in self._subscribers:
                subscriber(event)

"""Send queue for one neighbour: replies in order, and the newest state."""

from __future__ import annotations

import secrets
import threading
from collections import deque
from dataclasses import dataclass, field

from edgefl.device.peers.metrics import PeerMetrics

MAX_QUEUED_REPLIES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuedMessage:
    """Message that was sent at least once; repeats have the same number."""

    number: int
    payload: bytes = field(repr=False)
    is_state: bool


class PeerSendQueue:
    """Bounded queue, at most two states and `MAX_QUEUED_REPLIES` + 1 replies; one consumer thread."""

    def __init__(self, metrics: PeerMetrics) -> None:
        self.session_id = secrets.randbits(64)
        self._metrics = metrics
        self._changed = threading.Condition()
        self._replies: deque[bytes] = deque()
        self._state: bytes | None = None
        self._in_flight: QueuedMessage | None = None
        self._last_number = 0
        self._is_notified = False

    def put(self, payload: bytes, *, is_reply: bool) -> bool:
        """Queues a message; returns whether there was room. A state replaces the former one."""
        with self._changed:
            if is_reply and len(self._replies) >= MAX_QUEUED_REPLIES:
                return False
            if is_reply:
                self._replies.append(payload)
            else:
                if self._state is not None:
                    self._metrics.increment("superseded")
                self._state = payload
            self._changed.notify_all()
            return True

    def get(self, timeout_s: float) -> QueuedMessage | None:
        """Returns the next message: the unacknowledged one, or a newer state; None if empty."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_notified or self._has_next(), timeout_s)
            self._is_notified = False
            if self._in_flight is not None and self._in_flight.is_state and self._state is not None:
                self._metrics.increment("superseded")
                self._in_flight = None
            if self._in_flight is None and self._has_next():
                self._last_number += 1
                self._in_flight = self._pop_next()
            return self._in_flight

    def acknowledge(self) -> None:
        """Removes the message of `get`, which the neighbour has acknowledged."""
        with self._changed:
            self._in_flight = None

    def is_empty(self) -> bool:
        """Returns whether nothing is queued or unacknowledged."""
        with self._changed:
            return not self._has_next()

    def notify(self) -> None:
        """Makes the waiting `get`, or else the next one, return."""
        with self._changed:
            self._is_notified = True
            self._changed.notify_all()

    def _has_next(self) -> bool:
        return self._in_flight is not None or bool(self._replies) or self._state is not None

    def _pop_next(self) -> QueuedMessage:
        if self._replies:
            return QueuedMessage(number=self._last_number, payload=self._replies.popleft(), is_state=False)
        payload, self._state = self._state or b"", None
        return QueuedMessage(number=self._last_number, payload=payload, is_state=True)

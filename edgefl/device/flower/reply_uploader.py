"""Reply uploader: sends replies in a separate thread while the device trains on.

One reply is under way at a time, in order. After a failure the reply is kept, and uploads pause until the agent has
restored the connection.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from edgefl.core.errors import ClonedError, EdgeflError, NetworkError

log = logging.getLogger(__name__)

A = TypeVar("A")


class ReplyUploader(Generic[A]):
    """Upload queue used by one thread, beside its own.

    Args:
        push: sends one reply; raises `NetworkError` when it must be retried, `ClonedError` for a rejected clone.
        on_failure: called in the uploader's thread when a reply could not be sent; `check` then raises the error.
    """

    def __init__(self, push: Callable[[A], None], on_failure: Callable[[], None]) -> None:
        self._push, self._on_failure = push, on_failure
        self._replies: deque[A] = deque()
        self._error: EdgeflError | None = None
        self._is_open, self._is_sending, self._is_closed, self._has_sent = False, False, False, False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def add(self, reply: A) -> None:
        """Queues a reply, after the one before has been sent, so that at most two are in memory."""
        with self._changed:
            self._changed.wait_for(lambda: not self._replies or not self._is_open or self._is_closed)
            self._replies.append(reply)
            self._changed.notify_all()

    def has_progressed(self) -> bool:
        """Returns whether the queue is empty, or a reply was sent since the last call."""
        with self._changed:
            has_progressed, self._has_sent = self._has_sent or not self._replies, False
            return has_progressed

    def check(self) -> None:
        """Raises the error since the last `resume`, once."""
        with self._changed:
            error, self._error = self._error, None
        if error is not None:
            raise error

    def resume(self) -> None:
        """Resumes uploads over a restored connection."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="outbox", daemon=True)
            self._thread.start()
        with self._changed:
            self._error, self._is_open = None, True
            self._changed.notify_all()

    def pause(self) -> None:
        """Pauses uploads until `resume`; returns when none is under way."""
        with self._changed:
            self._is_open = False
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._is_sending or self._is_closed)

    def close(self, timeout_s: float) -> None:
        """Sends queued replies, if connected, for up to `timeout_s`; then ends."""
        with self._changed:
            self._changed.wait_for(lambda: not self._replies or not self._is_open, timeout_s)
            self._is_open, self._is_closed = False, True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _run(self) -> None:
        while self._wait_for_reply():
            error = self._send_first()
            with self._changed:
                self._is_sending = False
                if error is None:
                    self._replies.popleft()
                    self._has_sent = True
                else:
                    self._error, self._is_open = error, False
                self._changed.notify_all()
            if error is not None:
                self._on_failure()

    def _wait_for_reply(self) -> bool:
        """Returns when there is a reply to send; False when the uploader was closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or (self._is_open and self._replies))
            self._is_sending = not self._is_closed
            return self._is_sending

    def _send_first(self) -> EdgeflError | None:
        """Returns why the oldest reply could not be sent, or None."""
        try:
            self._push(self._replies[0])
        except (NetworkError, ClonedError) as error:
            return error
        except Exception as error:  # the boundary of the thread: without it no more replies would be sent
            log.exception("an answer could not be sent")
            return NetworkError(f"an answer could not be sent: {error}")
        return None

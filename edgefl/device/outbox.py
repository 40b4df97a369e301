"""Sends answers in a thread of its own, so that a device trains on while the last answer is still on its way.

One answer is under way at a time and they leave in order. What could not be sent is kept, and nothing more is tried
until the agent has looked after the connection.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from edgefl.errors import ClonedError, EdgeflError, NetworkError

log = logging.getLogger(__name__)

A = TypeVar("A")


class Outbox(Generic[A]):
    """Used by one thread, beside its own.

    Args:
        push: sends one answer; raises `NetworkError` when it must be sent again, `ClonedError` when nobody wants it.
        on_failure: called in the outbox's thread when an answer could not be sent; `check` then says why.
    """

    def __init__(self, push: Callable[[A], None], on_failure: Callable[[], None]) -> None:
        self._push, self._on_failure = push, on_failure
        self._answers: deque[A] = deque()
        self._error: EdgeflError | None = None
        self._is_open, self._is_sending, self._is_closed, self._has_sent = False, False, False, False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def put(self, answer: A) -> None:
        """Takes an answer, after the one before has been sent, so that no more than two lie in memory."""
        with self._changed:
            self._changed.wait_for(lambda: not self._answers or not self._is_open or self._is_closed)
            self._answers.append(answer)
            self._changed.notify_all()

    def is_flowing(self) -> bool:
        """Returns whether nothing waits, or an answer has been sent since this was asked last."""
        with self._changed:
            is_flowing, self._has_sent = self._has_sent or not self._answers, False
            return is_flowing

    def check(self) -> None:
        """Raises what went wrong since it was opened, once."""
        with self._changed:
            error, self._error = self._error, None
        if error is not None:
            raise error

    def open(self) -> None:
        """Says that there is a connection: what waits is sent."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="outbox", daemon=True)
            self._thread.start()
        with self._changed:
            self._error, self._is_open = None, True
            self._changed.notify_all()

    def pause(self) -> None:
        """Returns when nothing is under way; until `open` nothing is."""
        with self._changed:
            self._is_open = False
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._is_sending or self._is_closed)

    def close(self, within_s: float) -> None:
        """Sends what waits, if there is a connection, for so long; then ends."""
        with self._changed:
            self._changed.wait_for(lambda: not self._answers or not self._is_open, within_s)
            self._is_open, self._is_closed = False, True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(within_s)

    def _run(self) -> None:
        while self._waits_for_answer():
            error = self._failure()
            with self._changed:
                self._is_sending = False
                if error is None:
                    self._answers.popleft()
                    self._has_sent = True
                else:
                    self._error, self._is_open = error, False
                self._changed.notify_all()
            if error is not None:
                self._on_failure()

    def _waits_for_answer(self) -> bool:
        """Returns when there is something to send; False when the outbox was closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or (self._is_open and self._answers))
            self._is_sending = not self._is_closed
            return self._is_sending

    def _failure(self) -> EdgeflError | None:
        """Returns why the oldest answer could not be sent, None when it was."""
        try:
            self._push(self._answers[0])
        except (NetworkError, ClonedError) as error:
            return error
        except Exception as error:  # the boundary of the thread: without it the device would answer nothing any more
            log.exception("an answer could not be sent")
            return NetworkError(f"an answer could not be sent: {error}")
        return None

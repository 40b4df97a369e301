"""Replies that come in pieces: which ones are still missing, and when the last one has landed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

R = TypeVar("R")


class HalfReplies(Generic[R]):
    """Replies whose announcement has come and whose pieces have not, by the session in which they are pushed.

    Several threads may call it; a complete reply is given out once.
    """

    def __init__(self) -> None:
        self._open: dict[str, tuple[R, set[str]]] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._open)

    def begin(self, session_id: str, reply: R, missing: Iterable[str]) -> None:
        """Takes note of a reply and the ids of the pieces that it waits for."""
        with self._lock:
            self._open[session_id] = reply, set(missing)

    def arrived(self, session_id: str, object_id: str) -> R | None:
        """Returns the reply of a session when this was its last piece."""
        with self._lock:
            if session_id not in self._open:
                return None
            reply, missing = self._open[session_id]
            missing.discard(object_id)
            if missing:
                return None
            del self._open[session_id]
            return reply

    def drop(self, is_meant: Callable[[R], bool]) -> list[str]:
        """Forgets replies, and returns the sessions in which they were pushed."""
        with self._lock:
            found = [session_id for session_id, (reply, _) in self._open.items() if is_meant(reply)]
            for session_id in found:
                del self._open[session_id]
            return found

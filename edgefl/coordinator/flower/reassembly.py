"""Reassembly of chunked replies."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

R = TypeVar("R")


class ReplyAssembler(Generic[R]):
    """Announced replies with missing chunks, by the session that pushes them.

    Thread-safe; a complete reply is returned once.
    """

    def __init__(self) -> None:
        self._partial: dict[str, tuple[R, set[str]]] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._partial)

    def start(self, session_id: str, reply: R, missing_ids: Iterable[str]) -> None:
        """Adds a reply and the ids of its missing chunks."""
        with self._lock:
            self._partial[session_id] = reply, set(missing_ids)

    def add_object(self, session_id: str, object_id: str) -> R | None:
        """Returns the reply of a session if this was its last missing chunk."""
        with self._lock:
            if session_id not in self._partial:
                return None
            reply, missing = self._partial[session_id]
            missing.discard(object_id)
            if missing:
                return None
            del self._partial[session_id]
            return reply

    def remove(self, should_remove: Callable[[R], bool]) -> list[str]:
        """Removes replies, and returns the sessions that pushed them."""
        with self._lock:
            session_ids = [session_id for session_id, (reply, _) in self._partial.items() if should_remove(reply)]
            for session_id in session_ids:
                del self._partial[session_id]
            return session_ids

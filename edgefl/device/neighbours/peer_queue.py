"""What waits for one neighbour: answers in order, and of the states the newest."""

from __future__ import annotations

import secrets
import threading
from collections import deque
from dataclasses import dataclass, field

from edgefl.device.neighbours.peer_watch import PeerWatch

MAX_ANSWERS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Letter:
    """A message that was sent at least once; the same again has the same number."""

    number: int
    payload: bytes = field(repr=False)
    is_state: bool


class PeerQueue:
    """Filled by any thread and emptied by one; holds at most two states and `MAX_ANSWERS` + 1 answers."""

    def __init__(self, watch: PeerWatch) -> None:
        self.session = secrets.randbits(64)
        self._watch = watch
        self._changed = threading.Condition()
        self._answers: deque[bytes] = deque()
        self._state: bytes | None = None
        self._under_way: Letter | None = None
        self._number = 0
        self._is_woken = False

    def put(self, payload: bytes, *, keep_all: bool) -> bool:
        """Returns whether there was room; a state takes the place of the one before."""
        with self._changed:
            if keep_all and len(self._answers) >= MAX_ANSWERS:
                return False
            if keep_all:
                self._answers.append(payload)
            else:
                if self._state is not None:
                    self._watch.add("superseded")
                self._state = payload
            self._changed.notify_all()
            return True

    def next(self, timeout_s: float) -> Letter | None:
        """Returns what to send: what was not taken before, or a state that came since; None if there is nothing."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_woken or self._has_next(), timeout_s)
            self._is_woken = False
            if self._under_way is not None and self._under_way.is_state and self._state is not None:
                self._watch.add("superseded")
                self._under_way = None
            if self._under_way is None and self._has_next():
                self._number += 1
                self._under_way = self._first()
            return self._under_way

    def taken(self) -> None:
        """Forgets what `next` returned: the neighbour has it."""
        with self._changed:
            self._under_way = None

    def is_empty(self) -> bool:
        """Says whether nothing waits, and all that was sent has been taken."""
        with self._changed:
            return not self._has_next()

    def wake(self) -> None:
        """Makes `next` return, the one that waits or else the one that comes."""
        with self._changed:
            self._is_woken = True
            self._changed.notify_all()

    def _has_next(self) -> bool:
        return self._under_way is not None or bool(self._answers) or self._state is not None

    def _first(self) -> Letter:
        if self._answers:
            return Letter(number=self._number, payload=self._answers.popleft(), is_state=False)
        payload, self._state = self._state or b"", None
        return Letter(number=self._number, payload=payload, is_state=True)

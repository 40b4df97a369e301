"""Virtual time: what is going to happen, in order."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any


class Agenda:
    """A heap of calls. Those of the same instant are made in the order in which they were entered."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._heap: list[tuple[float, int, Callable[[Any], None], Any]] = []
        self._entered = 0

    def at(self, at_s: float, act: Callable[[Any], None], subject: Any) -> None:
        """Calls `act` with the subject at `at_s`, which is not before now."""
        self._entered += 1
        heapq.heappush(self._heap, (at_s, self._entered, act, subject))

    @property
    def is_empty(self) -> bool:
        return not self._heap

    def advance(self, until_s: float) -> bool:
        """Goes on to the next instant and does all that is due in it; False if that is after `until_s`."""
        heap = self._heap
        if not heap or heap[0][0] > until_s:
            return False
        self.now_s = at_s = heap[0][0]
        while heap and heap[0][0] == at_s:
            _, _, act, subject = heapq.heappop(heap)
            act(subject)
        return True

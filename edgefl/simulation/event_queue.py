"""Event queue in virtual time."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any


class SimulationEventQueue:
    """A heap of callbacks; those of the same instant run in the order of scheduling."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._heap: list[tuple[float, int, Callable[[Any], None], Any]] = []
        self._num_scheduled = 0

    def schedule(self, at_s: float, callback: Callable[[Any], None], argument: Any) -> None:
        """Calls `callback` with the subject at `at_s`, which is not before now."""
        self._num_scheduled += 1
        heapq.heappush(self._heap, (at_s, self._num_scheduled, callback, argument))

    @property
    def is_empty(self) -> bool:
        return not self._heap

    def advance(self, until_s: float) -> bool:
        """Advances to the next instant and runs its events; False if that is after `until_s`."""
        heap = self._heap
        if not heap or heap[0][0] > until_s:
            return False
        self.now_s = at_s = heap[0][0]
        while heap and heap[0][0] == at_s:
            _, _, callback, subject = heapq.heappop(heap)
            callback(subject)
        return True

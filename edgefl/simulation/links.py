"""The coordinator's own link: what all devices share.

It is shared fairly: each transfer under way gets an equal part (processor sharing), and a device receives no faster
than its own link allows. A part that a slow device cannot use is not given to the others: the network holds it for
the device meanwhile. Beginning and ending a transfer cost O(log n), since one running total serves all of them.
"""

from __future__ import annotations

import heapq
from typing import Generic, TypeVar

Subject = TypeVar("Subject")


class SharedLink(Generic[Subject]):
    """Transfers over one link of `bytes_per_s`, each of them known by its subject.

    `served` counts the bytes that a transfer which never paused would have got; one that began at `served` = v and
    has n bytes is through when `served` = v + n.
    """

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._served, self._at_s, self._sequence = 0.0, 0.0, 0
        self._heap: list[tuple[float, int, Subject]] = []

    def begin(self, now_s: float, num_bytes: int, subject: Subject) -> None:
        """Starts a transfer."""
        self._advance(now_s)
        self._sequence += 1
        heapq.heappush(self._heap, (self._served + num_bytes, self._sequence, subject))

    def next_end_s(self) -> float | None:
        """Returns when the next transfer is through if none begins before; None when nothing is under way."""
        if not self._heap:
            return None
        return self._at_s + (self._heap[0][0] - self._served) * len(self._heap) / self._bytes_per_s

    def end(self, now_s: float) -> list[Subject]:
        """Ends the transfer that `next_end_s` spoke of, and those that are through in the same instant."""
        self._served, self._at_s = self._heap[0][0], now_s
        ended = []
        while self._heap and self._heap[0][0] <= self._served:
            ended.append(heapq.heappop(self._heap)[2])
        return ended

    def _advance(self, now_s: float) -> None:
        if self._heap:
            self._served += (now_s - self._at_s) * self._bytes_per_s / len(self._heap)
            # Rounding must not carry the total past the transfer that ends next.
            self._served = min(self._served, self._heap[0][0])
        else:
            self._served = 0.0
        self._at_s = now_s

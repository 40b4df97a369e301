"""The coordinator's link, shared by all devices.

It is shared fairly: each active transfer gets an equal part (processor sharing), and a device receives no faster
than its own link allows. The unused part of a slow device is not given to the others: the network holds it for
the device meanwhile. Starting and ending a transfer cost O(log n), since one running total serves all of them.
"""

from __future__ import annotations

import heapq
from typing import Generic, TypeVar

TransferT = TypeVar("TransferT")


class SharedLink(Generic[TransferT]):
    """Transfers over one link of `bytes_per_s`, keyed by their subject.

    `served` counts the bytes that a transfer which never paused would have got; one that began at `served` = v and
    has n bytes ends when `served` = v + n.
    """

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._served_bytes, self._updated_s, self._sequence = 0.0, 0.0, 0
        self._heap: list[tuple[float, int, TransferT]] = []

    def start(self, now_s: float, num_bytes: int, transfer: TransferT) -> None:
        """Starts a transfer."""
        self._update(now_s)
        self._sequence += 1
        heapq.heappush(self._heap, (self._served_bytes + num_bytes, self._sequence, transfer))

    def compute_next_end_s(self) -> float | None:
        """Returns when the next transfer ends if none begins before; None when there is none."""
        if not self._heap:
            return None
        return self._updated_s + (self._heap[0][0] - self._served_bytes) * len(self._heap) / self._bytes_per_s

    def complete_next(self, now_s: float) -> list[TransferT]:
        """Ends the transfer of `compute_next_end_s`, and all others of the same instant."""
        self._served_bytes, self._updated_s = self._heap[0][0], now_s
        transfers = []
        while self._heap and self._heap[0][0] <= self._served_bytes:
            transfers.append(heapq.heappop(self._heap)[2])
        return transfers

    def _update(self, now_s: float) -> None:
        if self._heap:
            self._served_bytes += (now_s - self._updated_s) * self._bytes_per_s / len(self._heap)
            # Rounding must not carry the total past the transfer that ends next.
            self._served_bytes = min(self._served_bytes, self._heap[0][0])
        else:
            self._served_bytes = 0.0
        self._updated_s = now_s

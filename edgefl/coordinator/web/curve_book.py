"""The curves of runs as the page draws them; those of runs that are over are kept, since nothing changes them."""

from __future__ import annotations

import threading
from collections import OrderedDict

from edgefl.storage.curves import curve
from edgefl.storage.store import Store
from edgefl.types import Json

KEPT = 32

Key = tuple[str, int, float]
Drawn = tuple[int, list[Json]]


class CurveBook:
    """Answers from memory where it can; safe from any thread."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._kept: OrderedDict[Key, Drawn] = OrderedDict()
        self._lock = threading.Lock()

    def curve(self, run_id: str, points: int) -> Drawn:
        """Returns what `storage.curves.curve` does.

        Raises:
            NotFoundError: there is no such run.
        """
        record = self._store.run(run_id)
        if not record.status.is_final or record.finished_at is None:
            return curve(self._store, run_id, points)
        # A run that was taken up again ends at another time.
        key = run_id, points, record.finished_at
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
        drawn = curve(self._store, run_id, points)
        with self._lock:
            self._kept[key] = drawn
            while len(self._kept) > KEPT:
                self._kept.popitem(last=False)
        return drawn

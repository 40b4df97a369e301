"""Curves of runs for the page, cached for runs that are over."""

from __future__ import annotations

import threading
from collections import OrderedDict

from edgefl.core.types import Json
from edgefl.storage.queries.run_curves import get_run_curve
from edgefl.storage.store import Store

MAX_CACHED_CURVES = 32

CurveKey = tuple[str, int, float]
Curve = tuple[int, list[Json]]


class CurveCache:
    """LRU cache of the curves of finished runs. Thread-safe."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._cache: OrderedDict[CurveKey, Curve] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, run_id: str, points: int) -> Curve:
        """Returns the same as `run_curves.get_run_curve`.

        Raises:
            NotFoundError: there is no such run.
        """
        record = self._store.get_run(run_id)
        if not record.status.is_final or record.finished_at is None:
            return get_run_curve(self._store, run_id, points)
        # A resumed run ends at another time.
        key = run_id, points, record.finished_at
        with self._lock:
            if key in self._cache:
                self._cache.move_to_end(key)
                return self._cache[key]
        curve = get_run_curve(self._store, run_id, points)
        with self._lock:
            self._cache[key] = curve
            while len(self._cache) > MAX_CACHED_CURVES:
                self._cache.popitem(last=False)
        return curve

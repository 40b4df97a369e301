"""History reader of a store."""

from __future__ import annotations

from collections.abc import Callable
from typing import Unpack

from edgefl.core.types import Json
from edgefl.history.series import RunInfo
from edgefl.storage.queries.columns import HistoryFilters
from edgefl.storage.queries.history import find_run_id, read_history
from edgefl.storage.repositories.records import RunRecord
from edgefl.storage.store import Store


class StoreHistoryReader:
    """A `HistoryReader` of a store.

    Args:
        store: an open store.
        batch_size: run -> its batch size, None where unknown.
    """

    def __init__(self, store: Store, batch_size: Callable[[RunRecord], int | None] = lambda _record: None) -> None:
        self._store, self._batch_size = store, batch_size

    def find_run(self, text: str) -> RunInfo:
        """Returns the run that a text identifies; raises `NotFoundError`."""
        record = self._store.get_run(find_run_id(self._store, text))
        return RunInfo(
            run_id=record.run_id, name=record.name, strategy=record.strategy, batch_size=self._batch_size(record)
        )

    def read_rows(self, kind: str, **filters: Unpack[HistoryFilters]) -> list[Json]:
        """Returns rows of one run, oldest first."""
        return read_history(self._store, kind, **filters)

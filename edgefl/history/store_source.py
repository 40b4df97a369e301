"""Rows of the history straight from a store."""

from __future__ import annotations

from collections.abc import Callable

from edgefl.history.series import RunHead
from edgefl.storage.queries import find_run, history
from edgefl.storage.records import RunRecord
from edgefl.storage.store import Store
from edgefl.types import Json


class StoreSource:
    """A `Source`.

    Args:
        store: an open store.
        batch_size: says with what batch size a run trains, None where that is not known.
    """

    def __init__(self, store: Store, batch_size: Callable[[RunRecord], int | None] = lambda _record: None) -> None:
        self._store, self._batch_size = store, batch_size

    def run(self, text: str) -> RunHead:
        """Returns the run that a person means; raises `NotFoundError`."""
        record = self._store.run(find_run(self._store, text))
        return RunHead(
            run_id=record.run_id, name=record.name, strategy=record.strategy, batch_size=self._batch_size(record)
        )

    def rows(
        self,
        kind: str,
        *,
        run: str,
        since: float | None = None,
        until: float | None = None,
        limit: int | None = None,
    ) -> list[Json]:
        """Returns rows of one run, oldest first."""
        return history(self._store, kind, run=run, since=since, until=until, limit=limit)

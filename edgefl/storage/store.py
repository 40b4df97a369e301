"""The store of a coordinator: devices, runs and their history in one database."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Self

from sqlalchemy import ColumnElement, delete, exists, func, select

from edgefl.storage.database import Database
from edgefl.storage.repositories.fleet import FleetRepository
from edgefl.storage.repositories.heartbeats import HeartbeatRepository
from edgefl.storage.repositories.records import RunStatus
from edgefl.storage.repositories.rollouts import create_deployment_repository, create_installation_repository
from edgefl.storage.repositories.runs import RunRepository
from edgefl.storage.tables import EventTable, HeartbeatRollupTable, RunTable, UpdateTable

PRUNE_BATCH_ROWS = 5_000
PRUNE_BATCH_S = 3600.0
PRESENCE_EVENT_KINDS = tuple(
    f"device-{state}" for state in ("online", "late", "gone", "offline", "draining", "restarted")
)
"""Kinds of events that a board with bad Wi-Fi causes by the thousand, and that no recovery needs."""
REJECTED_EVENT_KIND = "request-rejected"
"""Kind of the events of rejected requests: any host that reaches a port can cause them."""
MAX_REJECTED_EVENTS = 20_000
_FINAL_STATUSES = [str(status) for status in RunStatus if status.is_final]


class Store(FleetRepository, RunRepository, HeartbeatRepository):
    """Store of a coordinator; safe to use from several threads and next to other processes."""

    def __init__(self, database: Database) -> None:
        super().__init__(database)
        self.deployments = create_deployment_repository(database)
        self.installations = create_installation_repository(database)

    @classmethod
    def open(cls, url_or_path: str | Path, *, read_only: bool = False) -> Self:
        """Returns the store in this file or at this SQLAlchemy URL; see `Database.open`."""
        return cls(Database.open(url_or_path, read_only=read_only))

    def close(self) -> None:
        self.database.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def batch(self, *, durable: bool = False) -> AbstractContextManager[None]:
        """Groups the calls inside the `with` block in one transaction: all are committed, or none."""
        return self.database.batch(durable=durable)

    def sync(self) -> None:
        """Returns when every write is durable; see `Database.sync`."""
        self.database.sync()

    def prune_history(self, before: float) -> int:
        """Deletes rows from before this time and returns their number; sums, rounds and evaluations stay.

        These are updates of runs that ended before, five-minute rows, and events of joining or leaving devices and of
        rejections. A run that is not over keeps all of its updates: its journal may replay them. Rows are deleted in
        batches, each in its own transaction, so that other writers are not blocked.
        """
        run_query = select(RunTable.run_id).where(RunTable.status.in_(_FINAL_STATUSES), RunTable.finished_at < before)
        of_runs = sum(self._prune_updates(row.run_id) for row in self.database.read_rows(run_query))
        is_minor = EventTable.kind.in_((*PRESENCE_EVENT_KINDS, REJECTED_EVENT_KIND))
        num_events = self._delete_in_batches(EventTable, EventTable.at < before, is_minor)
        return of_runs + num_events + self._prune_heartbeat_rollups(before)

    def prune_rejected_events(self) -> int:
        """Deletes rejection events but the newest `MAX_REJECTED_EVENTS`, so that attackers cannot fill the store."""
        newest = select(EventTable.id).where(EventTable.kind == REJECTED_EVENT_KIND).order_by(EventTable.id.desc())
        last = self.database.read_value(newest.offset(MAX_REJECTED_EVENTS).limit(1))
        if last is None:
            return 0
        return self._delete_in_batches(EventTable, EventTable.kind == REJECTED_EVENT_KIND, EventTable.id <= last)

    def _delete_in_batches(self, table: type[EventTable | UpdateTable], *where: ColumnElement[bool]) -> int:
        num_deleted = 0
        while True:
            batch_query = select(table.id).where(*where).limit(PRUNE_BATCH_ROWS)
            with self.database.write() as connection:
                num_rows = connection.execute(delete(table).where(table.id.in_(batch_query))).rowcount
            if not num_rows:
                return num_deleted
            num_deleted += num_rows

    def _prune_updates(self, run_id: str) -> int:
        # Checked for each batch: the run may be resumed meanwhile.
        is_over = exists().where(RunTable.run_id == run_id, RunTable.status.in_(_FINAL_STATUSES))
        return self._delete_in_batches(UpdateTable, UpdateTable.run_id == run_id, is_over)

    def _prune_heartbeat_rollups(self, before: float) -> int:
        num_deleted = 0
        while True:
            oldest = self.database.read_value(select(func.min(HeartbeatRollupTable.at)))
            if oldest is None or oldest >= before:
                return num_deleted
            with self.database.write() as connection:
                until = min(before, oldest + PRUNE_BATCH_S)
                num_deleted += connection.execute(
                    delete(HeartbeatRollupTable).where(HeartbeatRollupTable.at < until)
                ).rowcount

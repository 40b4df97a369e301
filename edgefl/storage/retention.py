"""Retention: deletes updates of old runs, five-minute rows, and events of devices and rejections."""

from __future__ import annotations

from sqlalchemy import Delete, delete, exists, func, select

from edgefl.storage.database import Database
from edgefl.storage.repositories.records import RunStatus
from edgefl.storage.tables import EventTable, HeartbeatRollupTable, RunTable, UpdateTable

PRUNE_BATCH_ROWS = 5_000
PRUNE_BATCH_S = 3600.0
PRESENCE_EVENT_KINDS = tuple(
    f"device-{state}" for state in ("online", "late", "gone", "offline", "draining", "restarted")
)
"""Kinds of events that a board with bad Wi-Fi causes by the thousand, and that no recovery needs."""
REJECTED_EVENT_KIND = "refused"
"""Kind of the events of rejected requests: any host that reaches a port can cause them."""
MAX_REJECTED_EVENTS = 20_000
_FINAL_STATUSES = [str(status) for status in RunStatus if status.is_final]


class Retention:
    """Pruning methods of the store; sums, rounds, evaluations and all other events stay."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def prune_history(self, before: float) -> int:
        """Deletes rows from before this time and returns their number.

        These are updates of runs that ended before, five-minute rows, and events of joining or leaving devices and of
        rejections. A run that is not over keeps all of its updates: its journal may replay them. Rows are deleted in
        batches, each in its own transaction, so that other writers are not blocked.
        """
        run_query = select(RunTable.run_id).where(RunTable.status.in_(_FINAL_STATUSES), RunTable.finished_at < before)
        with self._database.read() as connection:
            run_ids = list(connection.execute(run_query).scalars())
        of_runs = sum(self._prune_updates(run_id) for run_id in run_ids)
        return of_runs + self._prune_heartbeat_rollups(before) + self._prune_events(before)

    def prune_rejected_events(self) -> int:
        """Deletes rejection events but the newest `MAX_REJECTED_EVENTS`, so that attackers cannot fill the store."""
        newest = select(EventTable.id).where(EventTable.kind == REJECTED_EVENT_KIND).order_by(EventTable.id.desc())
        with self._database.read() as connection:
            last = connection.execute(newest.offset(MAX_REJECTED_EVENTS).limit(1)).scalar()
        if last is None:
            return 0
        batch_query = (
            select(EventTable.id)
            .where(EventTable.kind == REJECTED_EVENT_KIND, EventTable.id <= last)
            .limit(PRUNE_BATCH_ROWS)
        )
        return self._delete_in_batches(delete(EventTable).where(EventTable.id.in_(batch_query)))

    def _prune_events(self, before: float) -> int:
        batch_query = (
            select(EventTable.id)
            .where(EventTable.at < before, EventTable.kind.in_((*PRESENCE_EVENT_KINDS, REJECTED_EVENT_KIND)))
            .limit(PRUNE_BATCH_ROWS)
        )
        return self._delete_in_batches(delete(EventTable).where(EventTable.id.in_(batch_query)))

    def _delete_in_batches(self, statement: Delete) -> int:
        """Repeats a batched delete until no row matches."""
        num_deleted = 0
        while True:
            with self._database.write() as connection:
                num_rows = connection.execute(statement).rowcount
            if not num_rows:
                return num_deleted
            num_deleted += num_rows

    def _prune_heartbeat_rollups(self, before: float) -> int:
        num_deleted = 0
        while True:
            with self._database.read() as connection:
                oldest = connection.execute(select(func.min(HeartbeatRollupTable.at))).scalar()
            if oldest is None or oldest >= before:
                return num_deleted
            with self._database.write() as connection:
                until = min(before, oldest + PRUNE_BATCH_S)
                num_deleted += connection.execute(
                    delete(HeartbeatRollupTable).where(HeartbeatRollupTable.at < until)
                ).rowcount

    def _prune_updates(self, run_id: str) -> int:
        # Checked for each batch: the run may be resumed meanwhile.
        is_over = exists().where(RunTable.run_id == run_id, RunTable.status.in_(_FINAL_STATUSES))
        batch_query = select(UpdateTable.id).where(UpdateTable.run_id == run_id, is_over).limit(PRUNE_BATCH_ROWS)
        return self._delete_in_batches(delete(UpdateTable).where(UpdateTable.id.in_(batch_query)))

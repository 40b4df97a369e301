"""What goes when a history is not kept for ever: updates of runs that are over, and five-minute rows."""

from __future__ import annotations

from sqlalchemy import delete, exists, func, select

from edgefl.storage.database import Database
from edgefl.storage.models import Heartbeat5Min, Run, Update
from edgefl.storage.records import RunStatus

UPDATES_AT_ONCE = 5_000
HEARTBEATS_AT_ONCE_S = 3600.0
_FINAL = [str(status) for status in RunStatus if status.is_final]


class Retention:
    """The store's part about forgetting. Sums, rounds, evaluations and events stay."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def prune_history(self, before: float) -> int:
        """Returns how many rows went: five-minute rows from before this time, and updates of runs that ended before.

        A run that is not over keeps all of its updates: its journal may bring them again. They go in pieces, each in
        a transaction of its own, so that other writers get their turn.
        """
        ended = select(Run.run_id).where(Run.status.in_(_FINAL), Run.finished_at < before)
        with self._database.read() as connection:
            run_ids = list(connection.execute(ended).scalars())
        return self._prune_heartbeats(before) + sum(self._prune_updates(run_id) for run_id in run_ids)

    def _prune_heartbeats(self, before: float) -> int:
        pruned = 0
        while True:
            with self._database.read() as connection:
                oldest = connection.execute(select(func.min(Heartbeat5Min.at))).scalar()
            if oldest is None or oldest >= before:
                return pruned
            with self._database.write() as connection:
                until = min(before, oldest + HEARTBEATS_AT_ONCE_S)
                pruned += connection.execute(delete(Heartbeat5Min).where(Heartbeat5Min.at < until)).rowcount

    def _prune_updates(self, run_id: str) -> int:
        pruned = 0
        # Asked each time: somebody may take the run up again meanwhile.
        is_over = exists().where(Run.run_id == run_id, Run.status.in_(_FINAL))
        some = select(Update.id).where(Update.run_id == run_id, is_over).limit(UPDATES_AT_ONCE)
        while True:
            with self._database.write() as connection:
                gone = connection.execute(delete(Update).where(Update.id.in_(some))).rowcount
            if not gone:
                return pruned
            pruned += gone

"""What goes when a history is not kept for ever: updates of old runs, five-minute rows, who came, went or tried."""

from __future__ import annotations

from sqlalchemy import Delete, delete, exists, func, select

from edgefl.storage.database import Database
from edgefl.storage.models import Event, Heartbeat5Min, Run, Update
from edgefl.storage.records import RunStatus

ROWS_AT_ONCE = 5_000
HEARTBEATS_AT_ONCE_S = 3600.0
CAME_AND_WENT = tuple(f"device-{state}" for state in ("online", "late", "gone", "offline", "draining", "restarted"))
"""Kinds of events that a board with bad Wi-Fi makes by the thousand, and that nothing is rebuilt from."""
REFUSED = "refused"
"""Kind of the events of what was tried in vain: anybody who reaches a port can bring them about."""
MAX_REFUSED = 20_000
_FINAL = [str(status) for status in RunStatus if status.is_final]


class Retention:
    """The store's part about forgetting. Sums, rounds, evaluations and all other events stay."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def prune_history(self, before: float) -> int:
        """Forgets what was before this time; returns how many rows went.

        That is updates of runs that ended before, five-minute rows, and events of devices that came or went and of
        what was refused. A run that is not over keeps all of its updates: its journal may bring them again. They go
        in pieces, each in a transaction of its own, so that other writers get their turn.
        """
        ended = select(Run.run_id).where(Run.status.in_(_FINAL), Run.finished_at < before)
        with self._database.read() as connection:
            run_ids = list(connection.execute(ended).scalars())
        of_runs = sum(self._prune_updates(run_id) for run_id in run_ids)
        return of_runs + self._prune_heartbeats(before) + self._prune_events(before)

    def prune_refused(self) -> int:
        """Forgets what was refused but for the newest `MAX_REFUSED` events, so that no stranger fills the store."""
        newest = select(Event.id).where(Event.kind == REFUSED).order_by(Event.id.desc())
        with self._database.read() as connection:
            last = connection.execute(newest.offset(MAX_REFUSED).limit(1)).scalar()
        if last is None:
            return 0
        some = select(Event.id).where(Event.kind == REFUSED, Event.id <= last).limit(ROWS_AT_ONCE)
        return self._prune(delete(Event).where(Event.id.in_(some)))

    def _prune_events(self, before: float) -> int:
        some = (
            select(Event.id).where(Event.at < before, Event.kind.in_((*CAME_AND_WENT, REFUSED))).limit(ROWS_AT_ONCE)
        )
        return self._prune(delete(Event).where(Event.id.in_(some)))

    def _prune(self, some: Delete) -> int:
        """Repeats a statement that takes a piece, until nothing is left of it."""
        pruned = 0
        while True:
            with self._database.write() as connection:
                gone = connection.execute(some).rowcount
            if not gone:
                return pruned
            pruned += gone

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
        # Asked each time: somebody may take the run up again meanwhile.
        is_over = exists().where(Run.run_id == run_id, Run.status.in_(_FINAL))
        some = select(Update.id).where(Update.run_id == run_id, is_over).limit(ROWS_AT_ONCE)
        return self._prune(delete(Update).where(Update.id.in_(some)))

"""What follows from other rows, made anew: for a store that an earlier program wrote."""

from __future__ import annotations

from sqlalchemy import Connection, func, select, update

from edgefl.storage.models import Round, Update
from edgefl.storage.totals import rebuild
from edgefl.storage.waits import wait_columns, waits_of_rounds


def rebuild_derived(connection: Connection) -> None:
    """Fills the sums, the ends of assignments, and the durations and waits of rounds from what the rows say."""
    connection.execute(update(Update).where(Update.ended_at.is_(None)).values(ended_at=Update.received_at))
    connection.execute(
        update(Update)
        .where(Update.dispatched_at.is_(None))
        .values(dispatched_at=func.coalesce(Update.received_at, Update.ended_at))
    )
    rebuild(connection)
    closed = select(Round.id, Round.run_id, Round.round, Round.started_at, Round.closed_at)
    for row in connection.execute(closed.where(Round.closed_at.is_not(None))).all():
        waits = waits_of_rounds(connection, row.run_id, {row.round: row.started_at}, {row.round: row.closed_at})
        values = {"seconds": max(0.0, row.closed_at - row.started_at), **wait_columns(waits.get(row.round))}
        connection.execute(update(Round).where(Round.id == row.id).values(**values))

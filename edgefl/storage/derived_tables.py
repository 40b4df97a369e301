"""Rebuilds derived tables, for a store that an earlier version wrote."""

from __future__ import annotations

from sqlalchemy import Connection, func, select, update

from edgefl.storage.queries.stragglers import find_stragglers, straggler_to_columns
from edgefl.storage.repositories.totals import rebuild_totals
from edgefl.storage.tables import RoundTable, UpdateTable


def rebuild_derived_tables(connection: Connection) -> None:
    """Computes the sums, the ends of assignments, and the durations and waits of rounds from the rows."""
    connection.execute(
        update(UpdateTable).where(UpdateTable.ended_at.is_(None)).values(ended_at=UpdateTable.received_at)
    )
    connection.execute(
        update(UpdateTable)
        .where(UpdateTable.dispatched_at.is_(None))
        .values(dispatched_at=func.coalesce(UpdateTable.received_at, UpdateTable.ended_at))
    )
    rebuild_totals(connection)
    rounds_query = select(
        RoundTable.id, RoundTable.run_id, RoundTable.round, RoundTable.started_at, RoundTable.closed_at
    )
    for row in connection.execute(rounds_query.where(RoundTable.closed_at.is_not(None))).all():
        waits = find_stragglers(connection, row.run_id, {row.round: row.started_at}, {row.round: row.closed_at})
        values = {"seconds": max(0.0, row.closed_at - row.started_at), **straggler_to_columns(waits.get(row.round))}
        connection.execute(update(RoundTable).where(RoundTable.id == row.id).values(**values))

"""Insert-or-update in the words of the database at hand."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sqlalchemy import Connection
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.sql.elements import ColumnElement

from edgefl.storage.models import Base

Rows = Sequence[Mapping[str, Any]]
Merge = Callable[[Any, Any], ColumnElement[Any]]


def insert_new(connection: Connection, model: type[Base], rows: Rows, keys: Sequence[str]) -> None:
    """Inserts the rows whose `keys` are not there yet; a replayed row changes nothing."""
    if rows:
        connection.execute(_insert(connection, model).on_conflict_do_nothing(index_elements=list(keys)), list(rows))


def upsert(
    connection: Connection, model: type[Base], rows: Rows, keys: Sequence[str], *, merge: Merge | None = None
) -> None:
    """Inserts rows; where `keys` are there already, the other columns that the rows have are replaced.

    Args:
        connection: in a transaction.
        model: the table.
        rows: all with the same columns.
        keys: the columns of a unique constraint.
        merge: turns (stored column, new value) into what is kept; the new value if None.
    """
    if not rows:
        return
    statement = _insert(connection, model)
    columns = model.__table__.columns
    kept = {
        name: merge(columns[name], statement.excluded[name]) if merge else statement.excluded[name]
        for name in rows[0]
        if name not in keys
    }
    connection.execute(statement.on_conflict_do_update(index_elements=list(keys), set_=kept), list(rows))


def _insert(connection: Connection, model: type[Base]) -> sqlite.Insert | postgresql.Insert:
    table: Any = model.__table__
    return postgresql.insert(table) if connection.dialect.name == "postgresql" else sqlite.insert(table)

"""Insert-or-update in the words of the database at hand."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

from sqlalchemy import Connection, Executable
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.sql.elements import ColumnElement

from edgefl.storage.models import Base

Rows = Sequence[Mapping[str, Any]]
Merge = Callable[[Any, Any], ColumnElement[Any]]


def insert_new(connection: Connection, model: type[Base], rows: Rows, keys: Sequence[str]) -> None:
    """Inserts the rows whose `keys` are not there yet; a replayed row changes nothing."""
    if rows:
        connection.execute(
            _insert(connection.dialect.name, model).on_conflict_do_nothing(index_elements=list(keys)), list(rows)
        )


def upsert(
    connection: Connection,
    model: type[Base],
    rows: Rows,
    keys: Sequence[str],
    *,
    merge: Merge | None = None,
    keeps: Sequence[str] = (),
) -> None:
    """Inserts rows; where `keys` are there already, the other columns that the rows have are replaced.

    Args:
        connection: in a transaction.
        model: the table.
        rows: all with the same columns.
        keys: the columns of a unique constraint.
        merge: turns (stored column, new value) into what is kept; the new value if None.
        keeps: columns of which a row that is there already keeps what it has.
    """
    if rows:
        changing = tuple(name for name in rows[0] if name not in keys and name not in keeps)
        connection.execute(_upsert(connection.dialect.name, model, tuple(keys), changing, merge), list(rows))


# To build such a statement takes far longer than to run it; there are about ten.
@cache
def _upsert(
    dialect: str, model: type[Base], keys: tuple[str, ...], changing: tuple[str, ...], merge: Merge | None
) -> Executable:
    statement = _insert(dialect, model)
    columns, new = model.__table__.columns, statement.excluded
    kept = {name: merge(columns[name], new[name]) if merge else new[name] for name in changing}
    return statement.on_conflict_do_update(index_elements=list(keys), set_=kept)


def _insert(dialect: str, model: type[Base]) -> sqlite.Insert | postgresql.Insert:
    table: Any = model.__table__
    return postgresql.insert(table) if dialect == "postgresql" else sqlite.insert(table)

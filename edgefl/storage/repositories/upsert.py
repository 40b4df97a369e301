"""Insert-or-update in the SQL dialect of the database."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

from sqlalchemy import Connection, Executable
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.sql.elements import ColumnElement

from edgefl.storage.tables import Base

UpsertRows = Sequence[Mapping[str, Any]]
MergeExpression = Callable[[Any, Any], ColumnElement[Any]]


def insert_new(connection: Connection, orm_class: type[Base], rows: UpsertRows, keys: Sequence[str]) -> None:
    """Inserts the rows whose `keys` are new; a replayed row changes nothing."""
    if rows:
        connection.execute(
            _insert(connection.dialect.name, orm_class).on_conflict_do_nothing(index_elements=list(keys)), list(rows)
        )


def upsert(
    connection: Connection,
    orm_class: type[Base],
    rows: UpsertRows,
    keys: Sequence[str],
    *,
    merge: MergeExpression | None = None,
    preserved_columns: Sequence[str] = (),
) -> None:
    """Inserts rows; where `keys` exist already, updates the other columns of the rows.

    Args:
        connection: in a transaction.
        orm_class: the table.
        rows: all with the same columns.
        keys: the columns of a unique constraint.
        merge: (stored column, new value) -> stored value; the new value if None.
        preserved_columns: columns that an existing row keeps.
    """
    if rows:
        changing = tuple(name for name in rows[0] if name not in keys and name not in preserved_columns)
        connection.execute(_upsert(connection.dialect.name, orm_class, tuple(keys), changing, merge), list(rows))


# Building such a statement takes far longer than running it; there are about ten.
@cache
def _upsert(
    dialect: str,
    orm_class: type[Base],
    keys: tuple[str, ...],
    updated_columns: tuple[str, ...],
    merge: MergeExpression | None,
) -> Executable:
    statement = _insert(dialect, orm_class)
    columns, new_columns = orm_class.__table__.columns, statement.excluded
    assignments = {
        name: merge(columns[name], new_columns[name]) if merge else new_columns[name] for name in updated_columns
    }
    return statement.on_conflict_do_update(index_elements=list(keys), set_=assignments)


def _insert(dialect: str, orm_class: type[Base]) -> sqlite.Insert | postgresql.Insert:
    table: Any = orm_class.__table__
    return postgresql.insert(table) if dialect == "postgresql" else sqlite.insert(table)

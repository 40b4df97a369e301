"""Writing of rows: values that any database can hold, and insert-or-update in its SQL dialect."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from enum import Enum
from functools import cache
from typing import Any

from sqlalchemy import Connection, Delete, Executable, Update, bindparam
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.sql.elements import ColumnElement

from edgefl.storage.tables import Base

MAX_DEPTH = 32
_INT64_LIMIT = 2**63

UpsertRows = Sequence[Mapping[str, Any]]
MergeExpression = Callable[[Any, Any], ColumnElement[Any]]


def to_storable(value: Any, *, depth: int = 0) -> Any:
    """Returns `value` in a form that a column or JSON can hold; what none can hold becomes None.

    Mappings become dicts with text keys, sequences lists, enums their values; text loses NULs and lone surrogates.
    """
    if isinstance(value, Enum):
        value = value.value
    if isinstance(value, str):
        return _clean_text(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, int) and not isinstance(value, bool):
        return value if -_INT64_LIMIT <= value < _INT64_LIMIT else None
    if value is None or isinstance(value, bool | bytes):
        return value
    return _to_storable_container(value, depth + 1)


def _to_storable_container(value: Any, depth: int) -> Any:
    if depth > MAX_DEPTH:
        return None
    if isinstance(value, Mapping):
        return {_clean_text(str(key)): to_storable(entry, depth=depth) for key, entry in value.items()}
    if isinstance(value, Sequence | set | frozenset):
        return [to_storable(entry, depth=depth) for entry in value]
    return _clean_text(str(value))


def _clean_text(text: str) -> str:
    if text.isascii() and "\0" not in text:
        return str(text)
    return text.encode(errors="replace").decode().replace("\0", "")


def to_columns(row: Any) -> dict[str, Any]:
    """Returns the fields of a dataclass, each by `to_storable`; ten times faster than `asdict`."""
    return {name: to_storable(getattr(row, name)) for name in row.__dataclass_fields__}


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


def execute_for_assignments(
    connection: Connection, statement: Update | Delete, run_id: str, assignment_ids: Collection[str]
) -> None:
    """Updates or deletes the rows of these assignments of a run."""
    columns = statement.table.c
    if assignment_ids:
        connection.execute(
            statement.where(columns.run_id == run_id, columns.assignment_id == bindparam("named")),
            [{"named": assignment_id} for assignment_id in assignment_ids],
        )

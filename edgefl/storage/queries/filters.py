"""History query filters and pagination."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from sqlalchemy import Select, tuple_

from edgefl.core.errors import UsageError
from edgefl.core.safe_parsing import parse_message
from edgefl.storage.queries.conditions import ColumnCondition

FIRST_CURSOR = ""
"""The cursor before the first row."""
MAX_CURSOR_CHARS = 400
CURSOR_COLUMNS = ("place_at", "place_of")
"""Names of the two cursor columns in a result."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryQuery:
    """Filters of a query; `after` is the cursor position in the kind's order, None the newest rows."""

    run_id: str | None = None
    device: str | None = None
    since: float | None = None
    until: float | None = None
    limit: int | None = None
    where: tuple[ColumnCondition, ...] = ()
    group_by: str = "device"
    after: tuple[Any, ...] | None = None

    def build_time_filter(self, time_column: Any) -> list[Any]:
        """Returns the bounds on a time."""
        bounds = []
        if self.since is not None:
            bounds.append(time_column >= self.since)
        if self.until is not None:
            bounds.append(time_column < self.until)
        return bounds

    def build_owner_filter(self, run_column: Any = None, device_column: Any = None) -> list[Any]:
        """Returns the bounds on run and device."""
        bounds = []
        if self.run_id is not None and run_column is not None:
            bounds.append(run_column == self.run_id)
        if self.device is not None and device_column is not None:
            bounds.append(device_column == self.device)
        return bounds


class NamedColumns(Protocol):
    """Columns by name: a mapping, or a table's own."""

    def __getitem__(self, name: str, /) -> Any: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedQuery:
    """A prepared query; `is_newest_first` when a limit selects the newest rows, newest first."""

    query: Select[Any]
    is_newest_first: bool
    is_paged: bool = True


def apply_query(
    query: Select[Any], criteria: HistoryQuery, order: Sequence[Any], columns: NamedColumns, *, is_descending: bool
) -> Select[Any]:
    """Returns the query with conditions, cursor position, order and limit.

    Args:
        query: with all other filters.
        criteria: to apply.
        order: two columns that identify a row, the first of them a time or a measure.
        columns: by the names that conditions use.
        is_descending: direction of the order.
    """
    query = query.where(*(condition.to_sql(columns[condition.column]) for condition in criteria.where))
    if criteria.after:
        row_position, page_position = tuple_(*order), tuple_(*criteria.after)
        query = query.where(row_position < page_position if is_descending else row_position > page_position)
    return query.order_by(*(column.desc() if is_descending else column for column in order)).limit(criteria.limit)


def build_timeline_query(
    query: Select[Any], criteria: HistoryQuery, order: Sequence[Any], columns: NamedColumns
) -> PreparedQuery:
    """Returns the query for rows in the order of time: the newest, or a page."""
    is_descending = criteria.after is None
    query = apply_query(
        query.add_columns(*_label_cursor_columns(order)), criteria, order, columns, is_descending=is_descending
    )
    return PreparedQuery(query=query, is_newest_first=is_descending)


def build_ranking_query(
    query: Select[Any], criteria: HistoryQuery, order: Sequence[Any], columns: NamedColumns
) -> PreparedQuery:
    """Returns the query for rows in descending order of a measure."""
    query = apply_query(
        query.add_columns(*_label_cursor_columns(order)), criteria, order, columns, is_descending=True
    )
    return PreparedQuery(query=query, is_newest_first=False)


def _label_cursor_columns(order: Sequence[Any]) -> list[Any]:
    return [column.label(name) for column, name in zip(order, CURSOR_COLUMNS, strict=True)]


def encode_cursor(values: Sequence[Any]) -> str:
    """Returns a cursor position as text for a URL."""
    return json.dumps(list(values))


def decode_cursor(text: str) -> tuple[Any, ...]:
    """Returns the position in a text of `encode_cursor`; an empty tuple for the beginning.

    Raises:
        UsageError: not a cursor.
    """
    if text == FIRST_CURSOR:
        return ()
    try:
        values = parse_message(text.encode()) if len(text) <= MAX_CURSOR_CHARS else None
    except ValueError:
        values = None
    is_valid = (
        isinstance(values, list)
        and len(values) == 2
        and isinstance(values[0], int | float)
        and isinstance(values[1], int | str)
    )
    if not is_valid or not isinstance(values, list):
        raise UsageError(f"a place in the history is what an answer before called `next`, got {text[:80]!r}")
    return tuple(values)

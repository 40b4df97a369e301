"""Filters of history queries: conditions that users type, such as `staleness>3`, and pagination.

Conditions are parsed into expressions, never into SQL text.
"""

from __future__ import annotations

import json
import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol

from sqlalchemy import Select, tuple_
from sqlalchemy.sql.elements import ColumnElement

from edgefl.core.errors import UsageError
from edgefl.core.safe_parsing import parse_message
from edgefl.storage.queries.columns import JSON_COLUMNS, get_columns, is_text_column

MAX_CONDITION_CHARS = 300
NULL_WORD = "null"

_CONDITION_PATTERN = re.compile(r"\s*(\w+)\s*(<=|>=|!=|<>|==|=|<|>|~)\s*(.*?)\s*\Z", re.DOTALL)
_OPERATORS: Mapping[str, Callable[[Any, Any], Any]] = MappingProxyType(
    {
        "=": operator.eq, "==": operator.eq, "!=": operator.ne, "<>": operator.ne, "<": operator.lt,
        "<=": operator.le, ">": operator.gt, ">=": operator.ge,
    }
)  # fmt: skip

FIRST_CURSOR = ""
"""The cursor before the first row."""
MAX_CURSOR_CHARS = 400
CURSOR_COLUMNS = ("place_at", "place_of")
"""Names of the two cursor columns in a result."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnCondition:
    """A condition on a column; `value` is None for `null`."""

    column: str
    comparison: str
    value: str | float | None

    def to_sql(self, column: Any) -> ColumnElement[bool]:
        """Returns the SQL condition on this column; `!=` also holds for NULL."""
        condition: ColumnElement[bool]
        if self.value is None:
            condition = column.is_(None) if self.comparison in {"=", "=="} else column.is_not(None)
        elif self.comparison == "~":
            condition = column.contains(self.value, autoescape=True)
        else:
            condition = _OPERATORS[self.comparison](column, self.value)
            if self.comparison in {"!=", "<>"}:
                condition = condition | column.is_(None)
        return condition


def parse_conditions(kind: str, group_by: str, texts: Sequence[str]) -> tuple[ColumnCondition, ...]:
    """Returns the conditions, all of which must hold.

    Raises:
        UsageError: an invalid condition, or a column that this kind does not have.
    """
    return tuple(_parse_condition(kind, group_by, text) for text in texts)


def _parse_condition(kind: str, group_by: str, text: str) -> ColumnCondition:
    match = _CONDITION_PATTERN.match(text) if len(text) <= MAX_CONDITION_CHARS else None
    if match is None:
        raise UsageError(
            f"a condition is COLUMN, one of = != < <= > >= ~, and a value, such as staleness>3, got {text[:80]!r}"
        )
    name, sign, value = match.groups()
    columns = [column for column in get_columns(kind, group_by) if column not in JSON_COLUMNS]
    if name not in columns:
        raise UsageError(f"{kind} cannot be chosen by {name!r}; they have {', '.join(columns)}")
    return ColumnCondition(
        column=name, comparison=sign, value=_parse_value(name, sign, value, is_textual=is_text_column(kind, name))
    )


def _parse_value(name: str, comparison: str, text: str, *, is_textual: bool) -> str | float | None:
    if len(text) >= 2 and text[0] == text[-1] and text[0] in "'\"":
        text, is_quoted = text[1:-1], True
    else:
        is_quoted = False
    if text.lower() == NULL_WORD and not is_quoted:
        if comparison not in {"=", "==", "!=", "<>"}:
            raise UsageError(f"{NULL_WORD} can only be compared by = and !=, got {name}{comparison}{text}")
        return None
    if is_textual:
        return text.replace("\0", "")
    if comparison == "~":
        raise UsageError(f"~ asks whether a text holds another; {name} is a number")
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise UsageError(f"{name} is a number, got {text[:80]!r}")
    return int(number) if number.is_integer() and abs(number) < 2**53 else number


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

    def build_filters(self, *, time: Any = None, run: Any = None, device: Any = None) -> list[Any]:
        """Returns the bounds on these columns, of which a kind may lack some."""
        bounds = [
            (time, self.since, operator.ge), (time, self.until, operator.lt), (run, self.run_id, operator.eq),
            (device, self.device, operator.eq),
        ]  # fmt: skip
        return [
            compare(column, value) for column, value, compare in bounds if column is not None and value is not None
        ]

    def build_conditions(self, columns: NamedColumns) -> list[Any]:
        """Returns the typed conditions on these columns."""
        return [condition.to_sql(columns[condition.column]) for condition in self.where]


class NamedColumns(Protocol):
    """Columns by name: a mapping, or a table's own."""

    def __getitem__(self, name: str, /) -> Any: ...


def build_paged_query(
    query: Select[Any],
    criteria: HistoryQuery,
    order: Sequence[Any],
    columns: NamedColumns,
    *,
    is_ranking: bool = False,
    has_cursor: bool = True,
) -> Select[Any]:
    """Returns the query with conditions, cursor position, order and limit: the newest rows, or a page.

    Args:
        query: with all other filters.
        criteria: to apply.
        order: two columns that identify a row, the first of them a number that grows, a time or a measure.
        columns: by the names that conditions use.
        is_ranking: descending on every page; else only the newest rows are.
        has_cursor: it returns the cursor's columns, too.
    """
    if has_cursor:
        query = query.add_columns(*(column.label(name) for column, name in zip(order, CURSOR_COLUMNS, strict=True)))
    is_descending = is_ranking or criteria.after is None
    query = query.where(*criteria.build_conditions(columns))
    if criteria.after:
        row_position, page_position = tuple_(*order), tuple_(*criteria.after)
        query = query.where(row_position < page_position if is_descending else row_position > page_position)
    return query.order_by(*(column.desc() if is_descending else column for column in order)).limit(criteria.limit)


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

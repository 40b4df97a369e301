"""User-typed conditions on columns, such as `staleness>3`: parsed into expressions, never into SQL text."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from sqlalchemy.sql.elements import ColumnElement

from edgefl.core.errors import UsageError
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

"""Conditions on columns that a person types, such as `staleness>3`: parsed into expressions, never into SQL text."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from sqlalchemy.sql.elements import ColumnElement

from edgefl.errors import UsageError
from edgefl.storage.columns import STRUCTURED, columns_of, is_text

MAX_LENGTH = 300
NOTHING = "null"

_CONDITION = re.compile(r"\s*(\w+)\s*(<=|>=|!=|<>|==|=|<|>|~)\s*(.*?)\s*\Z", re.DOTALL)
_OPERATORS: Mapping[str, Callable[[Any, Any], Any]] = MappingProxyType(
    {
        "=": operator.eq, "==": operator.eq, "!=": operator.ne, "<>": operator.ne, "<": operator.lt,
        "<=": operator.le, ">": operator.gt, ">=": operator.ge,
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """`value` is None for `null`."""

    column: str
    sign: str
    value: str | float | None

    def on(self, column: Any) -> ColumnElement[bool]:
        """Returns the condition on this column; `!=` also holds where nothing is known."""
        found: ColumnElement[bool]
        if self.value is None:
            found = column.is_(None) if self.sign in {"=", "=="} else column.is_not(None)
        elif self.sign == "~":
            found = column.contains(self.value, autoescape=True)
        else:
            found = _OPERATORS[self.sign](column, self.value)
            if self.sign in {"!=", "<>"}:
                found = found | column.is_(None)
        return found


def parse_conditions(kind: str, by: str, texts: Sequence[str]) -> tuple[Condition, ...]:
    """Returns the conditions; all of them are to hold.

    Raises:
        UsageError: one of them is none, or names a column that this kind does not have.
    """
    return tuple(_parsed(kind, by, text) for text in texts)


def _parsed(kind: str, by: str, text: str) -> Condition:
    match = _CONDITION.match(text) if len(text) <= MAX_LENGTH else None
    if match is None:
        raise UsageError(
            f"a condition is COLUMN, one of = != < <= > >= ~, and a value, such as staleness>3, got {text[:80]!r}"
        )
    name, sign, value = match.groups()
    columns = [column for column in columns_of(kind, by) if column not in STRUCTURED]
    if name not in columns:
        raise UsageError(f"{kind} cannot be chosen by {name!r}; they have {', '.join(columns)}")
    return Condition(column=name, sign=sign, value=_value(name, sign, value, text_wanted=is_text(kind, name)))


def _value(name: str, sign: str, text: str, *, text_wanted: bool) -> str | float | None:
    if len(text) >= 2 and text[0] == text[-1] and text[0] in "'\"":
        text, quoted = text[1:-1], True
    else:
        quoted = False
    if text.lower() == NOTHING and not quoted:
        if sign not in {"=", "==", "!=", "<>"}:
            raise UsageError(f"{NOTHING} can only be compared by = and !=, got {name}{sign}{text}")
        return None
    if text_wanted:
        return text.replace("\0", "")
    if sign == "~":
        raise UsageError(f"~ asks whether a text holds another; {name} is a number")
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise UsageError(f"{name} is a number, got {text[:80]!r}")
    return int(number) if number.is_integer() and abs(number) < 2**53 else number

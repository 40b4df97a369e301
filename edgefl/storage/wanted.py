"""What somebody wants of the history, and how a query is cut to it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from sqlalchemy import Select, tuple_

from edgefl.errors import UsageError
from edgefl.storage.where import Condition
from edgefl.untrusted import parse_message

FIRST = ""
"""The place before the first row."""
MAX_PLACE = 400
PLACES = ("place_at", "place_of")
"""What the two columns of a row's place are called in a result."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Filters. `after` is the place that a page begins behind, in the kind's own order; None asks for the newest."""

    run_id: str | None = None
    device: str | None = None
    since: float | None = None
    until: float | None = None
    limit: int | None = None
    where: tuple[Condition, ...] = ()
    by: str = "device"
    after: tuple[Any, ...] | None = None

    def within(self, when: Any) -> list[Any]:
        """Returns the bounds on a time."""
        bounds = []
        if self.since is not None:
            bounds.append(when >= self.since)
        if self.until is not None:
            bounds.append(when < self.until)
        return bounds

    def among(self, run_id: Any = None, device_id: Any = None) -> list[Any]:
        """Returns the bounds on run and device."""
        bounds = []
        if self.run_id is not None and run_id is not None:
            bounds.append(run_id == self.run_id)
        if self.device is not None and device_id is not None:
            bounds.append(device_id == self.device)
        return bounds


class Columns(Protocol):
    """Columns by name: a mapping, or a table's own."""

    def __getitem__(self, name: str, /) -> Any: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A query that is ready; `is_timeline` when a limit has left the newest rows, newest first."""

    query: Select[Any]
    is_timeline: bool
    is_paged: bool = True


def cut(query: Select[Any], wanted: Wanted, order: Sequence[Any], columns: Columns, *, falls: bool) -> Select[Any]:
    """Returns the query with the conditions, from the wanted place on, in order, and limited.

    Args:
        query: with all other filters.
        wanted: what to cut to.
        order: two columns that tell every row from every other, the first of them a time or a measure.
        columns: by the names that conditions use.
        falls: whether the order does.
    """
    query = query.where(*(condition.on(columns[condition.column]) for condition in wanted.where))
    if wanted.after:
        here, there = tuple_(*order), tuple_(*wanted.after)
        query = query.where(here < there if falls else here > there)
    return query.order_by(*(column.desc() if falls else column for column in order)).limit(wanted.limit)


def timeline(query: Select[Any], wanted: Wanted, order: Sequence[Any], columns: Columns) -> Question:
    """Returns the question for rows in the order of time: the newest of them, or a page of all."""
    falls = wanted.after is None
    query = cut(query.add_columns(*_places(order)), wanted, order, columns, falls=falls)
    return Question(query=query, is_timeline=falls)


def ranking(query: Select[Any], wanted: Wanted, order: Sequence[Any], columns: Columns) -> Question:
    """Returns the question for rows in the falling order of a measure."""
    query = cut(query.add_columns(*_places(order)), wanted, order, columns, falls=True)
    return Question(query=query, is_timeline=False)


def _places(order: Sequence[Any]) -> list[Any]:
    return [column.label(name) for column, name in zip(order, PLACES, strict=True)]


def place_text(values: Sequence[Any]) -> str:
    """Returns a place as text for the way through a URL."""
    return json.dumps(list(values))


def parse_place(text: str) -> tuple[Any, ...]:
    """Returns the place in a text of `place_text`; an empty tuple for the beginning.

    Raises:
        UsageError: it is none.
    """
    if text == FIRST:
        return ()
    try:
        values = parse_message(text.encode()) if len(text) <= MAX_PLACE else None
    except ValueError:
        values = None
    is_sound = (
        isinstance(values, list)
        and len(values) == 2
        and isinstance(values[0], int | float)
        and isinstance(values[1], int | str)
    )
    if not is_sound or not isinstance(values, list):
        raise UsageError(f"a place in the history is what an answer before called `next`, got {text[:80]!r}")
    return tuple(values)

"""History rows in the columns of `COLUMNS`: all of them, the newest, or page by page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypedDict, Unpack

from sqlalchemy import Connection, select

from edgefl.core.errors import NotFoundError, UsageError
from edgefl.core.types import Json
from edgefl.storage.queries.aggregates import AGGREGATE_QUERIES
from edgefl.storage.queries.columns import AGGREGATE_KINDS, COLUMNS, GROUPINGS, get_columns
from edgefl.storage.queries.conditions import parse_conditions
from edgefl.storage.queries.filters import CURSOR_COLUMNS, HistoryQuery, PreparedQuery, decode_cursor, encode_cursor
from edgefl.storage.queries.rows import ROW_QUERIES
from edgefl.storage.store import Store
from edgefl.storage.tables import RunTable

LATEST = "latest"
PAGE_ROWS = 5_000
MIN_TIME, MAX_TIME = -62_135_596_800.0, 253_402_300_799.0
"""The years 1 to 9999."""
_QUERY_BUILDERS = {**ROW_QUERIES, **AGGREGATE_QUERIES}


class HistoryFilters(TypedDict, total=False):
    """Filters of history rows; absent or None selects all.

    run: a run's id, the beginning of one, its name (the newest run of that name), or `latest`.
    device: a device id; for slow rounds, the device that they waited for.
    since: rows from this time on, unix seconds; for devices, those seen since; sums go by whole days.
    until: rows before this time.
    limit: how many rows at most.
    where: conditions such as `staleness>3`; all of them must hold.
    by: grouping of sums, of `GROUPINGS`.
    """

    run: str | None
    device: str | None
    since: float | None
    until: float | None
    limit: int | None
    where: Sequence[str]
    by: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryPage:
    """A page of rows; `next_cursor` is the position of the next page, None at the end."""

    rows: list[Json]
    next_cursor: str | None


def read_history(store: Store, kind: str, **filters: Unpack[HistoryFilters]) -> list[Json]:
    """Returns the newest rows of one kind, oldest first; devices by name, slow rounds slowest first.

    Raises:
        UsageError: no such kind, or an invalid filter.
        NotFoundError: no such run.
    """
    with store.database.read() as connection:
        criteria = _make_query(connection, kind, filters)
        rows, prepared = _read_rows(connection, kind, criteria)
    if prepared.is_newest_first:
        rows.reverse()
    return _select_columns(rows, kind, criteria)


def read_history_page(store: Store, kind: str, cursor: str, **filters: Unpack[HistoryFilters]) -> HistoryPage:
    """Returns the rows after a cursor, oldest first (slow rounds slowest first), up to `PAGE_ROWS`.

    Args:
        store: to query.
        kind: a key of `COLUMNS`.
        cursor: empty for the first page, else the `next` of the page before.
        filters: see `HistoryFilters`; a limit can only make the page smaller.

    Raises:
        UsageError: as `read_history`; or an invalid cursor.
        NotFoundError: no such run.
    """
    size = min(filters.get("limit") or PAGE_ROWS, PAGE_ROWS)
    with store.database.read() as connection:
        criteria = replace(_make_query(connection, kind, filters), after=decode_cursor(cursor), limit=size)
        if kind in AGGREGATE_KINDS or kind in {
            "devices",
            "accuracy",
        }:  # bounded by the devices, days or rounds of a run
            criteria = replace(criteria, limit=None)
        rows, prepared = _read_rows(connection, kind, criteria)
    is_last = criteria.limit is None or len(rows) < criteria.limit or not prepared.is_paged
    next_cursor = None if is_last or not rows else encode_cursor([rows[-1][name] for name in CURSOR_COLUMNS])
    return HistoryPage(rows=_select_columns(rows, kind, criteria), next_cursor=next_cursor)


def read_history_pages(store: Store, kind: str, **filters: Unpack[HistoryFilters]) -> Iterator[list[Json]]:
    """Yields all rows page by page, so that a long history is never in memory whole."""
    cursor: str | None = ""
    while cursor is not None:
        page = read_history_page(store, kind, cursor, **filters)
        yield page.rows
        cursor = page.next_cursor


def find_run_id(store: Store, text: str) -> str:
    """Returns the id of a run given by its id, a prefix of it, its name, or `latest`.

    Raises:
        NotFoundError: none or several match.
    """
    with store.database.read() as connection:
        return _find_run_id(connection, text)


def _make_query(connection: Connection, kind: str, filters: HistoryFilters) -> HistoryQuery:
    group_by, limit, run = filters.get("by") or GROUPINGS[0], filters.get("limit"), filters.get("run")
    if kind not in COLUMNS:
        raise UsageError(f"history has no {kind!r}; it has {', '.join(COLUMNS)}")
    if limit is not None and limit < 1:
        raise UsageError(f"limit must be at least 1, got {limit}")
    if group_by not in GROUPINGS or (filters.get("by") and kind not in AGGREGATE_KINDS):
        raise UsageError(
            f"{', '.join(sorted(AGGREGATE_KINDS))} can be by {', '.join(GROUPINGS)}; got {kind} by {group_by!r}"
        )
    for name in ("since", "until"):
        time_s = filters.get(name)
        if time_s is not None and not MIN_TIME <= time_s <= MAX_TIME:  # type: ignore[operator] # both are numbers
            raise UsageError(f"{name} must be a time in unix seconds, got {time_s!r}")
    conditions = parse_conditions(kind, group_by, filters.get("where") or ())
    if kind == "accuracy":
        run = run or LATEST
        if filters.get("device"):
            raise UsageError("the accuracy is the model's, not a device's; `edgefl history evaluations` has theirs")
    return HistoryQuery(
        run_id=None if run is None else _find_run_id(connection, run),
        device=filters.get("device"),
        since=filters.get("since"),
        until=filters.get("until"),
        limit=limit,
        where=conditions,
        group_by=group_by,
    )


def _read_rows(connection: Connection, kind: str, criteria: HistoryQuery) -> tuple[list[Any], PreparedQuery]:
    prepared = _QUERY_BUILDERS[kind](connection, criteria)
    return list(connection.execute(prepared.query).mappings()), prepared


def _select_columns(rows: Sequence[Any], kind: str, criteria: HistoryQuery) -> list[Json]:
    names = get_columns(kind, criteria.group_by)
    return [{name: row[name] for name in names} for row in rows]


def _find_run_id(connection: Connection, text: str) -> str:
    newest = select(RunTable.run_id).order_by(RunTable.submitted_at.desc(), RunTable.run_id.desc())
    if text == LATEST:
        queries = [newest.limit(1)]
    else:
        by_prefix = newest.where(RunTable.run_id.startswith(text, autoescape=True)).limit(2)
        queries = [newest.where(RunTable.run_id == text), newest.where(RunTable.name == text).limit(1), by_prefix]
    for query in queries:
        run_ids = list(connection.execute(query).scalars())
        if len(run_ids) > 1:
            raise NotFoundError(
                f"several runs begin with {text!r}, among them {' and '.join(run_ids)}; say more of it"
            )
        if run_ids:
            return str(run_ids[0])
    raise NotFoundError("there is no run yet" if text == LATEST else f"no run {text!r}; `edgefl run list` shows them")

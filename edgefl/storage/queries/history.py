"""History of the store: rows in the columns of `COLUMNS`, the details of one round, measured step rates."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Unpack

from sqlalchemy import Connection, select

from edgefl.core.analyses import ANALYSES
from edgefl.core.errors import NotFoundError, UsageError
from edgefl.core.safe_parsing import is_int64
from edgefl.core.types import Json, UpdateStatus
from edgefl.storage.queries.columns import (
    AGGREGATE_KINDS,
    COLUMNS,
    GROUPINGS,
    SELF_ORDERED_KINDS,
    HistoryFilters,
    get_columns,
)
from edgefl.storage.queries.filters import (
    CURSOR_COLUMNS,
    HistoryQuery,
    decode_cursor,
    encode_cursor,
    parse_conditions,
)
from edgefl.storage.queries.rows import QUERIES
from edgefl.storage.store import Store
from edgefl.storage.tables import RoundTable, RunTable, UpdateTable

LATEST = "latest"
PAGE_ROWS = 5_000
MIN_TIME, MAX_TIME = -62_135_596_800.0, 253_402_300_799.0
"""The years 1 to 9999."""

MAX_MEASURED_UPDATES = 2000


def read_history(store: Store, kind: str, **filters: Unpack[HistoryFilters]) -> list[Json]:
    """Returns the newest rows of one kind, oldest first; devices by name, slow rounds slowest first.

    Raises:
        UsageError: no such kind, or an invalid filter.
        NotFoundError: no such run.
    """
    with store.database.read() as connection:
        criteria = _make_query(connection, kind, filters)
        rows = connection.execute(QUERIES[kind](connection, criteria)).mappings().all()
    is_time_ordered = kind not in SELF_ORDERED_KINDS or (kind in AGGREGATE_KINDS and criteria.group_by != "device")
    return _select_columns(rows[::-1] if is_time_ordered else rows, kind, criteria)


def read_history_page(
    store: Store, kind: str, cursor: str, **filters: Unpack[HistoryFilters]
) -> tuple[list[Json], str | None]:
    """Returns the rows after a cursor, and the cursor of the next page, None at the end.

    They are the oldest first (slow rounds slowest first), up to `PAGE_ROWS`.

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
        if kind in {"devices", "accuracy", *AGGREGATE_KINDS}:  # bounded by the devices, days or rounds of a run
            criteria = replace(criteria, limit=None)
        rows = connection.execute(QUERIES[kind](connection, criteria)).mappings().all()
    is_last = criteria.limit is None or len(rows) < criteria.limit
    next_cursor = None if is_last or not rows else encode_cursor([rows[-1][name] for name in CURSOR_COLUMNS])
    return _select_columns(rows, kind, criteria), next_cursor


def read_history_pages(store: Store, kind: str, **filters: Unpack[HistoryFilters]) -> Iterator[list[Json]]:
    """Yields all rows page by page, so that a long history is never in memory whole."""
    cursor: str | None = ""
    while cursor is not None:
        rows, cursor = read_history_page(store, kind, cursor, **filters)
        yield rows


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


def _select_columns(rows: Sequence[Any], kind: str, criteria: HistoryQuery) -> list[Json]:
    names = get_columns(kind, criteria.group_by)
    return [{name: row[name] for name in names} for row in rows]


def _find_run_id(connection: Connection, text: str) -> str:
    newest = select(RunTable.run_id).order_by(RunTable.sequence.desc(), RunTable.run_id.desc())
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


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundDetails:
    """A round, its run, and its assignments by end time, unfinished ones last."""

    run: Json
    round: Json
    assignments: list[Json]


def get_round_details(store: Store, run: str, number: int | None = None) -> RoundDetails:
    """Returns the details of a round, by default the slowest; `run` as in `find_run_id`.

    Raises:
        NotFoundError: there is no such run, or it has no such round.
    """
    run_id = find_run_id(store, run)
    number = _find_slowest_round(store, run_id) if number is None else number
    round_number = number if is_int64(number) else -1  # a number beyond the database's range matches no round
    is_in_round = (UpdateTable.run_id == run_id, UpdateTable.round == round_number)
    with store.database.read() as connection:
        run_row = connection.execute(select(RunTable.__table__).where(RunTable.run_id == run_id)).mappings().one()
        query = select(RoundTable.__table__).where(RoundTable.run_id == run_id, RoundTable.round == round_number)
        row = connection.execute(query).mappings().first()
        rows = connection.execute(select(UpdateTable.__table__).where(*is_in_round)).mappings().all()
    if row is None:
        raise NotFoundError(f"run {run_id} has no round {number}; it has {run_row['rounds']} so far")
    assignments = [dict(row_values) for row_values in rows]
    assignments.sort(
        key=lambda row_values: (
            row_values["ended_at"] is None,
            row_values["ended_at"] or 0.0,
            row_values["assignment_id"],
        )
    )
    return RoundDetails(run=dict(run_row), round=dict(row), assignments=assignments)


def _find_slowest_round(store: Store, run_id: str) -> int:
    query = select(RoundTable.round).where(RoundTable.run_id == run_id, RoundTable.seconds.is_not(None))
    number = store.database.read_value(query.order_by(RoundTable.seconds.desc(), RoundTable.round).limit(1))
    if number is None:
        raise NotFoundError(f"run {run_id} has closed no round yet")
    return int(number)


def get_seconds_per_iteration(store: Store, task: str) -> dict[str, tuple[float, str]]:
    """Returns seconds per iteration and run of each device's newest used update of a task; analyses train nothing."""
    query = (
        select(UpdateTable.device_id, UpdateTable.compute_s, UpdateTable.iterations, UpdateTable.run_id)
        .join(RunTable, RunTable.run_id == UpdateTable.run_id)
        .where(RunTable.task == task, RunTable.strategy.not_in(ANALYSES))
        .where(UpdateTable.outcome == str(UpdateStatus.USED), UpdateTable.iterations > 0)
        .order_by(UpdateTable.id.desc())
        .limit(MAX_MEASURED_UPDATES)
    )
    rates: dict[str, tuple[float, str]] = {}
    for device_id, compute_s, iterations, run_id in store.database.read_rows(query):
        if compute_s is not None and iterations:
            rates.setdefault(device_id, (compute_s / iterations, run_id))
    return rates

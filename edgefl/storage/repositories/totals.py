"""Derived columns: sums over assignments, and the straggler of each round.

Sums are by run, device and day, and by each alone. `update_totals` compares the rows before and after a change and
adds the difference, so it is independent of the kind and number of changes. Sums stay when their rows are pruned.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any

from sqlalchemy import Connection, Integer, Row, case, cast, delete, func, insert, or_, select, update
from sqlalchemy.sql.elements import ColumnElement

from edgefl.core.types import UpdateStatus
from edgefl.storage.repositories.row_writing import upsert
from edgefl.storage.tables import Base, DayTotalTable, DeviceTotalTable, RunTotalTable, TotalTable, UpdateTable

NO_STRAGGLER: Mapping[str, Any] = MappingProxyType({"waited_for": None, "waited_s": None, "waited_update_id": None})
"""Columns of a round that waited for nobody."""

TOTAL_KEYS: Mapping[type[Base], tuple[str, ...]] = MappingProxyType(
    {
        TotalTable: ("run_id", "device_id", "day"),
        RunTotalTable: ("run_id",),
        DeviceTotalTable: ("device_id",),
        DayTotalTable: ("day",),
    }
)
"""Tables of sums and their keys; the first has those of all others."""
OUTCOME_COLUMNS = MappingProxyType({f"num_{outcome}": str(outcome) for outcome in UpdateStatus})
_COLUMN_BY_OUTCOME = {outcome: name for name, outcome in OUTCOME_COLUMNS.items()}
SUM_COLUMNS = (
    "iterations", "num_examples", "compute_s", "send_s", "wait_s", "bytes_up", "bytes_down", "energy_j",
)  # fmt: skip
MAX_COLUMNS = MappingProxyType({"max_staleness": "staleness", "max_temperature_c": "max_temperature_c"})
UNKNOWN_DAY = ""

_FULL_KEY = TOTAL_KEYS[TotalTable]
_SOURCE_COLUMNS: tuple[Any, ...] = (
    UpdateTable.assignment_id, UpdateTable.device_id, UpdateTable.dispatched_at, UpdateTable.received_at,
    UpdateTable.outcome, UpdateTable.staleness, UpdateTable.iterations, UpdateTable.num_examples,
    UpdateTable.compute_s, UpdateTable.send_s, UpdateTable.wait_s, UpdateTable.bytes_up, UpdateTable.bytes_down,
    UpdateTable.energy_j, UpdateTable.max_temperature_c,
)  # fmt: skip
_CHUNK = 500
_TotalValues = dict[str, Any]
_TotalsByKey = dict[tuple[str, ...], _TotalValues]


def find_stragglers(
    connection: Connection, run_id: str, started: Mapping[int, float], closed: Mapping[int, float]
) -> dict[int, Mapping[str, Any]]:
    """Returns `find_straggler` of stored rounds, by number; `started` and `closed` are their times."""
    columns = (
        UpdateTable.round, UpdateTable.id, UpdateTable.assignment_id, UpdateTable.device_id, UpdateTable.outcome,
        UpdateTable.base_version, UpdateTable.applied_version, UpdateTable.dispatched_at, UpdateTable.ended_at,
    )  # fmt: skip
    rows: dict[int, list[Any]] = {number: [] for number in closed}
    for row in connection.execute(
        select(*columns).where(UpdateTable.run_id == run_id, UpdateTable.round.in_(list(closed)))
    ):
        rows[row.round].append(row)
    return {number: find_straggler(rows[number], closed_at, started[number]) for number, closed_at in closed.items()}


def find_straggler(rows: Sequence[Any], closed_at: float, started_at: float = 0.0) -> Mapping[str, Any]:
    """Returns the columns of a round's row about its straggler; an asynchronous round has none.

    It is the last assignment to end; the wait lasts from when half of them had ended until it did.
    A round is synchronous when all its used updates were dispatched with one version and applied to the same one.
    Arrivals after it had closed were not waited for. The wait does not begin before the round: a resumed run may
    have had updates for it long before.
    """
    used_rows = [row for row in rows if row.outcome == UpdateStatus.USED]
    if len({version for row in used_rows for version in (row.base_version, row.applied_version)}) > 1:
        return NO_STRAGGLER
    ended_rows = sorted(
        (row for row in rows if row.ended_at is not None and row.ended_at <= closed_at),
        key=lambda row: (row.ended_at, row.assignment_id),
    )
    if not ended_rows:
        return NO_STRAGGLER
    last, half = ended_rows[-1], ended_rows[(len(ended_rows) - 1) // 2]
    since = half.ended_at if len(ended_rows) > 1 else last.dispatched_at
    seconds = 0.0 if since is None else max(0.0, last.ended_at - max(since, started_at))
    return {"waited_for": last.device_id, "waited_s": seconds, "waited_update_id": last.id}


@contextmanager
def update_totals(
    connection: Connection, run_id: str, assignment_ids: Sequence[str], *, should_subtract_deleted: bool = False
) -> Iterator[None]:
    """Applies the block's changes to the rows of these assignments to the sums, in the same transaction.

    With `should_subtract_deleted` deleted rows count as never dispatched; else sums keep the parts of deleted rows.
    """
    before = _read_rows(connection, run_id, assignment_ids)
    yield
    after = _read_rows(connection, run_id, assignment_ids)
    _apply_changes(connection, run_id, before, after, should_subtract_deleted=should_subtract_deleted)


def rebuild_totals(connection: Connection) -> None:
    """Recomputes all sums from the rows of `updates`; those of pruned rows are lost."""
    for table in TOTAL_KEYS:
        connection.execute(delete(table))
    columns = ["run_id", "device_id", "day", *_TOTAL_COLUMNS]
    day = _build_day_expression(connection)
    rows = select(UpdateTable.run_id, UpdateTable.device_id, day, *_build_total_expressions().values()).group_by(
        UpdateTable.run_id, UpdateTable.device_id, day
    )
    connection.execute(insert(TotalTable).from_select(columns, rows))
    merged = build_merged_columns(TotalTable)
    for table, keys in TOTAL_KEYS.items():
        if table is not TotalTable:
            group_columns = [getattr(TotalTable, key) for key in keys]
            merge_query = select(*group_columns, *merged.values()).group_by(*group_columns)
            connection.execute(insert(table).from_select([*keys, *_TOTAL_COLUMNS], merge_query))


def build_merged_columns(table: Any) -> dict[str, ColumnElement[Any]]:
    """Returns the expression of each sum over several rows of a table of sums."""
    return {
        name: (func.max if name in MAX_COLUMNS else func.sum)(getattr(table, name)).label(name)
        for name in _TOTAL_COLUMNS
    }


def format_day(at: float | None) -> str:
    """Returns the day of a time, such as 2026-01-31 in UTC; empty for None."""
    return UNKNOWN_DAY if at is None else datetime.fromtimestamp(int(at), tz=UTC).strftime("%Y-%m-%d")


def _read_rows(connection: Connection, run_id: str, assignment_ids: Sequence[str]) -> dict[str, Row[Any]]:
    rows: dict[str, Row[Any]] = {}
    for start in range(0, len(assignment_ids), _CHUNK):
        chunk = assignment_ids[start : start + _CHUNK]
        query = select(*_SOURCE_COLUMNS).where(UpdateTable.run_id == run_id, UpdateTable.assignment_id.in_(chunk))
        rows |= {row[0]: row for row in connection.execute(query)}
    return rows


def _apply_changes(
    connection: Connection,
    run_id: str,
    before: Mapping[str, Row[Any]],
    after: Mapping[str, Row[Any]],
    *,
    should_subtract_deleted: bool,
) -> None:
    changes: _TotalsByKey = defaultdict(_make_empty_totals)
    lowered_keys = set()
    for assignment_id in before.keys() - after.keys() if should_subtract_deleted else ():
        deleted_row = before[assignment_id]
        _add_row(changes[_get_total_key(run_id, deleted_row)], deleted_row, -1)
        lowered_keys.add(_get_total_key(run_id, deleted_row))
    for assignment_id, row in after.items():
        old = before.get(assignment_id)
        if old is not None and tuple(old) == tuple(row):
            continue
        if old is not None:
            _add_row(changes[_get_total_key(run_id, old)], old, -1)
            if any(_has_decreased(getattr(old, name), getattr(row, name)) for name in MAX_COLUMNS.values()):
                lowered_keys.add(_get_total_key(run_id, old))
        _add_row(changes[_get_total_key(run_id, row)], row, 1)
    for table, keys in TOTAL_KEYS.items():
        sums = changes if table is TotalTable else _group_totals([_FULL_KEY.index(key) for key in keys], changes)
        _write_totals(connection, table, keys, sums)
    for key in lowered_keys:
        _update_maxima(connection, key)


def _get_total_key(run_id: str, row: Row[Any]) -> tuple[str, str, str]:
    time_s = row.dispatched_at if row.dispatched_at is not None else row.received_at
    return run_id, row.device_id, format_day(time_s)


def _make_empty_totals() -> _TotalValues:
    return dict.fromkeys(_TOTAL_COLUMNS, 0) | {"energy_j": None} | dict.fromkeys(MAX_COLUMNS)


def _add_row(sums: _TotalValues, row: Row[Any], sign: int) -> None:
    sums["num_assignments"] += sign
    if row.outcome is not None:
        sums[_COLUMN_BY_OUTCOME[row.outcome]] += sign
    for name in SUM_COLUMNS:
        value = getattr(row, name)
        if value is not None:
            sums[name] = (sums[name] or 0) + sign * value
    if row.staleness:
        sums["num_stale"] += sign
        sums["sum_staleness"] += sign * row.staleness
    if sign > 0:
        for name, source_name in MAX_COLUMNS.items():
            sums[name] = _max_known(sums[name], getattr(row, source_name))


def _max_known(*values: Any) -> Any:
    return max((value for value in values if value is not None), default=None)


def _has_decreased(old: Any, new: Any) -> bool:
    return old is not None and (new is None or new < old)


def _group_totals(places: Sequence[int], changes: _TotalsByKey) -> _TotalsByKey:
    groups: _TotalsByKey = defaultdict(_make_empty_totals)
    for key, sums in changes.items():
        group = groups[tuple(key[index] for index in places)]
        for name, value in sums.items():
            if value is not None:
                group[name] = _max_known(group[name], value) if name in MAX_COLUMNS else (group[name] or 0) + value
    return groups


def _write_totals(connection: Connection, table: type[Base], keys: Sequence[str], changes: _TotalsByKey) -> None:
    rows: list[_TotalValues] = [dict(zip(keys, key, strict=True)) | sums for key, sums in changes.items()]
    upsert(connection, table, rows, keys, merge=_merge_total)
    if any(row["num_assignments"] < 0 for row in rows):  # assignments may have moved to another day
        connection.execute(delete(table).where(table.__table__.c.num_assignments <= 0))


def _merge_total(stored: Any, new: Any) -> ColumnElement[Any]:
    if stored.name in MAX_COLUMNS:
        return case((or_(stored.is_(None), new > stored), new), else_=stored)
    if stored.name == "energy_j":
        return func.coalesce(stored + new, stored, new)
    total: ColumnElement[Any] = stored + new
    return total


def _update_maxima(connection: Connection, key: tuple[str, ...]) -> None:
    """Recomputes the maxima after one of them fell, as a re-recorded row may cause."""
    run_id, device_id, day = key
    is_in_group = (
        UpdateTable.run_id == run_id,
        UpdateTable.device_id == device_id,
        _build_day_expression(connection) == day,
    )
    maxima = connection.execute(
        select(*(func.max(getattr(UpdateTable, source_name)) for source_name in MAX_COLUMNS.values())).where(
            *is_in_group
        )
    )
    values = dict(zip(MAX_COLUMNS, maxima.one(), strict=True))
    for table, keys in TOTAL_KEYS.items():
        key_values = dict(zip(_FULL_KEY, key, strict=True))
        if table is not TotalTable:
            merge_query = select(*(func.max(getattr(TotalTable, name)) for name in MAX_COLUMNS)).where(
                *(getattr(TotalTable, name) == key_values[name] for name in keys)
            )
            values = dict(zip(MAX_COLUMNS, connection.execute(merge_query).one(), strict=True))
        conditions = [table.__table__.c[name] == key_values[name] for name in keys]
        connection.execute(update(table).where(*conditions).values(**values))


def _build_total_expressions() -> dict[str, ColumnElement[Any]]:
    stale = UpdateTable.staleness > 0
    return {
        "num_assignments": func.count(),
        **{name: func.count(case((UpdateTable.outcome == outcome, 1))) for name, outcome in OUTCOME_COLUMNS.items()},
        "num_stale": func.count(case((stale, 1))),
        "sum_staleness": func.coalesce(func.sum(UpdateTable.staleness), 0),
        **{
            name: func.coalesce(func.sum(getattr(UpdateTable, name)), 0) for name in SUM_COLUMNS if name != "energy_j"
        },
        "energy_j": func.sum(UpdateTable.energy_j),
        **{name: func.max(getattr(UpdateTable, source_name)) for name, source_name in MAX_COLUMNS.items()},
    }


_TOTAL_COLUMNS = tuple(_build_total_expressions())


def _build_day_expression(connection: Connection) -> ColumnElement[Any]:
    time_s = func.coalesce(UpdateTable.dispatched_at, UpdateTable.received_at)
    if connection.dialect.name == "postgresql":
        day = func.to_char(func.timezone("UTC", func.to_timestamp(time_s)), "YYYY-MM-DD")
    else:
        # Truncate to whole seconds first: SQLite would round the last half millisecond of a day into the next.
        day = func.strftime("%Y-%m-%d", cast(time_s, Integer), "unixepoch")
    day_or_unknown: ColumnElement[Any] = func.coalesce(day, UNKNOWN_DAY)
    return day_or_unknown


def list_assignment_ids(rows: Iterable[Any]) -> list[str]:
    """Returns the distinct assignment ids of rows."""
    return list(dict.fromkeys(row.assignment_id for row in rows))

"""Sums over assignments by run, device and day, and by each of them alone; kept right with every row that changes.

`counted` looks at the rows before and after a change and adds the difference, so it does not matter what changed
them or how often. Sums stay when the rows that they summed go.
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

from edgefl.storage.models import Base, DayTotal, DeviceTotal, RunTotal, Total, Update
from edgefl.storage.upsert import upsert
from edgefl.types import Outcome

KEYS: Mapping[type[Base], tuple[str, ...]] = MappingProxyType(
    {Total: ("run_id", "device_id", "day"), RunTotal: ("run_id",), DeviceTotal: ("device_id",), DayTotal: ("day",)}
)
"""The tables of sums and what each is summed by; the first has everything that the others have."""
OUTCOMES = MappingProxyType({f"num_{outcome}": str(outcome) for outcome in Outcome})
_COUNTS = {outcome: name for name, outcome in OUTCOMES.items()}
ADDED = (
    "iterations", "num_examples", "compute_s", "send_s", "wait_s", "bytes_up", "bytes_down", "energy_j",
)  # fmt: skip
HIGHEST = MappingProxyType({"max_staleness": "staleness", "max_temperature_c": "max_temperature_c"})
UNKNOWN_DAY = ""

_KEYS_OF_TOTAL = KEYS[Total]
_READ: tuple[Any, ...] = (
    Update.assignment_id, Update.device_id, Update.dispatched_at, Update.received_at, Update.outcome,
    Update.staleness, Update.iterations, Update.num_examples, Update.compute_s, Update.send_s, Update.wait_s,
    Update.bytes_up, Update.bytes_down, Update.energy_j, Update.max_temperature_c,
)  # fmt: skip
_CHUNK = 500
_Sums = dict[str, Any]
_ByKey = dict[tuple[str, ...], _Sums]


@contextmanager
def counted(
    connection: Connection, run_id: str, assignment_ids: Sequence[str], *, takes_back: bool = False
) -> Iterator[None]:
    """Changes the sums by what the block does to the rows of these assignments, in the same transaction.

    With `takes_back` those that the block deletes count as never given; else sums keep what rows that go have added.
    """
    before = _rows(connection, run_id, assignment_ids)
    yield
    after = _rows(connection, run_id, assignment_ids)
    _apply(connection, run_id, before, after, takes_back=takes_back)


def rebuild(connection: Connection) -> None:
    """Makes all sums anew from the rows of `updates`; those of rows that are gone are lost."""
    for table in KEYS:
        connection.execute(delete(table))
    columns = ["run_id", "device_id", "day", *_SUMMED]
    day = _day_in_sql(connection)
    rows = select(Update.run_id, Update.device_id, day, *_sums_in_sql().values()).group_by(
        Update.run_id, Update.device_id, day
    )
    connection.execute(insert(Total).from_select(columns, rows))
    for table, keys in KEYS.items():
        if table is not Total:
            by = [getattr(Total, key) for key in keys]
            merged = select(*by, *(_merged(name).label(name) for name in _SUMMED)).group_by(*by)
            connection.execute(insert(table).from_select([*keys, *_SUMMED], merged))


def merged_columns(table: Any) -> dict[str, ColumnElement[Any]]:
    """Returns what each sum is over several rows of a table of sums."""
    return {name: _merged(name, table).label(name) for name in _SUMMED}


def day_of(at: float | None) -> str:
    """Returns the day of a time, such as 2026-01-31 in UTC; empty for none."""
    return UNKNOWN_DAY if at is None else datetime.fromtimestamp(int(at), tz=UTC).strftime("%Y-%m-%d")


def _rows(connection: Connection, run_id: str, assignment_ids: Sequence[str]) -> dict[str, Row[Any]]:
    found: dict[str, Row[Any]] = {}
    for start in range(0, len(assignment_ids), _CHUNK):
        chunk = assignment_ids[start : start + _CHUNK]
        query = select(*_READ).where(Update.run_id == run_id, Update.assignment_id.in_(chunk))
        found |= {row[0]: row for row in connection.execute(query)}
    return found


def _apply(
    connection: Connection,
    run_id: str,
    before: Mapping[str, Row[Any]],
    after: Mapping[str, Row[Any]],
    *,
    takes_back: bool,
) -> None:
    changes: _ByKey = defaultdict(_nothing)
    lowered = set()
    for assignment_id in before.keys() - after.keys() if takes_back else ():
        gone = before[assignment_id]
        _add(changes[_key(run_id, gone)], gone, -1)
        lowered.add(_key(run_id, gone))
    for assignment_id, row in after.items():
        old = before.get(assignment_id)
        if old is not None and tuple(old) == tuple(row):
            continue
        if old is not None:
            _add(changes[_key(run_id, old)], old, -1)
            if any(_is_lowered(getattr(old, name), getattr(row, name)) for name in HIGHEST.values()):
                lowered.add(_key(run_id, old))
        _add(changes[_key(run_id, row)], row, 1)
    for table, keys in KEYS.items():
        sums = changes if table is Total else _summed_by([_KEYS_OF_TOTAL.index(key) for key in keys], changes)
        _write(connection, table, keys, sums)
    for key in lowered:
        _renew_highest(connection, key)


def _key(run_id: str, row: Row[Any]) -> tuple[str, str, str]:
    at = row.dispatched_at if row.dispatched_at is not None else row.received_at
    return run_id, row.device_id, day_of(at)


def _nothing() -> _Sums:
    return dict.fromkeys(_SUMMED, 0) | {"energy_j": None} | dict.fromkeys(HIGHEST)


def _add(sums: _Sums, row: Row[Any], sign: int) -> None:
    sums["num_assignments"] += sign
    if row.outcome is not None:
        sums[_COUNTS[row.outcome]] += sign
    for name in ADDED:
        value = getattr(row, name)
        if value is not None:
            sums[name] = (sums[name] or 0) + sign * value
    if row.staleness:
        sums["num_stale"] += sign
        sums["sum_staleness"] += sign * row.staleness
    if sign > 0:
        for name, of in HIGHEST.items():
            sums[name] = _highest(sums[name], getattr(row, of))


def _highest(*values: Any) -> Any:
    return max((value for value in values if value is not None), default=None)


def _is_lowered(old: Any, new: Any) -> bool:
    return old is not None and (new is None or new < old)


def _summed_by(places: Sequence[int], changes: _ByKey) -> _ByKey:
    found: _ByKey = defaultdict(_nothing)
    for key, sums in changes.items():
        into = found[tuple(key[place] for place in places)]
        for name, value in sums.items():
            if value is not None:
                into[name] = _highest(into[name], value) if name in HIGHEST else (into[name] or 0) + value
    return found


def _write(connection: Connection, table: type[Base], keys: Sequence[str], changes: _ByKey) -> None:
    rows: list[_Sums] = [dict(zip(keys, key, strict=True)) | sums for key, sums in changes.items()]
    upsert(connection, table, rows, keys, merge=_merge)
    if any(row["num_assignments"] < 0 for row in rows):  # assignments may have moved to another day
        connection.execute(delete(table).where(table.__table__.c.num_assignments <= 0))


def _merge(stored: Any, new: Any) -> ColumnElement[Any]:
    if stored.name in HIGHEST:
        return case((or_(stored.is_(None), new > stored), new), else_=stored)
    if stored.name == "energy_j":
        return func.coalesce(stored + new, stored, new)
    total: ColumnElement[Any] = stored + new
    return total


def _renew_highest(connection: Connection, key: tuple[str, ...]) -> None:
    """Looks the highest values up again after one of them fell; a row that was recorded again may do that."""
    run_id, device_id, day = key
    theirs = (Update.run_id == run_id, Update.device_id == device_id, _day_in_sql(connection) == day)
    found = connection.execute(select(*(func.max(getattr(Update, of)) for of in HIGHEST.values())).where(*theirs))
    values = dict(zip(HIGHEST, found.one(), strict=True))
    for table, keys in KEYS.items():
        mine = dict(zip(_KEYS_OF_TOTAL, key, strict=True))
        if table is not Total:
            over = select(*(func.max(getattr(Total, name)) for name in HIGHEST)).where(
                *(getattr(Total, name) == mine[name] for name in keys)
            )
            values = dict(zip(HIGHEST, connection.execute(over).one(), strict=True))
        where = [table.__table__.c[name] == mine[name] for name in keys]
        connection.execute(update(table).where(*where).values(**values))


def _sums_in_sql() -> dict[str, ColumnElement[Any]]:
    stale = Update.staleness > 0
    return {
        "num_assignments": func.count(),
        **{name: func.count(case((Update.outcome == outcome, 1))) for name, outcome in OUTCOMES.items()},
        "num_stale": func.count(case((stale, 1))),
        "sum_staleness": func.coalesce(func.sum(Update.staleness), 0),
        **{name: func.coalesce(func.sum(getattr(Update, name)), 0) for name in ADDED if name != "energy_j"},
        "energy_j": func.sum(Update.energy_j),
        **{name: func.max(getattr(Update, of)) for name, of in HIGHEST.items()},
    }


_SUMMED = tuple(_sums_in_sql())


def _merged(name: str, table: Any = Total) -> ColumnElement[Any]:
    of = getattr(table, name)
    merged: ColumnElement[Any] = func.max(of) if name in HIGHEST else func.sum(of)
    return merged


def _day_in_sql(connection: Connection) -> ColumnElement[Any]:
    at = func.coalesce(Update.dispatched_at, Update.received_at)
    if connection.dialect.name == "postgresql":
        day = func.to_char(func.timezone("UTC", func.to_timestamp(at)), "YYYY-MM-DD")
    else:
        # Cut to whole seconds first: SQLite would round the last half millisecond of a day into the next.
        day = func.strftime("%Y-%m-%d", cast(at, Integer), "unixepoch")
    found: ColumnElement[Any] = func.coalesce(day, UNKNOWN_DAY)
    return found


def affected(rows: Iterable[Any]) -> list[str]:
    """Returns the assignments that rows are about, each once."""
    return list(dict.fromkeys(row.assignment_id for row in rows))

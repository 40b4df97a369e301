"""Questions that sums answer: per device, day or run, from the tables of sums and never from a million rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from sqlalchemy import Connection, Float, Select, cast, func, select

from edgefl.storage.columns import COLUMNS
from edgefl.storage.models import DayTotal, Device, DeviceTotal, RunTotal, Total
from edgefl.storage.totals import day_of, merged_columns
from edgefl.storage.wanted import Question, Wanted

_KEYS = MappingProxyType({"device": "device_id", "day": "day", "run": "run_id"})
_TABLES: Mapping[str, Any] = MappingProxyType({"device": DeviceTotal, "day": DayTotal, "run": RunTotal})


def _summed(kind: str) -> Callable[[Connection, Wanted], Question]:
    def question(_connection: Connection, wanted: Wanted) -> Question:
        key, sums = _KEYS[wanted.by], _sums(wanted).subquery()
        columns = {name: _figure(name, sums.c) for name in COLUMNS[kind] if name not in _KEYS.values()}
        columns[key] = sums.c[key]
        query = select(*(of.label(name) for name, of in columns.items())).where(
            *(condition.on(columns[condition.column]) for condition in wanted.where)
        )
        is_timeline = wanted.by != "device" and wanted.after is None
        query = query.order_by(sums.c[key].desc() if is_timeline else sums.c[key]).limit(wanted.limit)
        return Question(query=query, is_timeline=is_timeline, is_paged=False)

    return question


def _sums(wanted: Wanted) -> Select[Any]:
    """Returns the smallest table of sums that knows what is filtered by."""
    bounds = _days(wanted)
    filters = {"device": bool(wanted.device), "day": bool(bounds), "run": bool(wanted.run_id)}
    if any(is_filtered for by, is_filtered in filters.items() if by != wanted.by):
        key = getattr(Total, _KEYS[wanted.by])
        query = select(key, *merged_columns(Total).values()).where(*bounds).group_by(key)
        return query.where(*wanted.among(Total.run_id, Total.device_id))
    table = _TABLES[wanted.by]
    query = select(table.__table__)
    if wanted.by == "day":
        return query.where(*_days(wanted, DayTotal.day))
    return query.where(*wanted.among(getattr(table, "run_id", None), getattr(table, "device_id", None)))


def _days(wanted: Wanted, day: Any = Total.day) -> list[Any]:
    bounds = []
    if wanted.since is not None:
        bounds.append(day >= day_of(wanted.since))
    if wanted.until is not None:
        bounds.append(day <= day_of(math.ceil(wanted.until) - 1))
    return bounds


def _figure(name: str, sums: Any) -> Any:
    parts = {
        "stale_fraction": ("num_stale", "num_used"),
        "mean_staleness": ("sum_staleness", "num_used"),
        "energy_j_per_iteration": ("energy_j", "iterations"),
    }
    if name == "dropout_fraction":
        dropped = sums.num_lost + sums.num_late + sums.num_refused + sums.num_failed
        return cast(dropped, Float) / func.nullif(sums.num_assignments, 0)
    if name in parts:
        above, below = parts[name]
        return cast(sums[above], Float) / func.nullif(sums[below], 0)
    return sums[name]


def _devices(_connection: Connection, wanted: Wanted) -> Question:
    devices = Device.__table__
    names = [name for name in COLUMNS["devices"] if name not in devices.columns]
    if wanted.run_id is None:
        sums: Any = select(DeviceTotal.__table__).subquery()
    else:
        merged = merged_columns(Total)
        of_run = select(Total.device_id, *(merged[name] for name in names)).where(Total.run_id == wanted.run_id)
        sums = of_run.group_by(Total.device_id).subquery()
    columns = {
        **{name: devices.columns[name] for name in COLUMNS["devices"] if name in devices.columns},
        **{name: func.coalesce(sums.c[name], 0) for name in names},
    }
    query = (
        select(*(of.label(name) for name, of in columns.items()))
        .select_from(Device)
        .join(sums, sums.c.device_id == Device.device_id, isouter=wanted.run_id is None)
        .where(*wanted.within(Device.last_seen_at), *wanted.among(device_id=Device.device_id))
        .where(*(condition.on(columns[condition.column]) for condition in wanted.where))
        .order_by(Device.device_id)
        .limit(wanted.limit)
    )
    return Question(query=query, is_timeline=False, is_paged=False)


SUM_QUERIES: Mapping[str, Callable[[Connection, Wanted], Question]] = MappingProxyType(
    {"devices": _devices, **{kind: _summed(kind) for kind in ("stale", "dropouts", "traffic", "energy")}}
)

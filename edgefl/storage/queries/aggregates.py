"""Queries of sums per device, day or run, answered from the tables of sums."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from sqlalchemy import Connection, Float, Select, cast, func, select

from edgefl.storage.queries.columns import COLUMNS
from edgefl.storage.queries.filters import HistoryQuery, PreparedQuery
from edgefl.storage.repositories.totals import build_merged_columns, format_day
from edgefl.storage.tables import DayTotalTable, DeviceTable, DeviceTotalTable, RunTotalTable, TotalTable

_GROUP_COLUMNS = MappingProxyType({"device": "device_id", "day": "day", "run": "run_id"})
_GROUP_TABLES: Mapping[str, Any] = MappingProxyType(
    {"device": DeviceTotalTable, "day": DayTotalTable, "run": RunTotalTable}
)


def _make_aggregate_builder(kind: str) -> Callable[[Connection, HistoryQuery], PreparedQuery]:
    def build_query(_connection: Connection, wanted: HistoryQuery) -> PreparedQuery:
        key, sums = _GROUP_COLUMNS[wanted.group_by], _select_totals(wanted).subquery()
        columns = {name: _build_column(name, sums.c) for name in COLUMNS[kind] if name not in _GROUP_COLUMNS.values()}
        columns[key] = sums.c[key]
        query = select(*(column.label(name) for name, column in columns.items())).where(
            *(condition.to_sql(columns[condition.column]) for condition in wanted.where)
        )
        is_timeline = wanted.group_by != "device" and wanted.after is None
        query = query.order_by(sums.c[key].desc() if is_timeline else sums.c[key]).limit(wanted.limit)
        return PreparedQuery(query=query, is_newest_first=is_timeline, is_paged=False)

    return build_query


def _select_totals(criteria: HistoryQuery) -> Select[Any]:
    """Returns the smallest table of sums that has the filtered columns."""
    bounds = _build_day_filter(criteria)
    filters = {"device": bool(criteria.device), "day": bool(bounds), "run": bool(criteria.run_id)}
    if any(is_filtered for name, is_filtered in filters.items() if name != criteria.group_by):
        key = getattr(TotalTable, _GROUP_COLUMNS[criteria.group_by])
        query = select(key, *build_merged_columns(TotalTable).values()).where(*bounds).group_by(key)
        return query.where(*criteria.build_owner_filter(TotalTable.run_id, TotalTable.device_id))
    table = _GROUP_TABLES[criteria.group_by]
    query = select(table.__table__)
    if criteria.group_by == "day":
        return query.where(*_build_day_filter(criteria, DayTotalTable.day))
    return query.where(
        *criteria.build_owner_filter(getattr(table, "run_id", None), getattr(table, "device_id", None))
    )


def _build_day_filter(criteria: HistoryQuery, day: Any = TotalTable.day) -> list[Any]:
    bounds = []
    if criteria.since is not None:
        bounds.append(day >= format_day(criteria.since))
    if criteria.until is not None:
        bounds.append(day <= format_day(math.ceil(criteria.until) - 1))
    return bounds


def _build_column(name: str, sums: Any) -> Any:
    parts = {
        "stale_fraction": ("num_stale", "num_used"),
        "mean_staleness": ("sum_staleness", "num_used"),
        "energy_j_per_iteration": ("energy_j", "iterations"),
    }
    if name == "dropout_fraction":
        num_dropped = sums.num_lost + sums.num_late + sums.num_refused + sums.num_failed
        return cast(num_dropped, Float) / func.nullif(sums.num_assignments, 0)
    if name in parts:
        numerator, denominator = parts[name]
        return cast(sums[numerator], Float) / func.nullif(sums[denominator], 0)
    return sums[name]


def _build_devices_query(_connection: Connection, criteria: HistoryQuery) -> PreparedQuery:
    devices = DeviceTable.__table__
    names = [name for name in COLUMNS["devices"] if name not in devices.columns]
    if criteria.run_id is None:
        sums: Any = select(DeviceTotalTable.__table__).subquery()
    else:
        merged_columns = build_merged_columns(TotalTable)
        run_totals = select(TotalTable.device_id, *(merged_columns[name] for name in names)).where(
            TotalTable.run_id == criteria.run_id
        )
        sums = run_totals.group_by(TotalTable.device_id).subquery()
    columns = {
        **{name: devices.columns[name] for name in COLUMNS["devices"] if name in devices.columns},
        **{name: func.coalesce(sums.c[name], 0) for name in names},
    }
    query = (
        select(*(column.label(name) for name, column in columns.items()))
        .select_from(DeviceTable)
        .join(sums, sums.c.device_id == DeviceTable.device_id, isouter=criteria.run_id is None)
        .where(
            *criteria.build_time_filter(DeviceTable.last_seen_at),
            *criteria.build_owner_filter(device_column=DeviceTable.device_id),
        )
        .where(*(condition.to_sql(columns[condition.column]) for condition in criteria.where))
        .order_by(DeviceTable.device_id)
        .limit(criteria.limit)
    )
    return PreparedQuery(query=query, is_newest_first=False, is_paged=False)


AGGREGATE_QUERIES: Mapping[str, Callable[[Connection, HistoryQuery], PreparedQuery]] = MappingProxyType(
    {
        "devices": _build_devices_query,
        **{kind: _make_aggregate_builder(kind) for kind in ("stale", "dropouts", "traffic", "energy")},
    }
)

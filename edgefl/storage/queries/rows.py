"""Queries of each kind of history: its rows, or sums per device, day or run from the tables of sums."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from sqlalchemy import JSON, Connection, Float, Select, cast, column, func, literal, select, table, true, union_all
from sqlalchemy.sql.selectable import TableClause

from edgefl.storage.queries.columns import AGGREGATE_KINDS, COLUMNS, get_columns
from edgefl.storage.queries.filters import HistoryQuery, build_paged_query
from edgefl.storage.repositories.totals import build_merged_columns, format_day
from edgefl.storage.tables import (
    AuditTable,
    Base,
    DayTotalTable,
    DeviceTable,
    DeviceTotalTable,
    EvaluationTable,
    EventTable,
    HeartbeatRollupTable,
    HeartbeatTable,
    RoundTable,
    RunTable,
    RunTotalTable,
    TotalTable,
    UpdateTable,
)

QueryBuilder = Callable[[Connection, HistoryQuery], Select[Any]]

MAX_INDEXED_RUNS = 20


def _make_view(name: str, kind: str) -> TableClause:
    return table(name, *(column(entry, JSON if entry in {"facts", "metrics"} else None) for entry in COLUMNS[kind]))


def _build_rounds_query(connection: Connection, criteria: HistoryQuery) -> Select[Any]:
    view = _make_view("v_rounds", "rounds")
    query = (
        select(view)
        .join_from(RoundTable, view, (view.c.run_id == RoundTable.run_id) & (view.c.round == RoundTable.round))
        .where(*criteria.build_filters(time=RoundTable.started_at, run=RoundTable.run_id))
    )
    if criteria.device is not None:
        query = query.where(*_build_device_filter(connection, criteria.device))
    # By number, not by time: the clock may have jumped.
    return build_paged_query(query, criteria, (RoundTable.id, RoundTable.round), view.c)


def _build_device_filter(connection: Connection, device: str) -> list[Any]:
    """Returns the filter of a device's rounds; its first part restricts the search to the device's runs."""
    runs = connection.execute(
        select(TotalTable.run_id).where(TotalTable.device_id == device).distinct().limit(MAX_INDEXED_RUNS + 1)
    ).scalars()
    run_ids = list(runs)
    device_rounds = select(UpdateTable.run_id).where(
        UpdateTable.run_id == RoundTable.run_id,
        UpdateTable.round == RoundTable.round,
        UpdateTable.device_id == device,
    )
    return [RoundTable.run_id.in_(run_ids) if len(run_ids) <= MAX_INDEXED_RUNS else true(), device_rounds.exists()]


def _build_accuracy_query(_connection: Connection, criteria: HistoryQuery) -> Select[Any]:
    view = _make_view("v_rounds", "rounds")
    start_query = (
        select(func.min(RoundTable.started_at)).where(RoundTable.run_id == criteria.run_id).scalar_subquery()
    )
    sums = (
        select(
            RoundTable.id,
            RoundTable.run_id,
            RoundTable.round,
            RoundTable.started_at,
            (RoundTable.closed_at - start_query).label("at_s"),
            func.sum(RoundTable.bytes_up).over(order_by=RoundTable.round).label("bytes_up"),
            func.sum(RoundTable.bytes_down).over(order_by=RoundTable.round).label("bytes_down"),
        )
        .where(RoundTable.run_id == criteria.run_id)
        .subquery()
    )
    limited: Any = sums
    if criteria.limit is not None and not criteria.where:
        # Limit before the view looks up evaluations, which it would for every round of the run.
        order = (sums.c.round, sums.c.id)
        limited = build_paged_query(
            select(sums).where(*criteria.build_filters(time=sums.c.started_at)), criteria, order, {}, has_cursor=False
        ).subquery()
    computed_names = ("at_s", "bytes_up", "bytes_down")
    view_columns = [view.c[name] for name in COLUMNS["accuracy"] if name not in computed_names]
    query = (
        select(*view_columns, *(limited.c[name] for name in computed_names))
        .join_from(limited, view, (view.c.run_id == limited.c.run_id) & (view.c.round == limited.c.round))
        .where(*criteria.build_filters(time=limited.c.started_at))
    )
    columns = {**view.c, **{name: limited.c[name] for name in computed_names}}
    return build_paged_query(query, criteria, (limited.c.round, limited.c.id), columns)


def _build_slow_query(_connection: Connection, criteria: HistoryQuery) -> Select[Any]:
    round_columns = {"run_id", "round", "started_at", "seconds", "waited_for", "waited_s"}
    columns = {name: getattr(RoundTable if name in round_columns else UpdateTable, name) for name in COLUMNS["slow"]}
    query = (
        select(*columns.values())
        .select_from(RoundTable)
        .outerjoin(
            UpdateTable,
            (UpdateTable.id == RoundTable.waited_update_id) & (UpdateTable.run_id == RoundTable.run_id),
        )
        .where(
            RoundTable.seconds.is_not(None),
            *criteria.build_filters(time=RoundTable.started_at, run=RoundTable.run_id, device=RoundTable.waited_for),
        )
    )
    return build_paged_query(query, criteria, (RoundTable.seconds, RoundTable.id), columns, is_ranking=True)


def _make_table_builder(orm_class: type[Base], time: str) -> QueryBuilder:
    rows = orm_class.__table__.c

    def build_query(_connection: Connection, criteria: HistoryQuery) -> Select[Any]:
        filters = criteria.build_filters(time=rows[time], run=rows.get("run_id"), device=rows.get("device_id"))
        return build_paged_query(select(orm_class.__table__).where(*filters), criteria, (rows.id, rows.id), rows)

    return build_query


def _build_heartbeats_query(_connection: Connection, criteria: HistoryQuery) -> Select[Any]:
    # Not from v_heartbeats: each half is limited by its own index before the union.
    halves = [
        _build_heartbeat_half(HeartbeatTable.__table__, literal(1), criteria),
        _build_heartbeat_half(HeartbeatRollupTable.__table__, HeartbeatRollupTable.num_heartbeats, criteria),
    ]
    rows = union_all(*(select(half.subquery()) for half in halves)).subquery()
    return build_paged_query(select(rows), replace(criteria, where=()), (rows.c.at, rows.c.device_id), {})


def _build_heartbeat_half(rows: Any, count: Any, criteria: HistoryQuery) -> Select[Any]:
    columns = {name: rows.c[name] for name in COLUMNS["heartbeats"] if name != "num_heartbeats"}
    run = rows.c.run if criteria.device is None else None
    query = select(*columns.values(), count.label("num_heartbeats")).where(
        *criteria.build_filters(time=rows.c.at, run=run, device=rows.c.device_id)
    )
    if criteria.run_id is not None and criteria.device is not None:
        query = query.where(*_build_device_run_filter(rows, criteria.run_id))
    columns["num_heartbeats"] = count
    return build_paged_query(query, criteria, (rows.c.at, rows.c.device_id), columns, has_cursor=False)


def _build_device_run_filter(rows: Any, run_id: str) -> list[Any]:
    """Returns the filter of a device's heartbeats in a run, served by the device's own index."""
    first, last = (
        select(edge(rows.c.at)).where(rows.c.run == run_id).scalar_subquery() for edge in (func.min, func.max)
    )
    return [func.coalesce(rows.c.run, "") == run_id, rows.c.at >= first, rows.c.at <= last]


def _build_runs_query(_connection: Connection, criteria: HistoryQuery) -> Select[Any]:
    view = _make_view("v_runs", "runs")
    query = (
        select(view)
        .join_from(RunTable, view, view.c.run_id == RunTable.run_id)
        .where(*criteria.build_filters(time=RunTable.submitted_at, run=RunTable.run_id))
    )
    if criteria.device is not None:
        query = query.where(
            RunTable.run_id.in_(select(TotalTable.run_id).where(TotalTable.device_id == criteria.device))
        )
    # By number, too.
    return build_paged_query(query, criteria, (RunTable.sequence, RunTable.run_id), view.c)


_GROUP_COLUMNS = MappingProxyType({"device": "device_id", "day": "day", "run": "run_id"})
_GROUP_TABLES: Mapping[str, Any] = MappingProxyType(
    {"device": DeviceTotalTable, "day": DayTotalTable, "run": RunTotalTable}
)


def _make_aggregate_builder(kind: str) -> QueryBuilder:
    def build_query(_connection: Connection, criteria: HistoryQuery) -> Select[Any]:
        key, sums = _GROUP_COLUMNS[criteria.group_by], _select_totals(criteria).subquery()
        columns = {name: _build_column(name, sums.c) for name in get_columns(kind, criteria.group_by)}
        is_newest_first = criteria.group_by != "device" and criteria.after is None
        return (
            select(*(column.label(name) for name, column in columns.items()))
            .where(*criteria.build_conditions(columns))
            .order_by(sums.c[key].desc() if is_newest_first else sums.c[key])
            .limit(criteria.limit)
        )

    return build_query


def _select_totals(criteria: HistoryQuery) -> Select[Any]:
    """Returns the smallest table of sums that has the filtered columns."""
    bounds = _build_day_filter(criteria)
    filters = {"device": bool(criteria.device), "day": bool(bounds), "run": bool(criteria.run_id)}
    if any(is_filtered for name, is_filtered in filters.items() if name != criteria.group_by):
        key = getattr(TotalTable, _GROUP_COLUMNS[criteria.group_by])
        query = select(key, *build_merged_columns(TotalTable).values()).where(*bounds).group_by(key)
        return query.where(*criteria.build_filters(run=TotalTable.run_id, device=TotalTable.device_id))
    table = _GROUP_TABLES[criteria.group_by]
    query = select(table.__table__)
    if criteria.group_by == "day":
        return query.where(*_build_day_filter(criteria, DayTotalTable.day))
    return query.where(
        *criteria.build_filters(run=getattr(table, "run_id", None), device=getattr(table, "device_id", None))
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
        num_dropped = sums.num_lost + sums.num_late + sums.num_rejected + sums.num_failed
        return cast(num_dropped, Float) / func.nullif(sums.num_assignments, 0)
    if name in parts:
        numerator, denominator = parts[name]
        return cast(sums[numerator], Float) / func.nullif(sums[denominator], 0)
    return sums[name]


def _build_devices_query(_connection: Connection, criteria: HistoryQuery) -> Select[Any]:
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
    return (
        select(*(column.label(name) for name, column in columns.items()))
        .select_from(DeviceTable)
        .join(sums, sums.c.device_id == DeviceTable.device_id, isouter=criteria.run_id is None)
        .where(*criteria.build_filters(time=DeviceTable.last_seen_at, device=DeviceTable.device_id))
        .where(*criteria.build_conditions(columns))
        .order_by(DeviceTable.device_id)
        .limit(criteria.limit)
    )


QUERIES: Mapping[str, QueryBuilder] = MappingProxyType(
    {
        "runs": _build_runs_query,
        "rounds": _build_rounds_query,
        "accuracy": _build_accuracy_query,
        "slow": _build_slow_query,
        "updates": _make_table_builder(UpdateTable, "dispatched_at"),
        "evaluations": _make_table_builder(EvaluationTable, "at"),
        "heartbeats": _build_heartbeats_query,
        "events": _make_table_builder(EventTable, "at"),
        "audit": _make_table_builder(AuditTable, "at"),
        "devices": _build_devices_query,
        **{kind: _make_aggregate_builder(kind) for kind in AGGREGATE_KINDS},
    }
)
"""Builders of the queries, by kind."""

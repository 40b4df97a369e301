"""Row queries: rounds, updates, evaluations, heartbeats, events, slow rounds, runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from sqlalchemy import JSON, Connection, Select, column, func, literal, select, table, true, union_all
from sqlalchemy.sql.selectable import TableClause

from edgefl.storage.queries.columns import COLUMNS
from edgefl.storage.queries.filters import (
    HistoryQuery,
    PreparedQuery,
    apply_query,
    build_ranking_query,
    build_timeline_query,
)
from edgefl.storage.tables import (
    EvaluationTable,
    EventTable,
    HeartbeatRollupTable,
    HeartbeatTable,
    RoundTable,
    TotalTable,
    UpdateTable,
)

MAX_INDEXED_RUNS = 20


def _make_view(name: str, kind: str) -> TableClause:
    return table(name, *(column(entry, JSON if entry == "facts" else None) for entry in COLUMNS[kind]))


def _build_rounds_query(connection: Connection, criteria: HistoryQuery) -> PreparedQuery:
    view = _make_view("v_rounds", "rounds")
    query = (
        select(view)
        .join_from(RoundTable, view, (view.c.run_id == RoundTable.run_id) & (view.c.round == RoundTable.round))
        .where(*criteria.build_time_filter(RoundTable.started_at), *criteria.build_owner_filter(RoundTable.run_id))
    )
    if criteria.device is not None:
        query = query.where(*_build_device_filter(connection, criteria.device))
    return build_timeline_query(query, criteria, (RoundTable.started_at, RoundTable.id), view.c)


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


def _build_accuracy_query(_connection: Connection, criteria: HistoryQuery) -> PreparedQuery:
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
        order = (sums.c.started_at, sums.c.id)
        limited = apply_query(
            select(sums).where(*criteria.build_time_filter(sums.c.started_at)),
            criteria,
            order,
            {},
            is_descending=criteria.after is None,
        ).subquery()
    computed_names = ("at_s", "bytes_up", "bytes_down")
    view_columns = [view.c[name] for name in COLUMNS["accuracy"] if name not in computed_names]
    query = (
        select(*view_columns, *(limited.c[name] for name in computed_names))
        .join_from(limited, view, (view.c.run_id == limited.c.run_id) & (view.c.round == limited.c.round))
        .where(*criteria.build_time_filter(limited.c.started_at))
    )
    columns = {**view.c, **{name: limited.c[name] for name in computed_names}}
    return build_timeline_query(query, criteria, (limited.c.started_at, limited.c.id), columns)


def _build_slow_query(_connection: Connection, criteria: HistoryQuery) -> PreparedQuery:
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
            *criteria.build_time_filter(RoundTable.started_at),
            *criteria.build_owner_filter(RoundTable.run_id, RoundTable.waited_for),
        )
    )
    return build_ranking_query(query, criteria, (RoundTable.seconds, RoundTable.id), columns)


def _build_updates_query(_connection: Connection, criteria: HistoryQuery) -> PreparedQuery:
    rows = UpdateTable.__table__.columns
    query = select(UpdateTable.__table__).where(
        *criteria.build_time_filter(rows.dispatched_at), *criteria.build_owner_filter(rows.run_id, rows.device_id)
    )
    return build_timeline_query(query, criteria, (rows.dispatched_at, rows.id), rows)


def _build_evaluations_query(_connection: Connection, criteria: HistoryQuery) -> PreparedQuery:
    rows = EvaluationTable.__table__.columns
    query = select(EvaluationTable.__table__).where(
        *criteria.build_time_filter(rows.at), *criteria.build_owner_filter(rows.run_id, rows.device_id)
    )
    return build_timeline_query(query, criteria, (rows.at, rows.id), rows)


def _build_events_query(_connection: Connection, criteria: HistoryQuery) -> PreparedQuery:
    rows = EventTable.__table__.columns
    query = select(EventTable.__table__).where(
        *criteria.build_time_filter(rows.at), *criteria.build_owner_filter(rows.run_id, rows.device_id)
    )
    return build_timeline_query(query, criteria, (rows.at, rows.id), rows)


def _build_heartbeats_query(_connection: Connection, criteria: HistoryQuery) -> PreparedQuery:
    # Not from v_heartbeats: each half is limited by its own index before the union.
    halves = [
        _build_heartbeat_half(HeartbeatTable.__table__, literal(1), criteria),
        _build_heartbeat_half(HeartbeatRollupTable.__table__, HeartbeatRollupTable.num_heartbeats, criteria),
    ]
    rows = union_all(*(select(half.subquery()) for half in halves)).subquery()
    return build_timeline_query(select(rows), replace(criteria, where=()), (rows.c.at, rows.c.device_id), {})


def _build_heartbeat_half(rows: Any, count: Any, criteria: HistoryQuery) -> Select[Any]:
    columns = {name: rows.c[name] for name in COLUMNS["heartbeats"] if name != "num_heartbeats"}
    query = select(*columns.values(), count.label("num_heartbeats")).where(*criteria.build_time_filter(rows.c.at))
    if criteria.run_id is not None and criteria.device is not None:
        query = query.where(*_build_device_run_filter(rows, criteria.run_id))
    query = query.where(
        *criteria.build_owner_filter(rows.c.run if criteria.device is None else None, rows.c.device_id)
    )
    order = (rows.c.at, rows.c.device_id)
    return apply_query(
        query, criteria, order, {**columns, "num_heartbeats": count}, is_descending=criteria.after is None
    )


def _build_device_run_filter(rows: Any, run_id: str) -> list[Any]:
    """Returns the filter of a device's heartbeats in a run, served by the device's own index."""
    first, last = (
        select(edge(rows.c.at)).where(rows.c.run == run_id).scalar_subquery() for edge in (func.min, func.max)
    )
    return [func.coalesce(rows.c.run, "") == run_id, rows.c.at >= first, rows.c.at <= last]


def _build_runs_query(_connection: Connection, criteria: HistoryQuery) -> PreparedQuery:
    view = _make_view("v_runs", "runs")
    query = select(view).where(
        *criteria.build_time_filter(view.c.submitted_at), *criteria.build_owner_filter(view.c.run_id)
    )
    if criteria.device is not None:
        query = query.where(
            view.c.run_id.in_(select(TotalTable.run_id).where(TotalTable.device_id == criteria.device))
        )
    return build_timeline_query(query, criteria, (view.c.submitted_at, view.c.run_id), view.c)


ROW_QUERIES: Mapping[str, Callable[[Connection, HistoryQuery], PreparedQuery]] = MappingProxyType(
    {
        "runs": _build_runs_query,
        "rounds": _build_rounds_query,
        "accuracy": _build_accuracy_query,
        "slow": _build_slow_query,
        "updates": _build_updates_query,
        "evaluations": _build_evaluations_query,
        "heartbeats": _build_heartbeats_query,
        "events": _build_events_query,
    }
)

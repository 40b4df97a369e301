"""Questions that rows answer one by one: rounds, updates, evaluations, heartbeats, events, slow rounds, runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from sqlalchemy import JSON, Connection, Select, column, func, literal, select, table, true, union_all
from sqlalchemy.sql.selectable import TableClause

from edgefl.storage.columns import COLUMNS
from edgefl.storage.models import Evaluation, Event, Heartbeat, Heartbeat5Min, Round, Total, Update
from edgefl.storage.wanted import Question, Wanted, cut, ranking, timeline

FEW_RUNS = 20


def _view(name: str, kind: str) -> TableClause:
    return table(name, *(column(entry, JSON if entry == "facts" else None) for entry in COLUMNS[kind]))


def _rounds(connection: Connection, wanted: Wanted) -> Question:
    view = _view("v_rounds", "rounds")
    query = (
        select(view)
        .join_from(Round, view, (view.c.run_id == Round.run_id) & (view.c.round == Round.round))
        .where(*wanted.within(Round.started_at), *wanted.among(Round.run_id))
    )
    if wanted.device is not None:
        query = query.where(*_with_device(connection, wanted.device))
    return timeline(query, wanted, (Round.started_at, Round.id), view.c)


def _with_device(connection: Connection, device: str) -> list[Any]:
    """Returns what chooses rounds of a device: without the first part, one of few runs would be sought in all."""
    runs = connection.execute(
        select(Total.run_id).where(Total.device_id == device).distinct().limit(FEW_RUNS + 1)
    ).scalars()
    run_ids = list(runs)
    of_device = select(Update.run_id).where(
        Update.run_id == Round.run_id, Update.round == Round.round, Update.device_id == device
    )
    return [Round.run_id.in_(run_ids) if len(run_ids) <= FEW_RUNS else true(), of_device.exists()]


def _accuracy(_connection: Connection, wanted: Wanted) -> Question:
    view = _view("v_rounds", "rounds")
    begin = select(func.min(Round.started_at)).where(Round.run_id == wanted.run_id).scalar_subquery()
    sums = (
        select(
            Round.id,
            Round.run_id,
            Round.round,
            Round.started_at,
            (Round.closed_at - begin).label("at_s"),
            func.sum(Round.bytes_up).over(order_by=Round.round).label("bytes_up"),
            func.sum(Round.bytes_down).over(order_by=Round.round).label("bytes_down"),
        )
        .where(Round.run_id == wanted.run_id)
        .subquery()
    )
    few: Any = sums
    if wanted.limit is not None and not wanted.where:
        # Cut before the view looks up evaluations, which it would for every round of the run.
        order = (sums.c.started_at, sums.c.id)
        few = cut(
            select(sums).where(*wanted.within(sums.c.started_at)), wanted, order, {}, falls=wanted.after is None
        ).subquery()
    own = ("at_s", "bytes_up", "bytes_down")
    others = [view.c[name] for name in COLUMNS["accuracy"] if name not in own]
    query = (
        select(*others, *(few.c[name] for name in own))
        .join_from(few, view, (view.c.run_id == few.c.run_id) & (view.c.round == few.c.round))
        .where(*wanted.within(few.c.started_at))
    )
    columns = {**view.c, **{name: few.c[name] for name in own}}
    return timeline(query, wanted, (few.c.started_at, few.c.id), columns)


def _slow(_connection: Connection, wanted: Wanted) -> Question:
    own = {"run_id", "round", "started_at", "seconds", "waited_for", "waited_s"}
    columns = {name: getattr(Round if name in own else Update, name) for name in COLUMNS["slow"]}
    query = (
        select(*columns.values())
        .select_from(Round)
        .outerjoin(
            Update,
            (Update.id == Round.waited_update_id) & (Update.run_id == Round.run_id),
        )
        .where(
            Round.seconds.is_not(None),
            *wanted.within(Round.started_at),
            *wanted.among(Round.run_id, Round.waited_for),
        )
    )
    return ranking(query, wanted, (Round.seconds, Round.id), columns)


def _updates(_connection: Connection, wanted: Wanted) -> Question:
    rows = Update.__table__.columns
    query = select(Update.__table__).where(
        *wanted.within(rows.dispatched_at), *wanted.among(rows.run_id, rows.device_id)
    )
    return timeline(query, wanted, (rows.dispatched_at, rows.id), rows)


def _evaluations(_connection: Connection, wanted: Wanted) -> Question:
    rows = Evaluation.__table__.columns
    query = select(Evaluation.__table__).where(*wanted.within(rows.at), *wanted.among(rows.run_id, rows.device_id))
    return timeline(query, wanted, (rows.at, rows.id), rows)


def _events(_connection: Connection, wanted: Wanted) -> Question:
    rows = Event.__table__.columns
    query = select(Event.__table__).where(*wanted.within(rows.at), *wanted.among(rows.run_id, rows.device_id))
    return timeline(query, wanted, (rows.at, rows.id), rows)


def _heartbeats(_connection: Connection, wanted: Wanted) -> Question:
    # Not from v_heartbeats: each half is cut by its own index before they are put together.
    halves = [
        _half(Heartbeat.__table__, literal(1), wanted),
        _half(Heartbeat5Min.__table__, Heartbeat5Min.num_heartbeats, wanted),
    ]
    rows = union_all(*(select(half.subquery()) for half in halves)).subquery()
    return timeline(select(rows), replace(wanted, where=()), (rows.c.at, rows.c.device_id), {})


def _half(rows: Any, count: Any, wanted: Wanted) -> Select[Any]:
    columns = {name: rows.c[name] for name in COLUMNS["heartbeats"] if name != "num_heartbeats"}
    query = select(*columns.values(), count.label("num_heartbeats")).where(*wanted.within(rows.c.at))
    if wanted.run_id is not None and wanted.device is not None:
        query = query.where(*_of_device_in_run(rows, wanted.run_id))
    query = query.where(*wanted.among(rows.c.run if wanted.device is None else None, rows.c.device_id))
    order = (rows.c.at, rows.c.device_id)
    return cut(query, wanted, order, {**columns, "num_heartbeats": count}, falls=wanted.after is None)


def _of_device_in_run(rows: Any, run_id: str) -> list[Any]:
    """Returns what chooses a device's heartbeats of a run by its own index: the run's has those of all devices."""
    first, last = (
        select(edge(rows.c.at)).where(rows.c.run == run_id).scalar_subquery() for edge in (func.min, func.max)
    )
    return [func.coalesce(rows.c.run, "") == run_id, rows.c.at >= first, rows.c.at <= last]


def _runs(_connection: Connection, wanted: Wanted) -> Question:
    view = _view("v_runs", "runs")
    query = select(view).where(*wanted.within(view.c.submitted_at), *wanted.among(view.c.run_id))
    if wanted.device is not None:
        query = query.where(view.c.run_id.in_(select(Total.run_id).where(Total.device_id == wanted.device)))
    return timeline(query, wanted, (view.c.submitted_at, view.c.run_id), view.c)


ROW_QUERIES: Mapping[str, Callable[[Connection, Wanted], Question]] = MappingProxyType(
    {
        "runs": _runs,
        "rounds": _rounds,
        "accuracy": _accuracy,
        "slow": _slow,
        "updates": _updates,
        "evaluations": _evaluations,
        "heartbeats": _heartbeats,
        "events": _events,
    }
)

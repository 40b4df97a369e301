"""What happened: rows of history, oldest first, in the columns of `COLUMNS`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sqlalchemy import JSON, Connection, Select, and_, case, column, func, literal, select, table, union_all
from sqlalchemy.sql.selectable import TableClause

from edgefl.errors import NotFoundError, UsageError
from edgefl.storage.columns import COLUMNS
from edgefl.storage.models import Device, Evaluation, Event, Heartbeat, Heartbeat5Min, Run, Update
from edgefl.storage.store import Store
from edgefl.types import Json, Outcome

LATEST = "latest"
_SUMS = ("compute_s", "send_s", "wait_s", "bytes_up", "bytes_down")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Filter:
    run_id: str | None
    device: str | None
    since: float | None
    until: float | None
    limit: int | None

    def within(self, when: Any) -> list[Any]:
        bounds = []
        if self.since is not None:
            bounds.append(when >= self.since)
        if self.until is not None:
            bounds.append(when < self.until)
        return bounds


def history(  # noqa: PLR0913 the filters of one command
    store: Store,
    kind: str,
    *,
    run: str | None = None,
    device: str | None = None,
    since: float | None = None,
    until: float | None = None,
    limit: int | None = None,
) -> list[Json]:
    """Returns the newest rows of one kind, oldest of them first; devices by name.

    Args:
        store: where to look.
        kind: a key of `COLUMNS`.
        run: a run's id, the beginning of one, its name (the newest run of that name), or `latest`.
        device: a device id.
        since: rows from this time on, unix seconds; for devices, those seen since.
        until: rows before this time.
        limit: how many rows at most.

    Raises:
        UsageError: there is no such kind, or the limit is not positive.
        NotFoundError: no such run.
    """
    if kind not in COLUMNS:
        raise UsageError(f"history has no {kind!r}; it has {', '.join(COLUMNS)}")
    if limit is not None and limit < 1:
        raise UsageError(f"limit must be at least 1, got {limit}")
    with store.database.read() as connection:
        run_id = None if run is None else _find_run(connection, run)
        wanted = _Filter(run_id=run_id, device=device, since=since, until=until, limit=limit)
        rows = connection.execute(_QUERIES[kind](wanted).limit(limit)).mappings().all()
    ordered = rows if kind == "devices" else reversed(rows)
    return [{name: row[name] for name in COLUMNS[kind]} for row in ordered]


def find_run(store: Store, text: str) -> str:
    """Returns the id of the run that a person means: its id, the beginning of one, its name, or `latest`.

    Raises:
        NotFoundError: none, or several.
    """
    with store.database.read() as connection:
        return _find_run(connection, text)


def _find_run(connection: Connection, text: str) -> str:
    newest = select(Run.run_id).order_by(Run.submitted_at.desc(), Run.run_id.desc())
    if text == LATEST:
        queries = [newest.limit(1)]
    else:
        begins = newest.where(Run.run_id.startswith(text, autoescape=True)).limit(2)
        queries = [newest.where(Run.run_id == text), newest.where(Run.name == text).limit(1), begins]
    for query in queries:
        found = list(connection.execute(query).scalars())
        if len(found) > 1:
            raise NotFoundError(f"several runs begin with {text!r}, among them {' and '.join(found)}; say more of it")
        if found:
            return str(found[0])
    raise NotFoundError("there is no run yet" if text == LATEST else f"no run {text!r}; `edgefl run list` shows them")


def _view(name: str, kind: str) -> TableClause:
    return table(name, *(column(entry, JSON if entry == "facts" else None) for entry in COLUMNS[kind]))


def _rounds(wanted: _Filter) -> Select[Any]:
    view = _view("v_rounds", "rounds")
    query = select(view).where(*wanted.within(view.c.started_at))
    if wanted.run_id is not None:
        query = query.where(view.c.run_id == wanted.run_id)
    if wanted.device is not None:
        of_device = select(Update.run_id).where(
            Update.run_id == view.c.run_id, Update.round == view.c.round, Update.device_id == wanted.device
        )
        query = query.where(of_device.exists())
    return query.order_by(view.c.started_at.desc(), view.c.round.desc())


def _updates(wanted: _Filter) -> Select[Any]:
    query = select(Update.__table__).where(*wanted.within(func.coalesce(Update.dispatched_at, Update.received_at)))
    return _narrowed(query, wanted, Update.__table__).order_by(Update.id.desc())


def _evaluations(wanted: _Filter) -> Select[Any]:
    query = select(Evaluation.__table__).where(*wanted.within(Evaluation.at))
    return _narrowed(query, wanted, Evaluation.__table__).order_by(Evaluation.at.desc(), Evaluation.id.desc())


def _events(wanted: _Filter) -> Select[Any]:
    query = select(Event.__table__).where(*wanted.within(Event.at))
    return _narrowed(query, wanted, Event.__table__).order_by(Event.at.desc(), Event.id.desc())


def _heartbeats(wanted: _Filter) -> Select[Any]:
    # Not from v_heartbeats: each half is cut by its own index before they are put together.
    halves = [
        _newest_heartbeats(Heartbeat.__table__, literal(1), wanted),
        _newest_heartbeats(Heartbeat5Min.__table__, Heartbeat5Min.num_heartbeats, wanted),
    ]
    rows = union_all(*(select(half.subquery()) for half in halves)).subquery()
    return select(rows).order_by(rows.c.at.desc(), rows.c.device_id.desc())


def _newest_heartbeats(rows: Any, count: Any, wanted: _Filter) -> Select[Any]:
    others = (rows.c[name] for name in COLUMNS["heartbeats"] if name != "num_heartbeats")
    query = select(*others, count.label("num_heartbeats")).where(*wanted.within(rows.c.at))
    if wanted.run_id is not None:
        query = query.where(rows.c.run == wanted.run_id)
    if wanted.device is not None:
        query = query.where(rows.c.device_id == wanted.device)
    return query.order_by(rows.c.at.desc(), rows.c.device_id.desc()).limit(wanted.limit)


def _devices(wanted: _Filter) -> Select[Any]:
    devices = Device.__table__
    in_run = [] if wanted.run_id is None else [Update.run_id == wanted.run_id]
    joined = and_(Update.device_id == Device.device_id, *in_run)
    query = (
        select(
            devices,
            func.count(Update.id).label("num_assignments"),
            func.count(case((Update.outcome == str(Outcome.USED), 1))).label("num_used"),
            *(func.coalesce(func.sum(Update.__table__.columns[name]), 0).label(name) for name in _SUMS),
        )
        .join(Update, joined, isouter=wanted.run_id is None)
        .where(*wanted.within(Device.last_seen_at))
        .group_by(Device.device_id)
    )
    if wanted.device is not None:
        query = query.where(Device.device_id == wanted.device)
    return query.order_by(Device.device_id)


def _narrowed(query: Select[Any], wanted: _Filter, rows: Any) -> Select[Any]:
    if wanted.run_id is not None:
        query = query.where(rows.c.run_id == wanted.run_id)
    if wanted.device is not None:
        query = query.where(rows.c.device_id == wanted.device)
    return query


_QUERIES: dict[str, Callable[[_Filter], Select[Any]]] = {
    "rounds": _rounds,
    "updates": _updates,
    "devices": _devices,
    "heartbeats": _heartbeats,
    "events": _events,
    "evaluations": _evaluations,
}

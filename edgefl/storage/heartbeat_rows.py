"""Heartbeats: written in bulk, raw for a day, then one row per device and five minutes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, Select, bindparam, case, delete, func, insert, literal, or_, select, update
from sqlalchemy.sql.elements import ColumnElement

from edgefl.storage.database import Database
from edgefl.storage.models import Device, Heartbeat, Heartbeat5Min
from edgefl.storage.plain import columns_of
from edgefl.storage.records import HeartbeatRow
from edgefl.storage.upsert import upsert

RAW_S = 86_400.0
BUCKET_S = 300.0
AHEAD_S = 60.0
"""A device that was last seen so long after it is seen now was so by a clock that has been set right since."""

_MEANS = ("clock_skew_s", "cpu_fraction", "memory_fraction", "power_w")
_HIGHEST = ("uptime_s", "temperature_c", "memory_bytes", "run", "iteration")
_LOWEST = ("disk_free_bytes", "battery_fraction")
NOT_THROTTLED = "ok"


class HeartbeatRows:
    """The store's part about heartbeats."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def record_heartbeats(self, rows: Sequence[HeartbeatRow]) -> None:
        """Keeps heartbeats, and when their devices were last seen."""
        if not rows:
            return
        values = [columns_of(row) for row in rows]
        seen: dict[str, float] = {}
        for row in rows:
            seen[row.device_id] = max(row.at, seen.get(row.device_id, row.at))
        with self._database.write() as connection:
            connection.execute(insert(Heartbeat), values)
            _touch(connection, seen)

    def newest_heartbeat_at(self) -> float | None:
        """Returns when the heartbeat came that was stored last, None where there is none."""
        newest = select(Heartbeat.at).order_by(Heartbeat.id.desc()).limit(1)
        with self._database.read() as connection:
            at = connection.execute(newest).scalar()
            if at is None:
                at = connection.execute(select(func.max(Heartbeat5Min.at))).scalar()
        return at

    def prune_heartbeats(self, now: float) -> int:
        """Returns how many raw heartbeats, older than a day, became five-minute rows.

        Each five minutes are a transaction of their own, so that other writers get their turn.
        """
        end = (now - RAW_S) // BUCKET_S * BUCKET_S
        pruned = 0
        while (start := self._oldest_bucket()) is not None and start < end:
            pruned += self._roll_up(start)
        return pruned

    def _oldest_bucket(self) -> float | None:
        with self._database.read() as connection:
            oldest = connection.execute(select(func.min(Heartbeat.at))).scalar()
        return None if oldest is None else oldest // BUCKET_S * BUCKET_S

    def _roll_up(self, start: float) -> int:
        inside = (Heartbeat.at >= start, Heartbeat.at < start + BUCKET_S)
        with self._database.write() as connection:
            rows: list[Mapping[str, Any]] = [
                dict(row)
                for row in connection.execute(
                    _five_minutes(start).where(*inside).group_by(Heartbeat.device_id)
                ).mappings()
            ]
            upsert(connection, Heartbeat5Min, rows, ("device_id", "at"), merge=_merge)
            return connection.execute(delete(Heartbeat).where(*inside)).rowcount


def _touch(connection: Connection, seen: Mapping[str, float]) -> None:
    statement = (
        update(Device.__table__)  # type: ignore[arg-type] # a declarative class's table is typed as any FROM
        .where(Device.device_id == bindparam("device"))
        .where(
            or_(
                Device.last_seen_at.is_(None),
                Device.last_seen_at < bindparam("seen"),
                Device.last_seen_at > bindparam("seen") + AHEAD_S,
            )
        )
        .values(last_seen_at=bindparam("seen"))
    )
    connection.execute(statement, [{"device": device_id, "seen": at} for device_id, at in seen.items()])


def _five_minutes(start: float) -> Select[Any]:
    columns = Heartbeat.__table__.columns
    return select(
        Heartbeat.device_id,
        literal(start).label("at"),
        func.count().label("num_heartbeats"),
        *(func.avg(columns[name]).label(name) for name in _MEANS),
        *(func.max(columns[name]).label(name) for name in _HIGHEST),
        *(func.min(columns[name]).label(name) for name in _LOWEST),
        _worst(func.max(func.nullif(Heartbeat.throttled, NOT_THROTTLED)), func.max(Heartbeat.throttled)),
    )


def _worst(trouble: Any, anything: Any) -> ColumnElement[Any]:
    """Returns any throttling there was; a board that was well for the rest of the time must not hide it."""
    return func.coalesce(trouble, anything).label("throttled")


def _merge(stored: Any, new: Any) -> ColumnElement[Any]:
    """Returns what a five-minute row keeps when the clock stepped back and its minutes came a second time."""
    name = stored.name
    if name == "num_heartbeats":
        total: ColumnElement[Any] = stored + new
        return total
    if name == "throttled":
        return _worst(func.nullif(new, NOT_THROTTLED), func.coalesce(stored, new))
    if name in _MEANS:
        return func.coalesce((stored + new) / 2, new, stored)
    wins = new > stored if name in _HIGHEST else new < stored
    return case((stored.is_(None) | wins, new), else_=stored)

"""Repository of heartbeats: written in bulk, raw for a day, then one row per device and five minutes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, Select, bindparam, case, delete, func, insert, literal, or_, select, update
from sqlalchemy.sql.elements import ColumnElement

from edgefl.storage.database import Repository
from edgefl.storage.repositories.records import HeartbeatRow
from edgefl.storage.repositories.row_writing import to_storable, upsert
from edgefl.storage.tables import DeviceTable, HeartbeatRollupTable, HeartbeatTable

RAW_RETENTION_S = 86_400.0
ROLLUP_BUCKET_S = 300.0
MAX_CLOCK_AHEAD_S = 60.0
"""Lead of a last-seen time over the present one beyond which a clock error, corrected since, is assumed."""

_MEAN_COLUMNS = ("clock_skew_s", "cpu_fraction", "memory_fraction", "power_w")
_MAX_COLUMNS = ("uptime_s", "temperature_c", "memory_bytes", "run", "iteration")
_MIN_COLUMNS = ("disk_free_bytes", "battery_fraction")
_REPORTED_COLUMNS = tuple({*HeartbeatTable.__table__.columns.keys()} - {"id", "device_id", "at"})
NOT_THROTTLED = "ok"


class HeartbeatRepository(Repository):
    """The store's methods on heartbeats."""

    def record_heartbeats(self, rows: Sequence[HeartbeatRow]) -> None:
        """Records heartbeats, and when their devices were last seen."""
        if not rows:
            return
        values = [
            {
                "device_id": row.device_id,
                "at": to_storable(row.at),
                **{name: to_storable(getattr(row.heartbeat, name)) for name in _REPORTED_COLUMNS},
            }
            for row in rows
        ]
        last_seen: dict[str, float] = {}
        for row in rows:
            last_seen[row.device_id] = max(row.at, last_seen.get(row.device_id, row.at))
        with self.database.write() as connection:
            connection.execute(insert(HeartbeatTable), values)
            _update_last_seen(connection, last_seen)

    def get_newest_heartbeat_time(self) -> float | None:
        """Returns the time of the last stored heartbeat, None where there is none."""
        newest = select(HeartbeatTable.at).order_by(HeartbeatTable.id.desc()).limit(1)
        newest_at: float | None = self.database.read_value(newest)
        return self.database.read_value(select(func.max(HeartbeatRollupTable.at))) if newest_at is None else newest_at

    def prune_heartbeats(self, now: float) -> int:
        """Rolls raw heartbeats older than a day up into five-minute rows and returns their number.

        Each five minutes are one transaction, so that other writers are not blocked.
        """
        end = (now - RAW_RETENTION_S) // ROLLUP_BUCKET_S * ROLLUP_BUCKET_S
        num_pruned = 0
        while (start := self._find_oldest_bucket()) is not None and start < end:
            num_pruned += self._roll_up_bucket(start)
        return num_pruned

    def _find_oldest_bucket(self) -> float | None:
        oldest = self.database.read_value(select(func.min(HeartbeatTable.at)))
        return None if oldest is None else oldest // ROLLUP_BUCKET_S * ROLLUP_BUCKET_S

    def _roll_up_bucket(self, start: float) -> int:
        is_in_bucket = (HeartbeatTable.at >= start, HeartbeatTable.at < start + ROLLUP_BUCKET_S)
        with self.database.write() as connection:
            rows: list[Mapping[str, Any]] = [
                dict(row)
                for row in connection.execute(
                    _build_rollup_query(start).where(*is_in_bucket).group_by(HeartbeatTable.device_id)
                ).mappings()
            ]
            upsert(connection, HeartbeatRollupTable, rows, ("device_id", "at"), merge=_merge_rollup)
            return connection.execute(delete(HeartbeatTable).where(*is_in_bucket)).rowcount


def _update_last_seen(connection: Connection, seen: Mapping[str, float]) -> None:
    statement = (
        update(DeviceTable.__table__)  # type: ignore[arg-type] # a declarative class's table is typed as any FROM
        .where(DeviceTable.device_id == bindparam("device"))
        .where(
            or_(
                DeviceTable.last_seen_at.is_(None),
                DeviceTable.last_seen_at < bindparam("seen"),
                DeviceTable.last_seen_at > bindparam("seen") + MAX_CLOCK_AHEAD_S,
            )
        )
        .values(last_seen_at=bindparam("seen"))
    )
    connection.execute(
        statement, [{"device": device_id, "seen": last_seen_at} for device_id, last_seen_at in seen.items()]
    )


def _build_rollup_query(start: float) -> Select[Any]:
    columns = HeartbeatTable.__table__.columns
    return select(
        HeartbeatTable.device_id,
        literal(start).label("at"),
        func.count().label("num_heartbeats"),
        *(func.avg(columns[name]).label(name) for name in _MEAN_COLUMNS),
        *(func.max(columns[name]).label(name) for name in _MAX_COLUMNS),
        *(func.min(columns[name]).label(name) for name in _MIN_COLUMNS),
        _build_throttled_column(
            func.max(func.nullif(HeartbeatTable.throttled, NOT_THROTTLED)), func.max(HeartbeatTable.throttled)
        ),
    )


def _build_throttled_column(throttled: Any, any_value: Any) -> ColumnElement[Any]:
    """Returns any throttling in the bucket; healthy heartbeats must not hide it."""
    return func.coalesce(throttled, any_value).label("throttled")


def _merge_rollup(stored: Any, new: Any) -> ColumnElement[Any]:
    """Returns the merged value when the clock stepped back and a bucket is written a second time."""
    name = stored.name
    if name == "num_heartbeats":
        total: ColumnElement[Any] = stored + new
        return total
    if name == "throttled":
        return _build_throttled_column(func.nullif(new, NOT_THROTTLED), func.coalesce(stored, new))
    if name in _MEAN_COLUMNS:
        return func.coalesce((stored + new) / 2, new, stored)
    is_new_extreme = new > stored if name in _MAX_COLUMNS else new < stored
    return case((stored.is_(None) | is_new_extreme, new), else_=stored)

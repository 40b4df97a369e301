"""Change feed of the dashboard: events by number, run summaries, draining devices."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import func, select

from edgefl.core.types import Json
from edgefl.storage.store import Store
from edgefl.storage.tables import DeviceTable, EventTable, RunTable

DRAIN_REQUESTED = "drain-asked"
RESUME_REQUESTED = "resume-asked"
DEVICE_JOINED = "device-joined"


def list_events_after(store: Store, event_id: int, *, limit: int) -> list[Json]:
    """Returns the newest events with a number above `event_id`, oldest first."""
    query = (
        select(
            EventTable.id, EventTable.at, EventTable.kind, EventTable.message, EventTable.run_id, EventTable.device_id
        )
        .where(EventTable.id > event_id)
        .order_by(EventTable.id.desc())
        .limit(limit)
    )
    with store.database.read() as connection:
        rows = connection.execute(query).mappings().all()
    return [dict(row) for row in reversed(rows)]


def list_run_summaries(store: Store, *, limit: int) -> list[Json]:
    """Returns the newest runs, newest first, with their progress and goal in rounds."""
    query = (
        select(
            RunTable.run_id, RunTable.name, RunTable.task, RunTable.strategy, RunTable.status, RunTable.reason,
            RunTable.submitted_at, RunTable.started_at, RunTable.finished_at, RunTable.rounds, RunTable.accuracy,
            RunTable.config["run"]["rounds"].as_integer().label("goal_rounds"),
        )
        .order_by(RunTable.submitted_at.desc(), RunTable.run_id.desc())
        .limit(limit)
    )  # fmt: skip
    with store.database.read() as connection:
        return [dict(row) for row in connection.execute(query).mappings()]


def get_last_seen_times(store: Store) -> dict[str, float | None]:
    """Returns when each device of the fleet was last seen, in unix seconds."""
    with store.database.read() as connection:
        rows = connection.execute(
            select(DeviceTable.device_id, DeviceTable.last_seen_at).where(DeviceTable.removed_at.is_(None))
        )
        return {str(row[0]): row[1] for row in rows}


def list_draining_devices(store: Store) -> list[str]:
    """Returns the devices drained by an operator and not resumed; joining again resets it."""
    kinds: Sequence[str] = (DRAIN_REQUESTED, RESUME_REQUESTED, DEVICE_JOINED)
    newest = select(func.max(EventTable.id)).where(EventTable.kind.in_(kinds)).group_by(EventTable.device_id)
    query = (
        select(EventTable.device_id)
        .where(EventTable.id.in_(newest), EventTable.kind == DRAIN_REQUESTED)
        .order_by(EventTable.device_id)
    )
    with store.database.read() as connection:
        return [str(name) for name in connection.execute(query).scalars()]

"""What changed since somebody last looked: events by number, runs without their settings, who is to rest."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import func, select

from edgefl.storage.models import Device, Event, Run
from edgefl.storage.store import Store
from edgefl.types import Json

DRAIN_ASKED = "drain-asked"
RESUME_ASKED = "resume-asked"
JOINED = "device-joined"


def events_after(store: Store, event_id: int, *, limit: int) -> list[Json]:
    """Returns the newest events with a greater number than `event_id`, oldest of them first."""
    query = (
        select(Event.id, Event.at, Event.kind, Event.message, Event.run_id, Event.device_id)
        .where(Event.id > event_id)
        .order_by(Event.id.desc())
        .limit(limit)
    )
    with store.database.read() as connection:
        rows = connection.execute(query).mappings().all()
    return [dict(row) for row in reversed(rows)]


def run_heads(store: Store, *, limit: int) -> list[Json]:
    """Returns the newest runs, newest first, as a list of them needs: how far each is, and its goal in rounds."""
    query = (
        select(
            Run.run_id, Run.name, Run.task, Run.strategy, Run.status, Run.reason, Run.submitted_at, Run.started_at,
            Run.finished_at, Run.rounds, Run.accuracy,
            Run.config["run"]["rounds"].as_integer().label("goal_rounds"),
        )
        .order_by(Run.submitted_at.desc(), Run.run_id.desc())
        .limit(limit)
    )  # fmt: skip
    with store.database.read() as connection:
        return [dict(row) for row in connection.execute(query).mappings()]


def last_seen(store: Store) -> dict[str, float | None]:
    """Returns when each device of the fleet was last heard, in unix seconds."""
    with store.database.read() as connection:
        rows = connection.execute(select(Device.device_id, Device.last_seen_at).where(Device.removed_at.is_(None)))
        return {str(row[0]): row[1] for row in rows}


def asked_to_drain(store: Store) -> list[str]:
    """Returns the devices that an operator has drained and not resumed; who joined again since is as new."""
    kinds: Sequence[str] = (DRAIN_ASKED, RESUME_ASKED, JOINED)
    newest = select(func.max(Event.id)).where(Event.kind.in_(kinds)).group_by(Event.device_id)
    query = select(Event.device_id).where(Event.id.in_(newest), Event.kind == DRAIN_ASKED).order_by(Event.device_id)
    with store.database.read() as connection:
        return [str(name) for name in connection.execute(query).scalars()]

"""When each device of a run was at work: what a round's time line is drawn from."""

from __future__ import annotations

from sqlalchemy import func, select

from edgefl.storage.models import Round, Update
from edgefl.storage.store import Store
from edgefl.types import Json

MAX_DEVICES = 40
"""A time line of more devices could not be read: those with most work and sending are kept."""


def newest_rounds(store: Store, run_id: str, count: int) -> tuple[int, int] | None:
    """Returns the first and the last of the newest closed rounds of a run; None before the first has closed."""
    newest = (
        select(Round.round)
        .where(Round.run_id == run_id, Round.closed_at.is_not(None))
        .order_by(Round.round.desc())
        .limit(count)
        .subquery()
    )
    with store.database.read() as connection:
        row = connection.execute(select(func.min(newest.c.round), func.max(newest.c.round))).one()
    return None if row[0] is None else (int(row[0]), int(row[1]))


def spans(store: Store, run_id: str, first: int, last: int, *, max_devices: int = MAX_DEVICES) -> Json:
    """Returns the assignments of these rounds by device, and how many devices took part.

    Each row has `round`, `device_id`, `outcome`, when it went out and came back (unix seconds), and the seconds
    computing, sending and waiting.
    """
    query = (
        select(
            Update.round, Update.device_id, Update.outcome, Update.dispatched_at, Update.received_at,
            Update.compute_s, Update.send_s, Update.wait_s,
        )
        .where(Update.run_id == run_id, Update.round >= first, Update.round <= last)
        .order_by(Update.id)
    )  # fmt: skip
    with store.database.read() as connection:
        rows = [dict(row) for row in connection.execute(query).mappings()]
    busy_s: dict[str, float] = {}
    for row in rows:
        cost_s = (row["compute_s"] or 0.0) + (row["send_s"] or 0.0)
        busy_s[row["device_id"]] = busy_s.get(row["device_id"], 0.0) + cost_s
    kept = set(sorted(busy_s, key=lambda name: (-busy_s[name], name))[:max_devices])
    return {"num_devices": len(busy_s), "rows": [row for row in rows if row["device_id"] in kept]}

"""Busy intervals of the devices of a run, for a round's timeline."""

from __future__ import annotations

from sqlalchemy import func, select

from edgefl.core.types import Json
from edgefl.storage.store import Store
from edgefl.storage.tables import RoundTable, UpdateTable

MAX_DEVICES = 40
"""Maximum of legible lines in a timeline: the devices with most work and sending are selected."""


def find_newest_rounds(store: Store, run_id: str, count: int) -> tuple[int, int] | None:
    """Returns the first and the last of a run's newest closed rounds; None before the first has closed."""
    newest = (
        select(RoundTable.round)
        .where(RoundTable.run_id == run_id, RoundTable.closed_at.is_not(None))
        .order_by(RoundTable.round.desc())
        .limit(count)
        .subquery()
    )
    with store.database.read() as connection:
        row = connection.execute(select(func.min(newest.c.round), func.max(newest.c.round))).one()
    return None if row[0] is None else (int(row[0]), int(row[1]))


def get_device_timeline(store: Store, run_id: str, first: int, last: int, *, max_devices: int = MAX_DEVICES) -> Json:
    """Returns the assignments of these rounds by device, and the number of participants.

    Each row has `round`, `device_id`, `outcome`, the times of dispatch and return (unix seconds), and the seconds
    computing, sending and waiting.
    """
    query = (
        select(
            UpdateTable.round, UpdateTable.device_id, UpdateTable.outcome, UpdateTable.dispatched_at,
            UpdateTable.received_at, UpdateTable.compute_s, UpdateTable.send_s, UpdateTable.wait_s,
        )
        .where(UpdateTable.run_id == run_id, UpdateTable.round >= first, UpdateTable.round <= last)
        .order_by(UpdateTable.id)
    )  # fmt: skip
    with store.database.read() as connection:
        rows = [dict(row) for row in connection.execute(query).mappings()]
    busy_s: dict[str, float] = {}
    for row in rows:
        cost_s = (row["compute_s"] or 0.0) + (row["send_s"] or 0.0)
        busy_s[row["device_id"]] = busy_s.get(row["device_id"], 0.0) + cost_s
    busiest = set(sorted(busy_s, key=lambda name: (-busy_s[name], name))[:max_devices])
    return {"num_devices": len(busy_s), "rows": [row for row in rows if row["device_id"] in busiest]}

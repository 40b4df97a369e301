"""How fast devices were, as their updates say."""

from __future__ import annotations

from sqlalchemy import select

from edgefl.storage.models import Run, Update
from edgefl.storage.store import Store
from edgefl.types import Outcome

LOOKED_AT = 2000


def seconds_per_iteration(store: Store, task: str) -> dict[str, tuple[float, str]]:
    """Returns the seconds of an iteration in each device's newest used update of a task, and the run of it."""
    query = (
        select(Update.device_id, Update.compute_s, Update.iterations, Update.run_id)
        .join(Run, Run.run_id == Update.run_id)
        .where(Run.task == task, Update.outcome == str(Outcome.USED), Update.iterations > 0)
        .order_by(Update.id.desc())
        .limit(LOOKED_AT)
    )
    found: dict[str, tuple[float, str]] = {}
    with store.database.read() as connection:
        for device_id, compute_s, iterations, run_id in connection.execute(query):
            if compute_s is not None and iterations:
                found.setdefault(device_id, (compute_s / iterations, run_id))
    return found

"""Measured step rates of devices, from their updates."""

from __future__ import annotations

from sqlalchemy import select

from edgefl.core.types import UpdateStatus
from edgefl.storage.store import Store
from edgefl.storage.tables import RunTable, UpdateTable

MAX_UPDATES = 2000


def get_seconds_per_iteration(store: Store, task: str) -> dict[str, tuple[float, str]]:
    """Returns seconds per iteration and run of each device's newest used update of a task."""
    query = (
        select(UpdateTable.device_id, UpdateTable.compute_s, UpdateTable.iterations, UpdateTable.run_id)
        .join(RunTable, RunTable.run_id == UpdateTable.run_id)
        .where(RunTable.task == task, UpdateTable.outcome == str(UpdateStatus.USED), UpdateTable.iterations > 0)
        .order_by(UpdateTable.id.desc())
        .limit(MAX_UPDATES)
    )
    rates: dict[str, tuple[float, str]] = {}
    with store.database.read() as connection:
        for device_id, compute_s, iterations, run_id in connection.execute(query):
            if compute_s is not None and iterations:
                rates.setdefault(device_id, (compute_s / iterations, run_id))
    return rates

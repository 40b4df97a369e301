"""Stragglers: the device that a round waited for, and how long."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, select

from edgefl.core.types import UpdateStatus
from edgefl.storage.tables import UpdateTable


@dataclass(frozen=True, slots=True, kw_only=True)
class Straggler:
    """The last assignment to end, and the seconds from when half of them had ended until it did."""

    update_id: int
    device_id: str
    wait_s: float


def find_stragglers(
    connection: Connection, run_id: str, started: Mapping[int, float], closed: Mapping[int, float]
) -> dict[int, Straggler]:
    """Returns the `find_straggler` result of stored rounds, by number; `started` and `closed` are their times."""
    columns = (
        UpdateTable.round, UpdateTable.id, UpdateTable.assignment_id, UpdateTable.device_id, UpdateTable.outcome,
        UpdateTable.base_version, UpdateTable.applied_version, UpdateTable.dispatched_at, UpdateTable.ended_at,
    )  # fmt: skip
    rows: dict[int, list[Any]] = {number: [] for number in closed}
    for row in connection.execute(
        select(*columns).where(UpdateTable.run_id == run_id, UpdateTable.round.in_(list(closed)))
    ):
        rows[row.round].append(row)
    waits = {number: find_straggler(rows[number], closed_at, started[number]) for number, closed_at in closed.items()}
    return {number: wait for number, wait in waits.items() if wait is not None}


def straggler_to_columns(straggler: Straggler | None) -> dict[str, Any]:
    """Returns the columns of a round's row about its straggler."""
    if straggler is None:
        return {"waited_for": None, "waited_s": None, "waited_update_id": None}
    return {"waited_for": straggler.device_id, "waited_s": straggler.wait_s, "waited_update_id": straggler.update_id}


def find_straggler(rows: Sequence[Any], closed_at: float, started_at: float = 0.0) -> Straggler | None:
    """Returns the straggler of a synchronous round; None for an asynchronous one.

    A round is synchronous when all its used updates were dispatched with one version and applied to the same one.
    Arrivals after it had closed were not waited for. The wait does not begin before the round: a resumed run may
    have had updates for it long before.
    """
    used_rows = [row for row in rows if row.outcome == UpdateStatus.USED]
    if len({version for row in used_rows for version in (row.base_version, row.applied_version)}) > 1:
        return None
    ended_rows = sorted(
        (row for row in rows if row.ended_at is not None and row.ended_at <= closed_at),
        key=lambda row: (row.ended_at, row.assignment_id),
    )
    if not ended_rows:
        return None
    last, half = ended_rows[-1], ended_rows[(len(ended_rows) - 1) // 2]
    since = half.ended_at if len(ended_rows) > 1 else last.dispatched_at
    seconds = 0.0 if since is None else max(0.0, last.ended_at - max(since, started_at))
    return Straggler(update_id=last.id, device_id=last.device_id, wait_s=seconds)

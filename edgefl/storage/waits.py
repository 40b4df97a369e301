"""Whom a round waited for, and how long."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, select

from edgefl.storage.models import Update
from edgefl.types import Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """The assignment that ended last, and the seconds from when half of them had ended until it did."""

    update_id: int
    device_id: str
    seconds: float


def waits_of_rounds(
    connection: Connection, run_id: str, started: Mapping[int, float], closed: Mapping[int, float]
) -> dict[int, Wait]:
    """Returns what `wait_of` says of rounds that are in the store, by number; `started` and `closed` say when."""
    columns = (
        Update.round, Update.id, Update.assignment_id, Update.device_id, Update.outcome, Update.base_version,
        Update.applied_version, Update.dispatched_at, Update.ended_at,
    )  # fmt: skip
    rows: dict[int, list[Any]] = {number: [] for number in closed}
    for row in connection.execute(select(*columns).where(Update.run_id == run_id, Update.round.in_(list(closed)))):
        rows[row.round].append(row)
    waits = {number: wait_of(rows[number], at, started[number]) for number, at in closed.items()}
    return {number: wait for number, wait in waits.items() if wait is not None}


def wait_columns(wait: Wait | None) -> dict[str, Any]:
    """Returns what a round's row says of whom it waited for."""
    if wait is None:
        return {"waited_for": None, "waited_s": None, "waited_update_id": None}
    return {"waited_for": wait.device_id, "waited_s": wait.seconds, "waited_update_id": wait.update_id}


def wait_of(rows: Sequence[Any], closed_at: float, started_at: float = 0.0) -> Wait | None:
    """Returns whom a synchronous round waited for; None for one that takes updates as they come.

    A round is synchronous when all that it used was asked for with one model and applied to the same one. Whatever
    came after it had closed was not waited for. The wait does not begin before the round: a run that was taken up
    again may have had updates for it long before.
    """
    used = [row for row in rows if row.outcome == Outcome.USED]
    if len({version for row in used for version in (row.base_version, row.applied_version)}) > 1:
        return None
    ended = sorted(
        (row for row in rows if row.ended_at is not None and row.ended_at <= closed_at),
        key=lambda row: (row.ended_at, row.assignment_id),
    )
    if not ended:
        return None
    last, half = ended[-1], ended[(len(ended) - 1) // 2]
    since = half.ended_at if len(ended) > 1 else last.dispatched_at
    seconds = 0.0 if since is None else max(0.0, last.ended_at - max(since, started_at))
    return Wait(update_id=last.id, device_id=last.device_id, seconds=seconds)

"""Queries of the dashboard: the change feed, a round's timeline, a run's curve, with down-sampling."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from sqlalchemy import Connection, func, select

from edgefl.core.types import Array, Json
from edgefl.storage.store import Store
from edgefl.storage.tables import DeviceTable, EvaluationTable, EventTable, RoundTable, RunTable, UpdateTable

DRAIN_REQUESTED = "drain-requested"
RESUME_REQUESTED = "resume-requested"
DEVICE_JOINED = "device-joined"

MAX_DEVICES = 40
"""Maximum of legible lines in a timeline: the devices with most work and sending are selected."""

EXTREMA_COLUMNS = ("accuracy", "loss", "train_loss", "seconds", "node_accuracy")
"""Columns whose minima and maxima are retained by down-sampling."""
_SOURCE_RANKS = {"coordinator": 0, "evaluator": 1, "device": 2}
_ROUND_COLUMNS = (
    "round", "started_at", "closed_at", "num_devices", "num_updates", "train_loss", "bytes_up", "bytes_down",
    "node_accuracy", "worst_node_accuracy", "seconds", "disagreement",
)  # fmt: skip
_SCORE_COLUMNS = ("loss", "accuracy")

CurveRow = tuple[Any, ...]


def downsample_indices(columns: Sequence[Array], points: int) -> list[int]:
    """Returns the row indices for a chart: first, last, and the extremes of each stretch.

    Args:
        columns: [n] each, not empty, NaN where unknown.
        points: number of points; fewer than the extremes of one stretch make one stretch.
    """
    count = len(columns[0])
    if count <= points:
        return list(range(count))
    num_stretches = max(1, points // (2 * len(columns)))
    edges = [count * edge // num_stretches for edge in range(num_stretches + 1)]
    indices = {0, count - 1}
    for column in columns:
        for begin, end in pairwise(edges):
            stretch = column[begin:end]
            if not np.isnan(stretch).all():
                indices |= {begin + int(np.nanargmin(stretch)), begin + int(np.nanargmax(stretch))}
    return sorted(indices)


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
    return store.database.read_dicts(query)[::-1]


def list_run_summaries(store: Store, *, limit: int) -> list[Json]:
    """Returns the newest runs, newest first, with their progress and their goals in rounds and accuracy."""
    query = (
        select(
            RunTable.run_id, RunTable.name, RunTable.task, RunTable.strategy, RunTable.status, RunTable.reason,
            RunTable.submitted_at, RunTable.started_at, RunTable.finished_at, RunTable.rounds, RunTable.accuracy,
            RunTable.config["run"]["rounds"].as_integer().label("goal_rounds"),
            RunTable.config["run"]["accuracy"].as_float().label("goal_accuracy"),
        )
        .order_by(RunTable.sequence.desc(), RunTable.run_id.desc())
        .limit(limit)
    )  # fmt: skip
    return store.database.read_dicts(query)


def get_last_seen_times(store: Store) -> dict[str, float | None]:
    """Returns when each device of the fleet was last seen, in unix seconds."""
    query = select(DeviceTable.device_id, DeviceTable.last_seen_at).where(DeviceTable.removed_at.is_(None))
    return {row.device_id: row.last_seen_at for row in store.database.read_rows(query)}


def list_draining_devices(store: Store) -> list[str]:
    """Returns the devices drained by an operator and not resumed; joining again resets it."""
    kinds: Sequence[str] = (DRAIN_REQUESTED, RESUME_REQUESTED, DEVICE_JOINED)
    newest = select(func.max(EventTable.id)).where(EventTable.kind.in_(kinds)).group_by(EventTable.device_id)
    query = (
        select(EventTable.device_id)
        .where(EventTable.id.in_(newest), EventTable.kind == DRAIN_REQUESTED)
        .order_by(EventTable.device_id)
    )
    return [row.device_id for row in store.database.read_rows(query)]


def find_newest_rounds(store: Store, run_id: str, count: int) -> tuple[int, int] | None:
    """Returns the first and the last of a run's newest closed rounds; None before the first has closed."""
    newest = (
        select(RoundTable.round)
        .where(RoundTable.run_id == run_id, RoundTable.closed_at.is_not(None))
        .order_by(RoundTable.round.desc())
        .limit(count)
        .subquery()
    )
    ((first, last),) = store.database.read_rows(select(func.min(newest.c.round), func.max(newest.c.round)))
    return None if first is None else (int(first), int(last))


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
    rows = store.database.read_dicts(query)
    busy_s: dict[str, float] = {}
    for row in rows:
        cost_s = (row["compute_s"] or 0.0) + (row["send_s"] or 0.0)
        busy_s[row["device_id"]] = busy_s.get(row["device_id"], 0.0) + cost_s
    busiest = set(sorted(busy_s, key=lambda name: (-busy_s[name], name))[:max_devices])
    return {"num_devices": len(busy_s), "rows": [row for row in rows if row["device_id"] in busiest]}


def list_closed_rounds(store: Store, run_id: str, *, after: int = -1) -> list[Json]:
    """Returns the closed rounds of a run after a round, in order, with `v_rounds`' loss and accuracy."""
    names = (*_ROUND_COLUMNS, *_SCORE_COLUMNS)
    return [dict(zip(names, row, strict=True)) for row in _read_rounds(store, run_id, after)]


def get_run_curve(store: Store, run_id: str, points: int) -> tuple[int, list[Json]]:
    """Returns the number of closed rounds, and about `points` of them: see `downsample_indices`.

    `total_up` and `total_down` are the bytes up to the end of each, skipped rounds included.
    """
    rows = _read_rounds(store, run_id, -1)
    if not rows:
        return 0, []
    names = (*_ROUND_COLUMNS, *_SCORE_COLUMNS)
    columns = dict(zip(names, zip(*rows, strict=True), strict=True))
    totals = {f"total_{direction}": np.cumsum(columns[f"bytes_{direction}"]) for direction in ("up", "down")}
    indices = downsample_indices([np.array(columns[name], dtype=float) for name in EXTREMA_COLUMNS], points)
    return len(rows), [
        {**dict(zip(names, rows[index], strict=True)), **{name: int(total[index]) for name, total in totals.items()}}
        for index in indices
    ]


def _read_rounds(store: Store, run_id: str, after: int) -> list[CurveRow]:
    """Returns the columns `_ROUND_COLUMNS` and `_SCORE_COLUMNS` of the closed rounds.

    One pass over both tables: the view looks each round's evaluations up, too slow for 10,000 rounds.
    """
    query = (
        select(
            RoundTable.round, RoundTable.started_at, RoundTable.closed_at, RoundTable.num_devices,
            RoundTable.num_updates, RoundTable.loss, RoundTable.bytes_up, RoundTable.bytes_down,
            RoundTable.node_accuracy, RoundTable.worst_node_accuracy,
            RoundTable.closed_at - RoundTable.started_at, RoundTable.facts["disagreement"].as_float(),
        )
        .where(RoundTable.run_id == run_id, RoundTable.round > after, RoundTable.closed_at.is_not(None))
        .order_by(RoundTable.round)
    )  # fmt: skip
    with store.database.read() as connection:
        rows, scores = connection.execute(query).all(), _read_scores(connection, run_id, after)
    unknown = None, None
    return [(*row, *scores.get(row[0], unknown)) for row in rows]


def _read_scores(connection: Connection, run_id: str, after: int) -> dict[int, tuple[float | None, float | None]]:
    """Returns loss and accuracy of the global model by round, from the best evaluation source."""
    weight = func.nullif(func.sum(EvaluationTable.num_examples), 0)
    query = (
        select(
            EvaluationTable.round,
            EvaluationTable.source,
            func.sum(EvaluationTable.loss * EvaluationTable.num_examples) / weight,
            func.sum(EvaluationTable.accuracy * EvaluationTable.num_examples) / weight,
        )
        .where(EvaluationTable.run_id == run_id, EvaluationTable.round > after, EvaluationTable.subject == "")
        .group_by(EvaluationTable.round, EvaluationTable.source)
    )
    scores: dict[int, tuple[float | None, float | None]] = {}
    # The best source comes last and wins.
    for number, _, loss, accuracy in sorted(connection.execute(query).all(), key=_get_source_rank, reverse=True):
        scores[number] = loss, accuracy
    return scores


def _get_source_rank(row: Any) -> int:
    return _SOURCE_RANKS.get(row[1], len(_SOURCE_RANKS))

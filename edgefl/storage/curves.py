"""A run's course, round by round, thinned to what a chart can show without losing its extremes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from sqlalchemy import Connection, func, select

from edgefl.storage.models import Evaluation, Round
from edgefl.storage.store import Store
from edgefl.types import Array, Json

EXTREMES = ("accuracy", "loss", "train_loss", "seconds", "node_accuracy")
"""The least and the greatest of these are kept wherever rounds are left out."""
_SOURCES = {"coordinator": 0, "evaluator": 1, "device": 2}
_COLUMNS = (
    "round", "started_at", "closed_at", "num_devices", "num_updates", "train_loss", "bytes_up", "bytes_down",
    "node_accuracy", "worst_node_accuracy", "seconds", "disagreement",
)  # fmt: skip
_SCORES = ("loss", "accuracy")

Row = tuple[Any, ...]


def course(store: Store, run_id: str, *, after: int = -1) -> list[Json]:
    """Returns the closed rounds of a run after a round, in order, with loss and accuracy as `v_rounds` has them."""
    names = (*_COLUMNS, *_SCORES)
    return [dict(zip(names, row, strict=True)) for row in _rows(store, run_id, after)]


def curve(store: Store, run_id: str, points: int) -> tuple[int, list[Json]]:
    """Returns how many rounds have closed, and about `points` of them at most: see `kept_places`.

    `total_up` and `total_down` are the bytes up to the end of each, those of rounds that are left out included.
    """
    rows = _rows(store, run_id, -1)
    if not rows:
        return 0, []
    names = (*_COLUMNS, *_SCORES)
    columns = dict(zip(names, zip(*rows, strict=True), strict=True))
    totals = {f"total_{way}": np.cumsum(columns[f"bytes_{way}"]) for way in ("up", "down")}
    kept = kept_places([np.array(columns[name], dtype=float) for name in EXTREMES], points)
    return len(rows), [
        {**dict(zip(names, rows[place], strict=True)), **{name: int(total[place]) for name, total in totals.items()}}
        for place in kept
    ]


def kept_places(columns: Sequence[Array], points: int) -> list[int]:
    """Returns which rows a chart of so many points needs: first, last, and of each stretch between all extremes.

    Args:
        columns: [n] each, not empty, NaN where nothing is known.
        points: how many; fewer than the extremes of one stretch make one stretch.
    """
    count = len(columns[0])
    if count <= points:
        return list(range(count))
    num_stretches = max(1, points // (2 * len(columns)))
    edges = [count * edge // num_stretches for edge in range(num_stretches + 1)]
    kept = {0, count - 1}
    for column in columns:
        for begin, end in pairwise(edges):
            stretch = column[begin:end]
            if not np.isnan(stretch).all():
                kept |= {begin + int(np.nanargmin(stretch)), begin + int(np.nanargmax(stretch))}
    return sorted(kept)


def _rows(store: Store, run_id: str, after: int) -> list[Row]:
    """Returns the columns `_COLUMNS` and `_SCORES` of the closed rounds.

    One pass over both tables: the view looks each round's evaluations up, which 10,000 rounds cannot wait for.
    """
    query = (
        select(
            Round.round, Round.started_at, Round.closed_at, Round.num_devices, Round.num_updates, Round.loss,
            Round.bytes_up, Round.bytes_down, Round.node_accuracy, Round.worst_node_accuracy,
            Round.closed_at - Round.started_at, Round.facts["disagreement"].as_float(),
        )
        .where(Round.run_id == run_id, Round.round > after, Round.closed_at.is_not(None))
        .order_by(Round.round)
    )  # fmt: skip
    with store.database.read() as connection:
        rows, scores = connection.execute(query).all(), _scores(connection, run_id, after)
    unknown = None, None
    return [(*row, *scores.get(row[0], unknown)) for row in rows]


def _scores(connection: Connection, run_id: str, after: int) -> dict[int, tuple[float | None, float | None]]:
    """Returns loss and accuracy of the global model by round, from the best source that judged it."""
    weight = func.nullif(func.sum(Evaluation.num_examples), 0)
    query = (
        select(
            Evaluation.round,
            Evaluation.source,
            func.sum(Evaluation.loss * Evaluation.num_examples) / weight,
            func.sum(Evaluation.accuracy * Evaluation.num_examples) / weight,
        )
        .where(Evaluation.run_id == run_id, Evaluation.round > after, Evaluation.subject == "")
        .group_by(Evaluation.round, Evaluation.source)
    )
    found: dict[int, tuple[float | None, float | None]] = {}
    # The best source comes last, and stays.
    for number, _, loss, accuracy in sorted(connection.execute(query).all(), key=_rank, reverse=True):
        found[number] = loss, accuracy
    return found


def _rank(row: Any) -> int:
    return _SOURCES.get(row[1], len(_SOURCES))

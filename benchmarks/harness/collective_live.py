"""What a collective saves on real processes: time of a round, bytes, and the same model as by the coordinator."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from edgefl.core.types import Array
from edgefl.simulation.local_fleet import COORDINATOR
from harness.collective_fleet import CollectiveFleet, collective_fleet
from harness.tallied_task import list_faults

TIMED_ROUNDS = 2
"""By the coordinator, after the first, in which caches are warmed; the wires are let go after them."""
ROUNDS = 2
"""By a collective: in the first the model is sent to all devices, the other one is timed."""
TIMEOUT_S = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """One run: what each of its all-reduces took, or each of its rounds by the coordinator.

    Attributes:
        seconds: of one; 0 where nothing was held to a rate.
        through: bytes through the coordinator, by the rows of updates.
        through_wire: the same by its wire: all connections with their headers, and heartbeats; 0 without a wire.
        sent: bytes that the device which sent most has sent, by the rows.
        sent_wire: the same by the wires.
        distance: largest difference between an entry of the model and that of the coordinator's run.
        faults: of the tally.
    """

    devices: int
    megabytes: float
    collective: str
    reductions: int
    seconds: float
    through: float
    through_wire: float
    sent: float
    sent_wire: float
    distance: float
    faults: tuple[str, ...]


def measure_live(
    devices: int, sizes: list[float], collectives: list[str], reductions: int, mbit_per_s: float
) -> Iterator[Found]:
    """Yields for each size the run by the coordinator, then that of each collective, on one fleet."""
    with (
        tempfile.TemporaryDirectory(prefix="edgefl-collectives-") as folder,
        collective_fleet(Path(folder), devices) as fleet,
    ):
        for megabytes in sizes:
            expected: Mapping[str, Array] = {}
            for collective in (COORDINATOR, *collectives):
                print(f"{devices} devices, {megabytes:g} MB, {collective}", file=sys.stderr, flush=True)
                found, model = _measure(fleet, collective, reductions, megabytes, mbit_per_s, expected)
                expected = expected or model
                yield found


def _measure(
    fleet: CollectiveFleet,
    collective: str,
    reductions: int,
    megabytes: float,
    mbit_per_s: float,
    expected: Mapping[str, Array],
) -> tuple[Found, dict[str, Array]]:
    """Runs the same number of trainings whatever the collective, and returns the model too."""
    trainings, is_usual = ROUNDS * reductions, collective == COORDINATOR
    first, last = 1, 1 + TIMED_ROUNDS if is_usual else ROUNDS
    per_round = 1 if is_usual else reductions
    task = {"trainings": trainings, "size_bytes": int(megabytes * 1e6)}
    config = fleet.make_run(collective, reductions=per_round, rounds=trainings // per_round, task=task)
    fleet.limit(mbit_per_s)
    run_id = fleet.submit(config)
    counts = []
    for number in (first, last):
        fleet.wait(run_id, lambda n=number: len(fleet.list_closed(run_id)) >= n, TIMEOUT_S, f"round {number}")
        counts.append((fleet.count_through_coordinator(), fleet.count_sent()))
    fleet.release()
    model = fleet.finish(run_id, TIMEOUT_S)
    rounds = [row for row in fleet.list_closed(run_id) if first < row["round"] <= last]
    rows = [row for row in fleet.fleet.list_history("updates", run=run_id) if row["outcome"] == "used"]
    timed = [row for row in rows if first < row["round"] <= last]
    number = (last - first) * per_round
    return Found(
        devices=len(fleet.names),
        megabytes=megabytes,
        collective=collective,
        reductions=per_round,
        seconds=0.0
        if fleet.network is None
        else sum(row["closed_at"] - row["started_at"] for row in rounds) / number,
        through=sum(row["bytes_up"] + row["bytes_down"] for row in timed) / number,
        through_wire=(counts[1][0] - counts[0][0]) / number,
        sent=max(_sum_sent(timed, name) for name in fleet.names) / number,
        sent_wire=(counts[1][1] - counts[0][1]) / number,
        distance=measure_distance(expected, model),
        faults=tuple(list_faults(model, list_rounds(rows, fleet.names))),
    ), model


def _sum_sent(rows: list[dict[str, Any]], name: str) -> float:
    """Returns what a device sent the others, or the coordinator where there are no others."""
    mine = [row for row in rows if row["device_id"] == name]
    return sum((row["metrics"] or {}).get("peer_bytes_up", row["bytes_up"]) for row in mine)


def list_rounds(used: list[dict[str, Any]], names: Any) -> list[tuple[int, frozenset[int]]]:
    """Returns for each round how many trainings its model is made of, and the numbers of the devices that count.

    A group that broke has one training more than all-reduces.
    """
    found = []
    for number in sorted({row["round"] for row in used}):
        mine = [row for row in used if row["round"] == number]
        counts = {_count_trainings(row) for row in mine}
        assert len(counts) == 1, f"round {number} counts updates of {counts} trainings"
        found.append((counts.pop(), frozenset(names.index(row["device_id"]) for row in mine)))
    return found


def _count_trainings(row: Mapping[str, Any]) -> int:
    """Returns how many trainings an update is the result of: each is one iteration."""
    return int(row["iterations"])


def measure_distance(one: Mapping[str, Array], other: Mapping[str, Array]) -> float:
    """Returns the largest difference between two entries of models; 0 where the first is empty."""
    return max((float(np.abs(tensor - other[name]).max()) for name, tensor in one.items()), default=0.0)

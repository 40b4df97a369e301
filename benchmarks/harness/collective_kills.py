"""Kills of coordinator and devices while these add up their updates, and whether one was lost or counted twice."""

from __future__ import annotations

import shutil
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path

from edgefl.core.types import derive_rng
from edgefl.simulation.local_fleet import COORDINATOR, TERMINAL_STATUSES
from harness.collective_fleet import CollectiveFleet, collective_fleet
from harness.collective_live import list_rounds
from harness.tallied_task import list_faults

REDUCTIONS, TRAIN_S = 4, 0.3
ROUNDS_PER_KILL, SPARE_ROUNDS = 3, 10
MAX_WAIT_S, MAX_RESTART_S = 2.0, 2.0
SERVES_WITHIN_S = 300.0


def disturb(num_devices: int, megabytes: float, mbit_per_s: float, num_kills: int, seed: int) -> list[str]:
    """Returns what is wrong after so many kills in one run with a ring: nothing, if all is well.

    Two devices or all of them count as so many kills. The fleet's folder stays where something is wrong.

    Raises:
        EdgeflError: a round did not close in time.
    """
    root = Path(tempfile.mkdtemp(prefix="edgefl-collective-kills-"))
    with collective_fleet(root, num_devices) as fleet:
        rounds = ROUNDS_PER_KILL * num_kills + SPARE_ROUNDS
        task = {
            "trainings": rounds * REDUCTIONS,
            "size_bytes": int(megabytes * 1e6) + 4 * num_devices * rounds * REDUCTIONS,
            "train_s": TRAIN_S,
        }
        fleet.limit(mbit_per_s)
        run_id = fleet.submit(fleet.make_run("ring", reductions=REDUCTIONS, rounds=rounds, task=task))
        killed = _kill_all(fleet, run_id, num_kills, seed)
        if killed < num_kills:
            return [f"the run was over after {killed} kills"]
        fleet.fleet.make_client().post(f"/edgefl/v1/runs/{run_id}/stop")
        model = fleet.finish(run_id, SERVES_WITHIN_S)
        used = [row for row in fleet.fleet.list_history("updates", run=run_id) if row["outcome"] == "used"]
    doubled = [] if len({(row["round"], row["device_id"]) for row in used}) == len(used) else ["doubled: two rows"]
    counts = list_rounds(used, fleet.names)
    broken = sum(count < REDUCTIONS for count, _ in counts)
    _say(f"{len(counts)} rounds, {sum(count for count, _ in counts)} trainings, {broken} rounds cut short")
    faults = [*doubled, *list_faults(model, counts)]
    if not faults:
        shutil.rmtree(root)
    return faults


def _kill_all(fleet: CollectiveFleet, run_id: str, num_kills: int, seed: int) -> int:
    """Kills and starts again; returns how often. After each a round has to close."""
    rng, pause, killed = derive_rng(seed, "kills"), threading.Event(), 0
    fleet.wait(run_id, lambda: len(fleet.list_closed(run_id)) >= 1, SERVES_WITHIN_S, "the first round")
    while killed < num_kills:
        pause.wait(float(rng.uniform(0.0, MAX_WAIT_S)))
        if fleet.find_status(run_id) in TERMINAL_STATUSES:
            break
        victims = _draw(fleet.names, rng)[: num_kills - killed]
        closed = len(fleet.list_closed(run_id))
        _say(f"kill {killed + 1}: {', '.join(victims)} in round {closed + 1}")
        for name in victims:
            fleet.fleet.kill(name)
        pause.wait(float(rng.uniform(0.0, MAX_RESTART_S)))
        for name in victims:
            (fleet.fleet.start_coordinator if name == COORDINATOR else lambda n=name: fleet.fleet.start_device(n))()
        killed += len(victims)
        fleet.wait(run_id, lambda n=closed: len(fleet.list_closed(run_id)) > n, SERVES_WITHIN_S, "a round to close")
    return killed


def _draw(names: Sequence[str], rng: object) -> list[str]:
    """Returns who is killed: the coordinator, a device, two of them or all."""
    kind = rng.choice(4, p=(0.25, 0.5, 0.15, 0.1))
    if kind == 0:
        return [COORDINATOR]
    number = {1: 1, 2: 2, 3: len(names)}[int(kind)]
    return [names[place] for place in sorted(rng.choice(len(names), number, replace=False))]


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)

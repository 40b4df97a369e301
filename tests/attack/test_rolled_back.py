"""An older copy of the coordinator's directory is put back by hand, under a fleet that worked on meanwhile."""

from __future__ import annotations

import re
import shutil
import signal
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from edgefl.core.config import parse_run
from edgefl.simulation.local_fleet import LocalDeviceSpec, LocalFleet
from edgefl.tasks.datasets.central import create_shards

pytestmark = pytest.mark.attack

NUM_ROUNDS = 20
ITERATIONS = 3000
"""Long enough that the copy and the stop fall into a round."""
STRATEGIES: dict[str, dict[str, Any]] = {
    "fedavg": {"name": "fedavg"},
    "fedbuff": {"name": "fedbuff", "buffer_size": 2},
}


def eventually(condition: Callable[[], Any], timeout_s: float = 120.0) -> Any:
    deadline_s = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline_s, f"did not happen within {timeout_s} s"
        time.sleep(0.02)
    return value


@contextmanager
def open_fleet(root: Path) -> Iterator[LocalFleet]:
    paths = create_shards("digits", "dirichlet:0.5", 3, root / "data")
    devices = [
        LocalDeviceSpec(name=f"device-{number}", shards={"digits": str(path.resolve())})
        for number, path in enumerate(paths)
    ]
    with LocalFleet(root=root / "fleet", devices=devices) as fleet:
        yield fleet


def list_used(fleet: LocalFleet, run_id: str) -> dict[str, str]:
    """Returns the used assignments of a run, with their devices."""
    rows = fleet.list_history("updates", run=run_id)
    return {row["assignment_id"]: row["device_id"] for row in rows if row["outcome"] == "used"}


def count_rounds(fleet: LocalFleet, run_id: str) -> int:
    return int(fleet.make_client().get(f"/edgefl/v1/runs/{run_id}")["rounds"])


def copy_frozen(fleet: LocalFleet) -> Path:
    """Returns a copy of the directory of a live coordinator as a power cut would leave it, with all its times."""
    copy = fleet.root / "older"
    fleet.kill("coordinator", signal.SIGSTOP)
    try:
        return Path(shutil.copytree(fleet.directory, copy))
    finally:
        fleet.kill("coordinator", signal.SIGCONT)


def count_untrained(fleet: LocalFleet, used: dict[str, str], log_sizes: dict[str, int]) -> int:
    """Returns how many updates no device trained since its log was this long: they came from its memory."""
    logs = {
        name: (fleet.root / f"{name}.log").read_bytes()[size:].decode(errors="replace")
        for name, size in log_sizes.items()
    }
    # Fewer iterations than ordered are those of the run's end, when devices finish early.
    return sum(
        re.search(rf"/{re.escape(assignment_id)}: \d+ iterations", logs[name]) is None
        for assignment_id, name in used.items()
    )


@pytest.mark.parametrize("strategy", sorted(STRATEGIES))
def test_no_answer_of_the_lost_time_is_counted_and_the_run_goes_on(
    tmp_path: Path, attack_table: Any, strategy: str
) -> None:
    with open_fleet(tmp_path) as fleet:
        config = {
            "run": {"task": "digits", "rounds": NUM_ROUNDS, "evaluate_on": "none"},
            "strategy": {**STRATEGIES[strategy], "iterations": ITERATIONS},
            "devices": {"min": 2},
        }
        run_id = fleet.submit(parse_run(config))
        eventually(lambda: count_rounds(fleet, run_id) >= 5)
        older = copy_frozen(fleet)
        # Without it the models of the lost time are others than those that the copy goes on to.
        fleet.kill("device-2")
        at_copy = count_rounds(fleet, run_id)
        eventually(lambda: count_rounds(fleet, run_id) >= at_copy + 1)
        fleet.kill("coordinator")
        shutil.rmtree(fleet.directory)
        shutil.copytree(older, fleet.directory)
        with sqlite3.connect(older / "edgefl.db") as database:
            rows = database.execute("SELECT assignment_id FROM updates WHERE outcome = 'used'").fetchall()
        database.close()
        before = {name for (name,) in rows}
        log_sizes = {device.name: (fleet.root / f"{device.name}.log").stat().st_size for device in fleet.devices}
        fleet.start_coordinator()
        fleet.start_device("device-2")

        run = fleet.wait_for_run(run_id)
        used = list_used(fleet, run_id)
        foreign = count_untrained(fleet, {name: used[name] for name in used.keys() - before}, log_sizes)
        counts = [row["num_updates"] for row in fleet.list_history("rounds", run=run_id)]
        began = [row for row in fleet.list_history("events") if row["kind"] == "lineage-began"]
        # What was under way when the goal was reached may close one more round.
        assert run["status"] == "finished"
        assert run["rounds"] in {NUM_ROUNDS, NUM_ROUNDS + 1}
        assert sum(counts) == len(used) > len(before)
        assert len(began) == 1
        attack_table.add(
            f"old copy of the directory restored under a live fleet ({strategy})",
            "0 foreign updates counted",
            f"{foreign} of {len(used.keys() - before)} updates, {run['rounds']} rounds closed",
        )
        assert foreign == 0

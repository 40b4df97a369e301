"""Nodes that go on by themselves: five real devices, a real broker, and a coordinator that comes and goes.

All devices train with their whole shard at once on a convex loss, so that there is one optimum, which the test finds
by itself: what the devices come to is held against it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgefl.config import RunConfig, parse_run
from edgefl.coordinator.brokers.choice import mosquitto_path
from edgefl.local_fleet import LocalDevice, LocalFleet, free_port
from edgefl.storage.checkpoints import load_model_file
from edgefl.tasks.cutting import cut_shards
from edgefl.tasks.registry import make_task
from edgefl.types import Array

pytestmark = [
    pytest.mark.timeout(400),
    pytest.mark.skipif(mosquitto_path() is None, reason="mosquitto is not installed"),
]

HERE = Path(__file__).parent
NAMES = tuple(f"device-{number:02}" for number in range(1, 6))
DECAY, RATE, PERIOD, PER_ROUND = 0.05, 0.2, 4, 25


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return cut_shards("digits", "by-class", 5, tmp_path_factory.mktemp("classes"))


@contextmanager
def site(tools: Any, root: Path, shards: Sequence[Path], *programs: Sequence[str]) -> Iterator[LocalFleet]:
    """A broker in a process of its own, a coordinator, and five devices with two classes each."""
    port = free_port()
    root.mkdir()
    devices = [
        LocalDevice(name=name, shards={"digits": str(path)}, **({"program": programs[0]} if programs else {}))
        for name, path in zip(NAMES, shards, strict=True)
    ]
    fleet = tools.fleet(
        root,
        devices,
        test_shards={"digits": str(shards[0].parent / "test.npz")},
        broker=f"mqtts://127.0.0.1:{port}",
    )
    fleet.command("coordinator", "init", "--dir", str(fleet.directory), "--host", "127.0.0.1",
                  "--port", str(fleet.port))  # fmt: skip
    words = ("coordinator", "broker", "--dir", str(fleet.directory), "--host", "127.0.0.1", "--port", str(port))
    broker = fleet.popen(words)
    try:
        with fleet:
            yield fleet
    finally:
        broker.terminate()
        broker.communicate(timeout=60)
    tools.check_logs(root)


def run_file(**strategy: Any) -> RunConfig:
    return parse_run(
        {
            "run": {"task": "digits", "rounds": 100_000, "local_test_fraction": 0.0},
            "task": {"model": "logistic"},
            "strategy": {
                "name": "pdmm-isvr",
                "graph": "complete",
                "carrier": "peer",
                "exchange": "poisson",
                "iterations": PERIOD,
                "exchanges_per_round": PER_ROUND,
                "batch_size": 10_000,
                "learning_rate": RATE,
                "weight_decay": DECAY,
                **strategy,
            },
            "devices": {"min": 5},
        }
    )


def optimum(shards: Sequence[Path]) -> dict[str, Array]:
    """Returns the least sum of the shards' losses, each with its decay, by gradient descent."""
    task = make_task("digits", {"model": "logistic"})
    learner, data = task.learner(), [task.read(str(path)) for path in shards]
    learner.load(task.init(7))
    for _ in range(4000):
        total = {name: DECAY * weights for name, weights in learner.parameters.items()}
        for each in data:
            learner.gradient(each)
            for name, gradient in learner.gradients.items():
                total[name] = total[name] + gradient / len(data)
        for name, weights in learner.parameters.items():
            weights -= 0.2 * total[name]  # noqa: PLW2901 in place: the learner's own array
    return learner.read()


def distance(one: dict[str, Array], other: dict[str, Array]) -> float:
    apart = sum(float(np.sum((one[name] - other[name]) ** 2)) for name in other)
    return float(np.sqrt(apart / sum(float(np.sum(array**2)) for array in other.values())))


def closed(fleet: LocalFleet, run_id: str) -> list[Any]:
    rows = [row for row in fleet.history("rounds", run=run_id, limit=1000) if row["closed_at"]]
    return sorted(rows, key=lambda row: row["round"])


def apart(fleet: LocalFleet, run_id: str) -> float:
    rows = closed(fleet, run_id)
    return float(rows[-1]["facts"]["disagreement"]) if rows and rows[-1]["facts"] else 1.0


def furthest(fleet: LocalFleet, run_id: str) -> int:
    """Returns how many local iterations the node that is furthest has told of."""
    rows = [row["metrics"].get("iterations_in_all", 0) for row in fleet.history("updates", run=run_id, limit=1000)]
    return int(max(rows, default=0))


def stopped(fleet: LocalFleet, run_id: str) -> dict[str, Array]:
    """Stops the run and returns its model."""
    fleet.operator().post(f"/edgefl/v1/runs/{run_id}/stop", {})
    assert fleet.wait_run(run_id)["status"] == "stopped"
    files = sorted((fleet.directory / "models").glob("*.safetensors"), key=lambda path: path.stat().st_mtime_ns)
    return load_model_file(files[-1])


def test_five_devices_come_to_a_good_model_under_a_coordinator_that_is_killed_and_stop_with_their_run(
    tools: Any, tmp_path: Path, shards: Sequence[Path]
) -> None:
    with site(tools, tmp_path / "fleet", shards) as fleet:
        config = run_file()
        run_id = fleet.submit(replace(config, run=replace(config.run, rounds=6)))
        tools.eventually(lambda: closed(fleet, run_id), 60, "a round")
        fleet.kill("coordinator")
        fleet.start_coordinator()
        run = fleet.wait_run(run_id)
        assert (run["status"], run["reason"]) == ("finished", "rounds reached 6")
        rounds = closed(fleet, run_id)
        assert [row["round"] for row in rounds] == list(range(1, 7))
        assert [row["facts"]["nodes"] for row in rounds] == [5] * 6
        # The evaluator comes back with the coordinator, and rounds do not wait for it.
        scored = [row for row in rounds if row["accuracy"] is not None]
        assert scored[-1]["accuracy"] > 0.6
        assert scored[-1]["worst_node_accuracy"] is not None
        assert {row["bytes_down"] for row in fleet.history("updates", run=run_id) if row["round"] > 3} < {
            *range(4000)
        }
        tools.eventually(lambda: not list(fleet.root.glob("device-*/node.json")), 20, "all have stopped")


AWAY_S = 60.0


@pytest.mark.slow
def test_devices_train_on_without_a_coordinator_and_survivors_come_to_their_own_optimum(
    tools: Any, tmp_path: Path, shards: Sequence[Path]
) -> None:
    with site(tools, tmp_path / "fleet", shards) as fleet:
        run_id = fleet.submit(run_file())
        tools.eventually(lambda: len(closed(fleet, run_id)) >= 2, 60, "two rounds")
        before = furthest(fleet, run_id)
        fleet.kill("coordinator")
        tools.pause(AWAY_S)
        assert all(fleet.processes[name].poll() is None for name in NAMES)
        fleet.start_coordinator()
        known = len(closed(fleet, run_id))
        tools.eventually(lambda: len(closed(fleet, run_id)) >= known + 2, 90, "the run goes on")
        # What the first reports tell was done meanwhile: in so short a time nobody does it after the restart.
        assert furthest(fleet, run_id) > before + 4 * PER_ROUND * PERIOD
        rounds = closed(fleet, run_id)
        assert [row["round"] for row in rounds] == list(range(1, len(rounds) + 1))
        assert rounds[-1]["facts"]["nodes"] == 5
        tools.eventually(lambda: apart(fleet, run_id) < 5e-3, 120, "the nodes agree")

        fleet.kill("device-05")
        tools.eventually(lambda: closed(fleet, run_id)[-1]["facts"]["nodes"] == 4, 90, "four go on")
        all_five, survivors = optimum(shards), optimum(shards[:4])
        tools.eventually(lambda: apart(fleet, run_id) < 5e-3, 120, "the survivors agree")
        left = closed(fleet, run_id)[-1]["round"]
        tools.eventually(lambda: closed(fleet, run_id)[-1]["round"] >= left + 40, 120, "they settle")
        model = stopped(fleet, run_id)
        assert distance(model, survivors) < 1e-3
        assert distance(all_five, survivors) > 0.1


@pytest.mark.slow
def test_three_in_ten_messages_lost_lead_to_the_same_optimum(
    tools: Any, tmp_path: Path, shards: Sequence[Path]
) -> None:
    program = (sys.executable, str(HERE / "lossy_device.py"))
    with site(tools, tmp_path / "fleet", shards, program) as fleet:
        run_id = fleet.submit(run_file())
        tools.eventually(lambda: apart(fleet, run_id) < 5e-3, 120, "the nodes agree")
        tools.eventually(lambda: closed(fleet, run_id)[-1]["round"] >= 60, 120, "they settle")
        assert distance(stopped(fleet, run_id), optimum(shards)) < 1e-3

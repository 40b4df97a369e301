"""Nodes that go on by themselves: five real devices, a real broker, and a coordinator that comes and goes.

All devices train with their whole shard at once on a convex loss, so that there is one optimum, which the test finds
by itself: what the devices come to is held against it. Others reach each other over TLS, with nobody in between.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from requirements import needs

from edgefl.core.config import RunConfig, parse_run
from edgefl.core.types import Array
from edgefl.simulation.local_fleet import LocalDeviceSpec, LocalFleet, find_free_port
from edgefl.storage.checkpoints import load_model_file
from edgefl.tasks.datasets.central import create_shards
from edgefl.tasks.registry import make_task

pytestmark = [pytest.mark.extended, pytest.mark.timeout(400)]

HERE = Path(__file__).parent
NAMES = tuple(f"device-{number:02}" for number in range(1, 6))
DECAY, RATE, PERIOD, PER_ROUND = 0.05, 0.2, 4, 25
AWAY_S = 60.0
PROGRAM = (sys.executable, "-m", "edgefl.cli.main")
LOSSY_PROGRAM = (sys.executable, str(HERE / "lossy_device.py"))


@contextmanager
def site(tools: Any, root: Path, *, num: int = 5, program: Sequence[str] = PROGRAM) -> Iterator[LocalFleet]:
    """A broker in a process of its own, a coordinator, and devices that share the ten classes."""
    paths = create_shards("digits", "by-class", num, root / "classes")
    devices = [
        LocalDeviceSpec(name=name, shards=dict.fromkeys(("digits", tools.gated), str(path)), program=program)
        for name, path in zip(NAMES, paths, strict=False)
    ]
    with tools.fleet_beside_broker(root / "fleet", devices) as (fleet, _):
        yield fleet


def run_file(rounds: int = 100_000, *, task: str = "digits", exchange: str = "poisson", **options: Any) -> RunConfig:
    return parse_run(
        {
            "run": {"task": task, "rounds": rounds, "local_test_fraction": 0.0, "evaluate_on": "none"},
            "task": options or {"model": "logistic"},
            "strategy": {
                "name": "pdmm-isvr",
                "graph": "complete",
                "carrier": "peer",
                "exchange": exchange,
                "iterations": PERIOD,
                "exchanges_per_round": PER_ROUND,
                "batch_size": 10_000,
                "learning_rate": RATE,
                "weight_decay": DECAY,
            },
        }
    )


def optimum(devices: Sequence[LocalDeviceSpec]) -> dict[str, Array]:
    """Returns the least sum of the shards' losses, each with its decay, by gradient descent."""
    task = make_task("digits", {"model": "logistic"})
    learner, data = task.learner(), [task.read(device.shards["digits"]) for device in devices]
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
    rows = [row for row in fleet.list_history("rounds", run=run_id, limit=1000) if row["closed_at"]]
    return sorted(rows, key=lambda row: row["round"])


def apart(fleet: LocalFleet, run_id: str) -> float:
    rows = closed(fleet, run_id)
    return float(rows[-1]["facts"]["disagreement"]) if rows and rows[-1]["facts"] else 1.0


def furthest(fleet: LocalFleet, run_id: str) -> int:
    """Returns how many local iterations the node that is furthest has told of."""
    rows = [
        row["metrics"].get("iterations_in_all", 0) for row in fleet.list_history("updates", run=run_id, limit=1000)
    ]
    return int(max(rows, default=0))


def stopped(fleet: LocalFleet, tools: Any, run_id: str) -> dict[str, Array]:
    """Stops the run and returns its model."""
    tools.stop(fleet, run_id)
    files = sorted((fleet.directory / "models").glob("*.safetensors"), key=lambda path: path.stat().st_mtime_ns)
    return load_model_file(files[-1])


@needs("mosquitto")
@pytest.mark.parametrize("exchange", ["poisson", "pair"])
def test_devices_come_to_a_good_model_under_a_coordinator_that_is_killed_and_stop_with_their_run(
    tools: Any, tmp_path: Path, exchange: str
) -> None:
    with site(tools, tmp_path, num=3) as fleet:
        run_id = fleet.submit(run_file(6, task=tools.gated, exchange=exchange, pace_s=0.01))
        tools.eventually(lambda: closed(fleet, run_id), 60, "a round")
        fleet.kill("coordinator")
        fleet.start_coordinator()
        run = fleet.wait_for_run(run_id)
        assert (run["status"], run["reason"]) == ("finished", "rounds reached 6")
        rounds = closed(fleet, run_id)
        assert [row["round"] for row in rounds] == list(range(1, 7))
        assert [row["facts"]["nodes"] for row in rounds] == [3] * 6
        task = make_task("digits")
        learner = task.learner()
        learner.load(load_model_file(fleet.get_model_path(run["model"])))
        assert learner.evaluate(task.read(str(tools.test_shard)))[1] > 0.6
        late = [row["bytes_down"] for row in fleet.list_history("updates", run=run_id) if row["round"] > 3]
        assert max(late) < 4000, "no models come down"
        tools.eventually(lambda: not list(fleet.root.glob("device-*/node.json")), 20, "all have stopped")


@pytest.mark.slow
@needs("mosquitto")
def test_devices_train_on_without_a_coordinator_and_survivors_come_to_their_own_optimum(
    tools: Any, tmp_path: Path
) -> None:
    with site(tools, tmp_path) as fleet:
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
        all_five, survivors = optimum(fleet.devices), optimum(fleet.devices[:4])
        tools.eventually(lambda: apart(fleet, run_id) < 5e-3, 120, "the survivors agree")
        left = closed(fleet, run_id)[-1]["round"]
        tools.eventually(lambda: closed(fleet, run_id)[-1]["round"] >= left + 40, 120, "they settle")
        assert distance(stopped(fleet, tools, run_id), survivors) < 1e-3
        assert distance(all_five, survivors) > 0.1


@pytest.mark.slow
@needs("mosquitto")
def test_three_in_ten_messages_lost_lead_to_the_same_optimum(tools: Any, tmp_path: Path) -> None:
    with site(tools, tmp_path, program=LOSSY_PROGRAM) as fleet:
        run_id = fleet.submit(run_file())
        tools.eventually(lambda: apart(fleet, run_id) < 5e-3, 120, "the nodes agree")
        tools.eventually(lambda: closed(fleet, run_id)[-1]["round"] >= 60, 120, "they settle")
        assert distance(stopped(fleet, tools, run_id), optimum(fleet.devices)) < 1e-3


def test_three_devices_train_in_step_over_direct_links_and_go_on_where_they_were_stopped(
    tools: Any, tmp_path: Path
) -> None:
    """Board to board over TLS: no broker and no coordinator in between."""
    hosts = [{"name": name, "addr": "127.0.0.1", "port": find_free_port()} for name in NAMES[:3]]
    (tmp_path / "hosts.json").write_text(json.dumps({"hosts": hosts}))

    def direct(rounds: int, exchanges: int) -> RunConfig:
        strategy = {
            "name": "k-gt", "graph": "complete", "carrier": "direct", "hosts": str(tmp_path / "hosts.json"),
            "learning_rate": 0.1, "exchanges_per_round": exchanges,
        }  # fmt: skip
        return parse_run({"run": {"task": "digits", "rounds": rounds}, "strategy": strategy, "devices": {"min": 3}})

    with tools.fleet(tmp_path / "fleet", tools.devices(3), scored=True) as fleet:
        run_id = fleet.submit(direct(3, 5))
        assert fleet.wait_for_run(run_id)["status"] == "finished"
        rounds = closed(fleet, run_id)
        assert len(rounds) == 3
        # In step: nobody goes on before it has heard of both neighbours, whichever way the messages take.
        assert sum(row["facts"]["messages"] for row in rounds) == 3 * 30
        assert rounds[-1]["accuracy"] > 0.5

        run_id = fleet.submit(direct(8, 40))
        tools.wait_rounds(fleet, run_id, 2)
        assert tools.stop(fleet, run_id)["rounds"] < 8
        fleet.make_client().post(f"/edgefl/v1/runs/{run_id}/resume")
        assert fleet.wait_for_run(run_id)["status"] == "finished"
        assert [row["round"] for row in closed(fleet, run_id)] == list(range(1, 9))
        assert not tools.events(fleet, "assignment-failed", run=run_id)

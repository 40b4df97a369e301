"""Every strategy over real processes: each ends, counts every update once, and a device that is killed stops none."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from edgefl.config import RunConfig, parse_run
from edgefl.local_fleet import LocalFleet
from edgefl.strategies.registry import BUILT_IN

NAMES = ("device-01", "device-02", "device-03")
# `redundant` needs shards of its own: test_redundancy.py. `local` asks one device alone.
STRATEGIES = sorted(set(BUILT_IN) - {"redundant"})
ROUNDS = 4

each_strategy = pytest.mark.parametrize("name", STRATEGIES)


@pytest.fixture(scope="module")
def fleet(tools: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalFleet]:
    root = tmp_path_factory.mktemp("every-strategy")
    devices = tools.devices(len(NAMES), "digits", tools.gated)
    with tools.fleet(root, devices, test_shards={"digits": str(tools.test_shard)}) as running:
        yield running
    tools.check_logs(root)


@pytest.fixture
def three(fleet: LocalFleet) -> LocalFleet:
    for name in NAMES:
        if fleet.processes[name].poll() is not None:
            fleet.start_device(name)
    fleet.wait_present(len(NAMES) + 1)
    return fleet


def run_of(name: str, *, task: str = "digits", pace_s: float | None = None, **run: Any) -> RunConfig:
    strategy: dict[str, Any] = {"name": name, "iterations": 3, "learning_rate": 0.1, "batch_size": 16}
    if name == "esync":
        del strategy["iterations"]  # it finds them out itself
    if name in {"d2", "gradient-tracking"}:
        strategy["iterations"] = 1  # they exchange after every one
    return parse_run(
        {
            "run": {"task": task, "rounds": ROUNDS, "evaluate_every": ROUNDS, **run},
            "task": {} if pace_s is None else {"pace_s": pace_s},
            "strategy": strategy,
            "devices": {"min": len(NAMES)},
        }
    )


def check_history(fleet: LocalFleet, run_id: str) -> None:
    """Every assignment has one row and one outcome; versions are met in order and by as many updates as are told."""
    rows, rounds = fleet.history("updates", run=run_id), fleet.history("rounds", run=run_id)
    assert len({row["assignment_id"] for row in rows}) == len(rows)
    used = [row for row in rows if row["outcome"] == "used"]
    closed = [row for row in rounds if row["closed_at"] is not None]
    assert sum(row["num_updates"] for row in closed) == len(used)
    assert [row["version"] for row in closed] == sorted(row["version"] for row in closed)
    assert all(row["base_version"] + row["staleness"] == row["applied_version"] for row in used)


@each_strategy
def test_a_run_ends_with_every_update_counted_once(three: LocalFleet, name: str) -> None:
    run = three.wait_run(three.submit(run_of(name)))
    assert (run["status"], run["reason"]) == ("finished", f"rounds reached {ROUNDS}")
    check_history(three, run["run_id"])
    devices = {row["device_id"] for row in three.history("updates", run=run["run_id"]) if row["outcome"] == "used"}
    assert devices == ({"device-01"} if name == "local" else set(NAMES))


@pytest.mark.slow
@each_strategy
def test_a_killed_device_stops_no_run(three: LocalFleet, tools: Any, name: str) -> None:
    config = run_of(name, task=tools.gated, pace_s=0.3, rounds=8, evaluate_on="none")
    run_id = three.submit(config)
    tools.eventually(lambda: tools.used(three, run_id), what="the first update is in")
    three.kill("device-03")
    run = three.wait_run(run_id)
    assert (run["status"], run["reason"]) == ("finished", "rounds reached 8")
    check_history(three, run_id)

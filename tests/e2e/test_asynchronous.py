"""Asynchronous runs over real processes: nobody waits for anybody, and what changed is all that is sent."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from edgefl.config import RunConfig, parse_run
from edgefl.local_fleet import LocalFleet

WHOLE_BYTES = 4_810 * 4
"""The digits' model in single precision."""


@pytest.fixture(scope="module")
def fleet(tools: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalFleet]:
    root = tmp_path_factory.mktemp("asynchronous")
    devices = tools.devices(3, "digits", tools.gated)
    with tools.fleet(root, devices, test_shards={"digits": str(tools.test_shard)}) as running:
        yield running
    tools.check_logs(root)


@pytest.fixture
def three(fleet: LocalFleet) -> LocalFleet:
    for name in ("device-01", "device-02", "device-03"):
        if fleet.processes[name].poll() is not None:
            fleet.start_device(name)
    fleet.wait_present(4)
    return fleet


def _run(
    name: str,
    *,
    down: str = "dense",
    task: str = "digits",
    pace_s: float | None = None,
    options: dict[str, Any] | None = None,
    **run: Any,
) -> RunConfig:
    strategy = {"name": name, "iterations": 4, "learning_rate": 0.1, "batch_size": 16, **(options or {})}
    values: dict[str, Any] = {
        "run": {"task": task, "evaluate_every": 10, **run},
        "strategy": strategy,
        "compression": {"down": down},
        "devices": {"min": 3},
    }
    if pace_s is not None:
        values["task"] = {"pace_s": pace_s}
    return parse_run(values)


@pytest.mark.parametrize(("name", "options"), [("asgd", {}), ("fedbuff", {}), ("adacomp", {"compression": 0.2})])
def test_three_devices_run_to_the_end_and_updates_meet_newer_models_than_their_own(
    three: LocalFleet, tools: Any, name: str, options: dict[str, Any]
) -> None:
    run_id = three.submit(_run(name, rounds=20, options=options))
    run = three.wait_run(run_id)
    assert (run["status"], run["reason"]) == ("finished", "rounds reached 20")
    used = tools.used(three, run_id)
    assert {row["device_id"] for row in used} == {"device-01", "device-02", "device-03"}
    assert max(row["staleness"] for row in used) > 0
    assert all(row["staleness"] == row["applied_version"] - row["base_version"] for row in used)
    rounds = [row for row in three.history("rounds", run=run_id) if row["closed_at"]]
    assert sum(row["num_updates"] for row in rounds) == len(used)
    if name != "fedbuff":
        assert [row["num_updates"] for row in rounds[:20]] == [3] * 20
        assert [row["applied_version"] for row in sorted(used, key=lambda row: row["applied_version"])] == list(
            range(len(used))
        )
    assert run["accuracy"] > 0.35, "in which order updates come is chance, but one of ten is guessed"


def test_a_killed_device_stops_nobody_and_trains_again_when_it_is_back(three: LocalFleet, tools: Any) -> None:
    run = {"task": tools.gated, "pace_s": 0.02, "rounds": 100_000, "evaluate_on": "none"}
    run_id = three.submit(_run("adacomp", down="delta|dense", **run))
    tools.eventually(lambda: len(tools.used(three, run_id, "device-03")) > 2, what="all of them train")
    three.kill("device-03")
    before = len(tools.used(three, run_id))
    tools.eventually(lambda: len(tools.used(three, run_id)) > before + 10, what="the others go on")
    three.start_device("device-03")
    known = len(tools.used(three, run_id, "device-03"))
    tools.eventually(lambda: len(tools.used(three, run_id, "device-03")) > known + 2, what="it trains again")
    three.command("run", "stop", run_id)
    assert three.wait_run(run_id)["status"] == "stopped"
    outcomes = [row["outcome"] for row in three.history("updates", run=run_id)]
    assert outcomes.count("lost") <= 1
    assert {"used", "lost"} >= set(outcomes)


def test_a_sparse_downlink_sends_a_fraction_and_changes_nothing_of_the_result(three: LocalFleet, tools: Any) -> None:
    """One device, so that both runs are the same sequence of updates."""
    models, bytes_down = [], []
    for down in ("dense", "delta|dense"):
        config = _run("adacomp", down=down, rounds=30, evaluate_on="none").to_json()
        config["devices"] = {"min": 1, "names": ["device-01"]}
        run_id = three.submit(parse_run(config))
        models.append(three.wait_run(run_id)["model"])
        rows = sorted(tools.used(three, run_id), key=lambda row: row["base_version"])
        assert len(rows) == 30
        bytes_down.append([row["bytes_down"] for row in rows])
    assert models[0] == models[1]
    assert min(bytes_down[0]) > WHOLE_BYTES
    assert bytes_down[1][0] > WHOLE_BYTES, "the first model is a whole one"
    assert max(bytes_down[1][1:]) < WHOLE_BYTES / 5


def test_a_new_agent_in_the_middle_of_work_is_sent_a_whole_model_and_nothing_is_lost(
    three: LocalFleet, tools: Any, tmp_path: Path
) -> None:
    gate = tools.gate(tmp_path / "gate")
    config = _run("adacomp", down="delta|dense", task=tools.gated, pace_s=0.1, rounds=8, evaluate_on="none").to_json()
    config["task"]["gate"] = str(gate.folder)
    config["devices"] = {"min": 1, "names": ["device-02"]}
    gate.open()
    run_id = three.submit(parse_run(config))
    tools.eventually(lambda: tools.used(three, run_id), what="it holds a model")
    (gate.folder / "open").unlink()
    assert tools.status(three, run_id) == "running"
    three.kill("device-02")
    three.start_device("device-02")
    gate.open()
    assert three.wait_run(run_id)["status"] == "finished"
    rows = three.history("updates", run=run_id)
    assert {row["outcome"] for row in rows} == {"used"}


def test_what_an_update_leaves_out_comes_with_the_next_one(three: LocalFleet, tools: Any) -> None:
    """One percent of the entries, as 8-bit values: with error feedback it learns all the same."""
    losses = {}
    for improved in (False, True):
        config = _run("adacomp", down="delta|fp16", rounds=120, evaluate_on="none").to_json()
        config["strategy"] |= {"improved": improved, "learning_rate": 0.3}
        config["devices"] = {"min": 1, "names": ["device-01"]}
        run_id = three.submit(parse_run(config))
        assert three.wait_run(run_id)["status"] == "finished"
        rows = sorted(tools.used(three, run_id), key=lambda row: row["base_version"])
        assert len(rows) == 120
        losses[improved] = sum(row["loss"] for row in rows[-10:]) / 10
    assert losses[True] < losses[False]

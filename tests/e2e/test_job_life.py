"""The life of a run: asked before it begins, left alone, interrupted, taken up again, and read about afterwards."""

from __future__ import annotations

import json
import sqlite3
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from edgefl.config import RunConfig, parse_run
from edgefl.errors import RunFailedError
from edgefl.local_fleet import LocalFleet

BOTH = ("device-01", "device-02")
ALL = (*BOTH, "device-03")
UNDER_WAY = {"queued", "running", "stopping"}


@pytest.fixture(scope="module")
def fleet(tools: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalFleet]:
    """Two devices with both tasks, and a third that has no shard of digits."""
    root = tmp_path_factory.mktemp("job-life")
    devices = [*tools.devices(2, "digits", tools.gated), *tools.devices(1, tools.gated, start=3)]
    with tools.fleet(root, devices, test_shards={"digits": str(tools.test_shard)}) as running:
        yield running
    tools.check_logs(root)


@pytest.fixture(autouse=True)
def idle(fleet: LocalFleet, tools: Any) -> Iterator[None]:
    """Ends what a test that failed has left behind: the runs of the others would wait for it."""
    yield
    left = [row["run_id"] for row in fleet.operator().get("/edgefl/v1/runs")["rows"] if row["status"] in UNDER_WAY]
    for run_id in left:
        fleet.operator().post(f"/edgefl/v1/runs/{run_id}/stop")
    tools.eventually(lambda: not {tools.status(fleet, run_id) for run_id in left} & UNDER_WAY)


def digits(**sections: Any) -> RunConfig:
    return parse_run({"run": {"task": "digits", "rounds": 3}, **sections})


def edgefl(fleet: LocalFleet, *words: object) -> tuple[int, str, str]:
    process = fleet.popen([str(word) for word in words], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    out, err = process.communicate(timeout=60)
    return process.returncode, out.decode(), err.decode()


def left_out(fleet: LocalFleet, run_id: str) -> dict[str, str]:
    events = fleet.history("events", run=run_id)
    return {row["device_id"]: row["message"] for row in events if row["kind"] == "device-left-out"}


def test_a_device_without_the_shard_is_left_out_by_name_and_the_others_train(fleet: LocalFleet, tools: Any) -> None:
    run_id = fleet.submit(digits(devices={"names": [*ALL]}))
    assert fleet.wait_run(run_id)["status"] == "finished"
    ((name, reason),) = left_out(fleet, run_id).items()
    assert name == "device-03"
    assert "no shard for task 'digits'" in reason
    assert {row["device_id"] for row in tools.used(fleet, run_id)} == set(BOTH)


@pytest.mark.parametrize("require", ["all", 3])
def test_a_run_that_requires_more_than_can_fails_with_the_name_and_trains_nothing(
    fleet: LocalFleet, require: object
) -> None:
    run_id = fleet.submit(digits(devices={"names": [*ALL], "require": require, "ready_s": 2}))
    with pytest.raises(RunFailedError, match=r"device-03: it has no shard for task 'digits'"):
        fleet.wait_run(run_id)
    assert fleet.history("updates", run=run_id) == []
    assert fleet.history("rounds", run=run_id) == []
    assert fleet.wait_run(fleet.submit(digits(devices={"names": [*BOTH], "require": "all"})))["status"] == "finished"


def test_a_required_device_that_does_not_exist_is_named(fleet: LocalFleet) -> None:
    run_id = fleet.submit(digits(devices={"names": ["device-01", "pi-99"], "require": "all"}))
    with pytest.raises(RunFailedError, match="pi-99: there is no such device in the fleet"):
        fleet.wait_run(run_id)


def test_the_three_phases_cost_less_than_a_second(fleet: LocalFleet) -> None:
    run_id = fleet.submit(digits())
    run = fleet.wait_run(run_id)
    assert fleet.history("rounds", run=run_id)[0]["started_at"] - run["started_at"] < 3.0  # on a machine that is busy


@pytest.mark.parametrize("how", [pytest.param("stopped", marks=pytest.mark.slow), "killed"])
def test_an_interrupted_run_goes_on_to_its_goal_as_if_nothing_had_been(
    fleet: LocalFleet, tools: Any, how: str
) -> None:
    config = tools.gated_run(pace_s=0.03, iterations=4, rounds=12, min=2)
    config = replace(config, devices=replace(config.devices, names=BOTH))
    run_id = fleet.submit(config)
    tools.eventually(lambda: fleet.operator().get(f"/edgefl/v1/runs/{run_id}")["rounds"] >= 3, what="three rounds")
    if how == "stopped":
        assert fleet.end("coordinator") == 0
    else:
        fleet.kill("coordinator")
    with sqlite3.connect(fleet.database) as connection:
        query = "SELECT started_at FROM rounds WHERE run_id = ? AND closed_at > 0 ORDER BY round"
        before = [started_at for (started_at,) in connection.execute(query, (run_id,))]
    fleet.start_coordinator()
    assert fleet.wait_run(run_id)["status"] == "finished"
    rounds = fleet.history("rounds", run=run_id)
    assert [(row["round"], row["version"], row["num_updates"]) for row in rounds] == [(n, n, 2) for n in range(1, 13)]
    used = tools.used(fleet, run_id)
    assert sorted((row["round"], row["device_id"]) for row in used) == [(n, d) for n in range(1, 13) for d in BOTH]
    assert len({row["assignment_id"] for row in used}) == 24
    assert [row["started_at"] for row in rounds][: len(before)] == before, "nothing is done again"
    shown = fleet.operator().get(f"/edgefl/v1/runs/{run_id}")
    assert shown["resumes"] == 0
    assert shown["model"] == fleet.wait_run(fleet.submit(config))["model"], "another run of the same seed"


def test_a_run_that_goes_on_waits_for_boards_that_it_requires_and_loses_nothing(
    fleet: LocalFleet, tools: Any
) -> None:
    config = tools.gated_run(pace_s=0.02, iterations=2, rounds=20, min=2)
    config = replace(config, devices=replace(config.devices, names=BOTH, require="all", ready_s=3))
    run_id = fleet.submit(config)
    tools.eventually(lambda: fleet.operator().get(f"/edgefl/v1/runs/{run_id}")["rounds"] >= 2, what="two rounds")
    fleet.operator().post(f"/edgefl/v1/runs/{run_id}/stop")
    tools.eventually(lambda: tools.status(fleet, run_id) == "stopped")
    assert fleet.end("device-02") == 0
    assert edgefl(fleet, "run", "resume", run_id)[0] == 0
    tools.eventually(lambda: tools.status(fleet, run_id) == "interrupted", what="the door is shut")
    assert "device-02: it is offline" in fleet.operator().get(f"/edgefl/v1/runs/{run_id}")["reason"]
    fleet.start_device("device-02")
    fleet.wait_present(4)
    assert edgefl(fleet, "run", "resume", run_id)[0] == 0
    assert fleet.wait_run(run_id)["status"] == "finished"
    assert [row["round"] for row in fleet.history("rounds", run=run_id)] == list(range(1, 21))


def test_models_of_rounds_before_a_kill_are_kept_as_all_others(fleet: LocalFleet, tools: Any) -> None:
    run = {"task": "digits", "rounds": 10_000, "evaluate_on": "coordinator"}
    run_id = fleet.submit(parse_run({"run": run, "devices": {"names": [*BOTH], "min": 2}}))

    def rounds() -> int:
        return int(fleet.operator().get(f"/edgefl/v1/runs/{run_id}")["rounds"])

    tools.eventually(lambda: rounds() >= 30, what="thirty rounds")
    fleet.kill("coordinator")  # before the first checkpoint: the journal has all of them
    fleet.start_coordinator()
    reached = rounds()
    assert reached >= 30
    tools.eventually(lambda: rounds() >= reached + 3, what="three more rounds")
    fleet.operator().post(f"/edgefl/v1/runs/{run_id}/stop")
    tools.eventually(lambda: tools.status(fleet, run_id) == "stopped")
    last = rounds()
    kept = fleet.operator().get("/edgefl/v1/models", {"run": run_id})["rows"]
    assert [row["round"] for row in kept if row["latest"]] == [last]
    assert all(row["round"] <= last and fleet.model_file(row["sha256"]).exists() for row in kept)


@pytest.mark.slow
def test_an_asynchronous_run_goes_on_without_a_gap_and_counts_nothing_twice(fleet: LocalFleet, tools: Any) -> None:
    config = tools.gated_run(pace_s=0.05, iterations=2, updates=90, updates_per_round=3)
    config = replace(config, strategy=replace(config.strategy, name="asgd"))
    run_id = fleet.submit(config)
    tools.eventually(lambda: fleet.operator().get(f"/edgefl/v1/runs/{run_id}")["rounds"] >= 3, what="three rounds")
    assert fleet.end("coordinator") == 0
    fleet.start_coordinator()
    assert fleet.wait_run(run_id)["reason"] == "updates reached 90"
    used = tools.used(fleet, run_id)
    assert sorted(row["applied_version"] for row in used) == list(range(len(used)))
    assert 90 <= len(used) <= 93, "what was in flight at the end is learnt from, too"
    rounds = fleet.history("rounds", run=run_id)
    assert [(row["round"], row["num_updates"]) for row in rounds][:30] == [(n, 3) for n in range(1, 31)]


def test_a_stopped_run_goes_on_and_a_finished_one_does_not(fleet: LocalFleet, tools: Any) -> None:
    run_id = fleet.submit(tools.gated_run(pace_s=0.1, iterations=2, rounds=20, min=2))
    tools.eventually(lambda: fleet.operator().get(f"/edgefl/v1/runs/{run_id}")["rounds"] >= 2, what="two rounds")
    fleet.operator().post(f"/edgefl/v1/runs/{run_id}/stop")
    tools.eventually(lambda: tools.status(fleet, run_id) == "stopped")
    assert edgefl(fleet, "run", "resume", run_id)[0] == 0
    assert fleet.wait_run(run_id)["status"] == "finished"
    assert [row["round"] for row in fleet.history("rounds", run=run_id)] == list(range(1, 21))
    code, _, err = edgefl(fleet, "run", "resume", run_id)
    assert code == 2
    assert "is finished; only a run that was interrupted or stopped can be resumed" in err


def test_wait_ends_with_the_run_and_its_exit_code_says_how(fleet: LocalFleet, tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('[run]\ntask = "digits"\nrounds = 2\n[devices]\nnames = ["device-01"]\n')
    code, out, err = edgefl(fleet, "-q", "run", "submit", file, "--wait")
    assert (code, err) == (0, "")
    assert fleet.wait_run(out.strip())["status"] == "finished"
    file.write_text('[run]\ntask = "digits"\n[devices]\nnames = ["device-03"]\nrequire = "all"\n')
    code, _, err = edgefl(fleet, "run", "submit", file, "--wait")
    assert code == 41
    assert "device-03: it has no shard" in err


def test_of_the_runs_that_wait_the_highest_priority_begins_first(
    fleet: LocalFleet, tools: Any, tmp_path: Path
) -> None:
    gate = tools.gate(tmp_path / "gate")
    first = fleet.submit(tools.gated_run(gate, rounds=1))
    tools.eventually(gate.entered)
    file = tmp_path / "run.toml"
    file.write_text('[run]\ntask = "digits"\nrounds = 1\n')
    ids = [edgefl(fleet, "run", "submit", file, "--priority", number)[1].strip() for number in (0, 5, -1, 5)]
    rows = json.loads(edgefl(fleet, "run", "list", "--format", "json")[1])["rows"]
    places = {row["run_id"]: row["queue_position"] for row in rows}
    assert [places[run_id] for run_id in (first, *ids)] == [None, 3, 1, 4, 2]
    gate.open()
    began = [fleet.wait_run(run_id)["started_at"] for run_id in ids]
    assert sorted(range(4), key=lambda place: began[place]) == [1, 3, 0, 2]


def test_a_dry_run_queues_nothing_and_says_who_takes_part(fleet: LocalFleet, tmp_path: Path) -> None:
    fleet.wait_run(fleet.submit(digits()))
    before = len(fleet.operator().get("/edgefl/v1/runs")["rows"])
    file = tmp_path / "run.toml"
    file.write_text('[run]\ntask = "digits"\nrounds = 2\n[compression]\nup = "topk:0.01"\n')
    code, out, _ = edgefl(fleet, "run", "submit", file, "--dry-run", "--format", "json")
    plan = json.loads(out)
    assert (code, plan["v"], plan["kind"], plan["goal"]) == (0, 1, "plan", {"rounds": 2})
    rows = {row["device_id"]: row for row in plan["rows"]}
    assert [rows[name]["takes_part"] for name in ALL] == [True, True, False]
    assert rows["device-03"]["reason"] == "it has no shard for task 'digits'"
    assert rows["device-01"]["seconds"] > 0
    assert rows["device-01"]["bytes_down"] > plan["model_bytes"] > 20 * rows["device-01"]["bytes_up"]
    assert len(fleet.operator().get("/edgefl/v1/runs")["rows"]) == before
    file.write_text('[run]\ntask = "digits"\nmax_state_bytes = 9\n[strategy]\nname = "dc-asgd"\n')
    refusals = [edgefl(fleet, "run", "submit", file, *dry) for dry in (["--dry-run"], [])]
    assert refusals[0] == refusals[1] != (0, "", "")
    assert "the run may have 9 bytes" in refusals[0][2]
    file.write_text('[run]\ntask = "digits"\nrounds = 2\n[compression]\nup = "topk:0.01"\n')
    table = edgefl(fleet, "run", "submit", file, "--dry-run")[1]
    assert "it has no shard for task 'digits'" in table
    assert "a round: 2 devices" in table


def test_a_plan_foretells_the_bytes_of_a_round(fleet: LocalFleet) -> None:
    config = digits(compression={"up": "dense|fp16"})
    plan = fleet.operator().post("/edgefl/v1/runs/plan", {"config": config.to_json()})
    run_id = fleet.submit(config)
    fleet.wait_run(run_id)
    second = fleet.history("rounds", run=run_id)[1]
    assert plan["bytes_up"] <= second["bytes_up"] <= 1.25 * plan["bytes_up"]
    assert plan["bytes_down"] <= second["bytes_down"] <= 1.25 * plan["bytes_down"]


def test_the_log_of_a_run_is_fetched_from_the_board_also_while_it_trains(
    fleet: LocalFleet, tools: Any, tmp_path: Path
) -> None:
    done = fleet.submit(digits(devices={"names": ["device-01"]}))
    fleet.wait_run(done)
    gate = tools.gate(tmp_path / "gate")
    run_id = fleet.submit(tools.gated_run(gate, rounds=1))
    tools.eventually(lambda: len(gate.entered()) == 3)
    code, out, _ = edgefl(fleet, "devices", "logs", "device-01", "--run", done, "--format", "json")
    rows = json.loads(out)["rows"]
    assert code == 0
    assert [row["assignment"] for row in rows] == [
        f"{done}/{name}" for name in ("can", "prepare", "v0-a1-device-01", "v1-a1-device-01", "v2-a1-device-01")
    ]
    assert {(row["run"], row["level"]) for row in rows} == {(done, "INFO")}
    assert "iterations, loss" in rows[2]["message"]
    whole = edgefl(fleet, "devices", "logs", "device-01")[1]
    assert len(whole.splitlines()) > len(rows)
    assert [row["n"] for row in rows] == sorted({row["n"] for row in rows})
    gate.open()
    fleet.wait_run(run_id)


def test_a_device_that_is_away_cannot_be_asked_for_its_log(fleet: LocalFleet, tools: Any) -> None:
    code, _, err = edgefl(fleet, "devices", "logs", "pi-99")
    assert (code, "no device 'pi-99'" in err) == (40, True)
    assert fleet.end("device-03") == 0
    tools.eventually(lambda: fleet.presence()["device-03"] == "offline")
    code, _, err = edgefl(fleet, "devices", "logs", "device-03")
    assert (code, "device-03 is offline" in err) == (20, True)
    fleet.start_device("device-03")
    fleet.wait_present(4)


def test_no_log_of_a_fleet_holds_a_secret(fleet: LocalFleet) -> None:
    token = json.loads(fleet.command("coordinator", "token", "--dir", str(fleet.directory), "--format", "json"))
    texts = [path.read_text(errors="replace") for path in fleet.root.rglob("agent.jsonl*")]
    assert len(texts) >= 3
    for secret in (token["token"][:12], fleet.operator().token, "PRIVATE KEY"):
        assert not [text for text in texts if secret in text]

"""The life of a run as an operator sees it: planned, queued, let in, stopped, resumed, read about afterwards."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from edgefl.core.config import RunConfig, parse_run
from edgefl.core.errors import RunFailedError
from edgefl.simulation.local_fleet import LocalFleet

pytestmark = pytest.mark.extended

BOTH = ["device-01", "device-02"]
ALL = [*BOTH, "device-03"]
NO_SHARD = "it has no shard for task 'digits'"


@contextmanager
def make_fleet(tools: Any, root: Path) -> Iterator[LocalFleet]:
    """Two devices with both tasks, and a third that has no shard of digits."""
    devices = [*tools.devices(2, "digits", tools.gated), *tools.devices(1, tools.gated, start=3)]
    with tools.fleet(root, devices) as running:
        yield running


def digits(rounds: int = 2, **sections: Any) -> RunConfig:
    return parse_run({"run": {"task": "digits", "rounds": rounds, "evaluate_on": "none"}, **sections})


@pytest.mark.parametrize(
    ("devices", "reason"),
    [
        ({"names": ALL, "require": "all"}, f"device-03: {NO_SHARD}"),
        ({"names": ALL, "require": 3}, f"device-03: {NO_SHARD}"),
        ({"names": ["device-01", "pi-99"], "require": "all"}, "pi-99: there is no such device in the fleet"),
        ({"names": BOTH, "require": "all"}, None),
        ({"names": ALL}, None),
    ],
)
def test_who_cannot_take_part_is_named_and_ends_only_a_run_that_requires_it(
    fleet: LocalFleet, tools: Any, devices: dict[str, Any], reason: str | None
) -> None:
    run_id = fleet.submit(digits(devices={**devices, "ready_s": 2}))
    if reason:
        with pytest.raises(RunFailedError, match=reason):
            fleet.wait_for_run(run_id)
        assert fleet.list_history("updates", run=run_id) == fleet.list_history("rounds", run=run_id) == []
        return
    assert fleet.wait_for_run(run_id)["status"] == "finished"
    left_out = {row["device_id"]: row["message"] for row in tools.events(fleet, "device-rejected", run=run_id)}
    assert [*left_out] == [name for name in devices["names"] if name not in BOTH]
    assert all(NO_SHARD in message for message in left_out.values())
    assert {row["device_id"] for row in tools.used(fleet, run_id)} == set(BOTH)


def test_a_stopped_run_waits_for_boards_that_it_requires_loses_nothing_and_a_finished_one_cannot_go_on(
    fleet: LocalFleet, tools: Any
) -> None:
    devices = {"names": BOTH, "require": "all", "ready_s": 3}
    run_id = fleet.submit(tools.gated_run(pace_s=0.05, iterations=2, rounds=20, min=2, devices=devices))
    tools.wait_rounds(fleet, run_id, 2)
    tools.stop(fleet, run_id)
    assert fleet.terminate("device-02") == 0
    assert tools.as_operator(fleet, "run", "resume", run_id).code == 0
    tools.eventually(lambda: tools.status(fleet, run_id) == "interrupted", what="it is not let in")
    assert "device-02: it is offline" in tools.run(fleet, run_id)["reason"]
    fleet.start_device("device-02")
    fleet.wait_for_devices(3)
    assert tools.as_operator(fleet, "run", "resume", run_id).code == 0
    assert fleet.wait_for_run(run_id)["status"] == "finished"
    assert [row["round"] for row in fleet.list_history("rounds", run=run_id)] == list(range(1, 21))
    ended = tools.as_operator(fleet, "run", "resume", run_id)
    assert ended.code == 2
    assert "only a run that was interrupted or stopped can be resumed" in ended.line


def test_wait_ends_with_the_run_and_its_exit_code_says_how(fleet: LocalFleet, tools: Any, tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('[run]\ntask = "digits"\nrounds = 2\n[devices]\nnames = ["device-01"]\n')
    ended = tools.as_operator(fleet, "-q", "run", "submit", file, "--wait")
    assert ended.code == 0
    assert fleet.wait_for_run(ended.out.strip())["status"] == "finished"
    file.write_text('[run]\ntask = "digits"\n[devices]\nnames = ["device-03"]\nrequire = "all"\n')
    ended = tools.as_operator(fleet, "run", "submit", file, "--wait")
    assert ended.code == 41
    assert "device-03: it has no shard" in ended.line


def test_of_the_runs_that_wait_the_highest_priority_begins_first(
    fleet: LocalFleet, tools: Any, tmp_path: Path
) -> None:
    gate = tools.gate(tmp_path / "gate")
    first = fleet.submit(tools.gated_run(gate, rounds=1))
    tools.eventually(gate.entered)
    file = tmp_path / "run.toml"
    file.write_text('[run]\ntask = "digits"\nrounds = 1\n')
    words = ("run", "submit", file, "--priority")
    ids = [tools.as_operator(fleet, *words, number).out.strip() for number in (0, 5, -1, 5)]
    rows = tools.as_operator(fleet, "run", "list", "--format", "json").rows
    positions = {row["run_id"]: row["queue_position"] for row in rows}
    assert [positions[run_id] for run_id in (first, *ids)] == [None, 3, 1, 4, 2]
    gate.open()
    began = [fleet.wait_for_run(run_id)["started_at"] for run_id in ids]
    assert sorted(range(4), key=lambda place: began[place]) == [1, 3, 0, 2]


def test_a_dry_run_queues_nothing_says_who_takes_part_and_foretells_the_bytes_of_a_round(
    fleet: LocalFleet, tools: Any, tmp_path: Path
) -> None:
    before = len(fleet.make_client().get("/edgefl/v1/runs")["rows"])
    file = tmp_path / "run.toml"
    file.write_text('[run]\ntask = "digits"\nrounds = 2\nevaluate_on = "none"\n[compression]\nup = "dense|fp16"\n')
    ended = tools.as_operator(fleet, "run", "submit", file, "--dry-run", "--format", "json")
    plan = json.loads(ended.out)
    assert (ended.code, plan["v"], plan["kind"], plan["goal"]) == (0, 1, "plan", {"rounds": 2})
    rows = {row["device_id"]: row for row in plan["rows"]}
    assert [rows[name]["takes_part"] for name in ALL] == [True, True, False]
    assert rows["device-03"]["reason"] == NO_SHARD
    assert len(fleet.make_client().get("/edgefl/v1/runs")["rows"]) == before
    run_id = tools.as_operator(fleet, "run", "submit", file).out.strip()
    fleet.wait_for_run(run_id)
    second = fleet.list_history("rounds", run=run_id)[1]
    for name in ("bytes_up", "bytes_down"):
        assert plan[name] <= second[name] <= 1.25 * plan[name]
    file.write_text('[run]\ntask = "digits"\nmax_state_bytes = 9\n[strategy]\nname = "dc-asgd"\n')
    refusals = [tools.as_operator(fleet, "run", "submit", file, *dry).line for dry in (["--dry-run"], [])]
    assert refusals[0] == refusals[1]
    assert "the run may have 9 bytes" in refusals[0]


def test_the_log_of_a_run_is_fetched_from_the_board_also_while_it_trains_and_not_while_it_is_away(
    fleet: LocalFleet, tools: Any, tmp_path: Path
) -> None:
    done = fleet.submit(digits(devices={"names": ["device-01"]}))
    fleet.wait_for_run(done)
    gate = tools.gate(tmp_path / "gate")
    fleet.submit(tools.gated_run(gate, rounds=1))
    tools.in_the_middle(fleet, gate, *ALL)
    rows = tools.as_operator(fleet, "devices", "logs", "device-01", "--run", done, "--format", "json").rows
    expected = ("can", "prepare", "v0-a1-device-01", "v1-a1-device-01")
    assert [row["assignment"] for row in rows] == [f"{done}/{name}" for name in expected]
    assert {(row["run"], row["level"]) for row in rows} == {(done, "INFO")}
    assert "iterations, loss" in rows[2]["message"]
    whole = tools.as_operator(fleet, "devices", "logs", "device-01").out
    assert len(whole.splitlines()) > len(rows)
    gate.open()
    ended = tools.as_operator(fleet, "devices", "logs", "pi-99")
    assert (ended.code, "no device 'pi-99'" in ended.line) == (40, True)
    assert fleet.terminate("device-03") == 0
    tools.eventually(lambda: fleet.get_presence()["device-03"] == "offline")
    ended = tools.as_operator(fleet, "devices", "logs", "device-03")
    assert (ended.code, "device-03 is offline" in ended.line) == (20, True)

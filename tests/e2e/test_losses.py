"""Devices, coordinator and broker that die, freeze, come back or come late, while the others go on."""

from __future__ import annotations

import shutil
import signal
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from requirements import require

from edgefl.core.config import parse_run
from edgefl.core.protocol import POLL_S
from edgefl.simulation.local_fleet import LocalFleet, find_free_port

pytestmark = pytest.mark.extended

NAMES = ("device-01", "device-02", "device-03")
COPY = "device-01-copy"


@contextmanager
def make_fleet(tools: Any, root: Path) -> Iterator[LocalFleet]:
    with tools.fleet(root, tools.own_devices(root / "shards", 3, "digits", tools.gated), scored=True) as running:
        yield running
        joined = [row["device_id"] for row in tools.events(running, "device-joined")]
        assert len(joined) == len(set(joined)), "nobody joined again"


def works(fleet: LocalFleet, number: int = 3) -> None:
    """All devices and the evaluator are back by themselves, and a run reaches its end with everybody in it."""
    fleet.wait_for_devices(number + 1)
    run_id = fleet.submit(parse_run({"run": {"task": "digits", "rounds": 2}, "devices": {"min": number}}))
    assert fleet.wait_for_run(run_id)["status"] == "finished"
    assert [row["num_updates"] for row in fleet.list_history("rounds", run=run_id)] == [number, number]
    assert {row["source"] for row in fleet.list_history("evaluations", run=run_id)} == {"coordinator"}


def end_coordinator(fleet: LocalFleet, how: str) -> sqlite3.Connection:
    """Stops or kills the coordinator and returns its database, which is whole."""
    if how == "stopped":
        assert fleet.terminate("coordinator") == 0
        assert not list(fleet.directory.glob("edgefl.db-*")), "the database was not closed"
    else:
        fleet.kill("coordinator")
    connection = sqlite3.connect(fleet.database)
    assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    return connection


@pytest.mark.parametrize("how", ["stopped", "killed"])
def test_a_round_goes_on_under_the_next_coordinator_and_its_devices_never_stopped(
    fleet: LocalFleet, tools: Any, tmp_path: Path, how: str
) -> None:
    """All devices are at something that would take an hour, unless they are called back."""
    gate = tools.gate(tmp_path / "gate")
    gate.open()
    run_id = fleet.submit(tools.gated_run(gate, pace_s=0.03, iterations=100_000, rounds=3, min=3))
    tools.in_the_middle(fleet, gate, *NAMES)
    given = tools.eventually(lambda: fleet.list_history("updates", run=run_id), what="the rows of what was given out")
    pids = [fleet.processes[name].pid for name in NAMES]
    database = end_coordinator(fleet, how)
    if how == "stopped":
        (row,) = database.execute("SELECT status, reason FROM runs WHERE run_id = ?", (run_id,))
        assert row == ("interrupted", "the coordinator was stopped")
        (presence,) = database.execute("SELECT presence FROM devices WHERE device_id = 'coordinator-evaluator'")
        assert presence == ("offline",), "its goodbye was the last thing that was kept"
    database.close()
    fleet.start_coordinator()
    tools.eventually(lambda: tools.status(fleet, run_id) == "running", what="it goes on by itself")
    fleet.wait_for_devices(4)
    tools.stop(fleet, run_id)  # which calls back the very work that was under way
    used = tools.used(fleet, run_id)
    assert sorted(row["device_id"] for row in used) == [*NAMES]
    known = {(row["assignment_id"], row["dispatched_at"]) for row in used}
    assert {(row["assignment_id"], row["dispatched_at"]) for row in given} <= known, "it was given out again"
    assert [fleet.processes[name].pid for name in NAMES if fleet.processes[name].poll() is None] == pids
    works(fleet)


def test_a_run_that_was_being_stopped_ends_so_under_the_next_coordinator_with_what_was_under_way(
    fleet: LocalFleet, tools: Any, tmp_path: Path
) -> None:
    gate = tools.gate(tmp_path / "gate")
    run_id = fleet.submit(tools.gated_run(gate, rounds=3, min=3))
    tools.in_the_middle(fleet, gate, *NAMES)
    fleet.make_client().post(f"/edgefl/v1/runs/{run_id}/stop")
    assert tools.status(fleet, run_id) == "stopping"
    end_coordinator(fleet, "killed").close()
    fleet.start_coordinator()
    gate.open()
    tools.eventually(lambda: tools.status(fleet, run_id) == "stopped", what="the stop comes to its end")
    row = tools.run(fleet, run_id)
    assert row["reason"] == "stopped by the operator"
    assert row["model"] is not None
    assert sorted(row["device_id"] for row in tools.used(fleet, run_id)) == [*NAMES]


def test_models_of_rounds_before_a_kill_are_kept_can_be_used_and_are_those_of_the_history(
    fleet: LocalFleet, tools: Any
) -> None:
    run = {"task": "digits", "rounds": 10_000, "evaluate_on": "coordinator"}
    run_id = fleet.submit(parse_run({"run": run, "devices": {"min": 3}}))
    tools.wait_rounds(fleet, run_id, 30)
    end_coordinator(fleet, "killed").close()  # before the first checkpoint: the journal has all of them
    fleet.start_coordinator()
    reached = tools.wait_rounds(fleet, run_id, 30)
    tools.wait_rounds(fleet, run_id, reached + 3)

    def list_kept() -> list[Any]:
        rows: list[Any] = fleet.make_client().get("/edgefl/v1/models", {"run": run_id})["rows"]
        return rows

    # Rounds are quicker than the evaluator, which skips most of them.
    tools.eventually(
        lambda: [row for row in list_kept() if row["accuracy"] is not None], what="a kept model is scored"
    )
    last = tools.stop(fleet, run_id)["rounds"]
    kept = list_kept()
    assert [row["round"] for row in kept if row["latest"]] == [last]
    assert all(row["round"] <= last and fleet.get_model_path(row["sha256"]).exists() for row in kept)
    words = ("model", "evaluate", "--run", run_id, "--on", "coordinator", "--dir", fleet.directory)
    told = tools.as_operator(fleet, *words, "--format", "json").rows
    scored = [row for row in told if row["recorded_accuracy"] is not None]
    assert scored
    assert all(row["accuracy"] == pytest.approx(row["recorded_accuracy"]) for row in scored)


def test_an_asynchronous_run_goes_on_without_a_gap_and_counts_nothing_twice(fleet: LocalFleet, tools: Any) -> None:
    run_id = fleet.submit(tools.gated_run(pace_s=0.05, iterations=2, updates=60, updates_per_round=3,
                                          strategy={"name": "asgd"}))  # fmt: skip
    tools.wait_rounds(fleet, run_id, 3)
    end_coordinator(fleet, "killed").close()
    fleet.start_coordinator()
    assert fleet.wait_for_run(run_id)["reason"] == "updates reached 60"
    used = tools.used(fleet, run_id)
    assert sorted(row["applied_version"] for row in used) == list(range(len(used)))
    assert 60 <= len(used) <= 63, "what was in flight at the end is learnt from, too"
    rounds = fleet.list_history("rounds", run=run_id)
    assert [(row["round"], row["num_updates"]) for row in rounds][:20] == [(n, 3) for n in range(1, 21)]


def test_devices_follow_the_broker_to_another_port(fleet: LocalFleet) -> None:
    fleet.kill("coordinator")
    fleet.broker_port = find_free_port()
    fleet.start_coordinator()
    works(fleet)


def test_work_given_out_while_the_broker_was_away_is_not_left_lying(fleet: LocalFleet) -> None:
    require("mosquitto")
    coordinator = psutil.Process(fleet.processes["coordinator"].pid)
    (broker,) = [child for child in coordinator.children() if "mosquitto" in child.cmdline()[0]]
    broker.kill()
    started_s = time.monotonic()
    works(fleet)
    assert time.monotonic() - started_s < POLL_S / 2


def test_a_killed_device_stops_no_asynchronous_run_and_trains_again_when_it_is_back(
    fleet: LocalFleet, tools: Any
) -> None:
    run_id = fleet.submit(tools.gated_run(pace_s=0.02, rounds=100_000, strategy={"name": "adacomp"},
                                          compression={"down": "delta|dense"}))  # fmt: skip
    tools.eventually(lambda: len(tools.used(fleet, run_id, "device-03")) > 2, what="all of them train")
    fleet.kill("device-03")
    before = len(tools.used(fleet, run_id))
    tools.eventually(lambda: len(tools.used(fleet, run_id)) > before + 10, what="the others go on")
    fleet.start_device("device-03")
    known = len(tools.used(fleet, run_id, "device-03"))
    tools.eventually(lambda: len(tools.used(fleet, run_id, "device-03")) > known + 2, what="it trains again")
    tools.stop(fleet, run_id)
    outcomes = [row["outcome"] for row in fleet.list_history("updates", run=run_id)]
    assert outcomes.count("lost") <= 1
    assert {"used", "lost"} >= set(outcomes)


def test_a_frozen_device_costs_its_deadline_and_no_more(fleet: LocalFleet, tools: Any, tmp_path: Path) -> None:
    gate = tools.gate(tmp_path / "gate")
    run_id = fleet.submit(tools.gated_run(gate, rounds=2, deadline_s=1.5, min=2))
    tools.in_the_middle(fleet, gate, *NAMES)
    fleet.kill("device-03", signal.SIGSTOP)
    gate.open()
    assert fleet.wait_for_run(run_id)["status"] == "finished"
    fleet.kill("device-03", signal.SIGCONT)
    rows = fleet.list_history("updates", run=run_id)
    assert [row["device_id"] for row in rows if row["outcome"] == "used"].count("device-01") == 2
    lost = {row["round"]: row for row in rows if row["device_id"] == "device-03"}
    assert lost[1]["outcome"] == "lost"
    assert "not back within 1.5 s" in lost[1]["reason"]
    again = fleet.submit(tools.gated_run(gate, rounds=1, min=2))
    assert fleet.wait_for_run(again)["status"] == "finished"
    assert tools.used(fleet, again, "device-03"), "the device is itself again"


def test_a_device_whose_shard_gets_damaged_fails_in_its_run_is_left_out_of_the_next_and_ends_none(
    fleet: LocalFleet, tools: Any, tmp_path: Path
) -> None:
    gate, shard = tools.gate(tmp_path / "gate"), Path(fleet.devices[2].shards[tools.gated])
    whole = shard.read_bytes()
    run_id = fleet.submit(tools.gated_run(gate, rounds=3, min=3))
    tools.in_the_middle(fleet, gate, *NAMES)
    shard.write_bytes(whole[:1000])
    try:
        gate.open()
        assert fleet.wait_for_run(run_id)["status"] == "finished"
        rows = fleet.list_history("updates", run=run_id, device="device-03")
        assert [row["outcome"] for row in rows] == ["used", "failed", "failed"]
        assert "damaged" in rows[1]["reason"]
        assert len(tools.used(fleet, run_id)) == 3 + 2 + 2
        run_id = fleet.submit(tools.gated_run(rounds=2, min=2))
        assert fleet.wait_for_run(run_id)["status"] == "finished"
    finally:
        shard.write_bytes(whole)
        fleet.terminate("device-03")  # else it says only at its next poll that the shard is whole again
    (event,) = tools.events(fleet, "device-rejected", run=run_id)
    assert event["device_id"] == "device-03"
    assert "damaged" in event["message"]
    assert not fleet.list_history("updates", run=run_id, device="device-03")
    assert len(tools.used(fleet, run_id)) == 2 * 2


@pytest.mark.parametrize(("within_s", "words"), [(4.0, "has left the fleet"), (9.0, "leaving without it")])
def test_a_device_that_is_told_to_stop_leaves_at_once_or_within_seconds_of_a_long_iteration(
    fleet: LocalFleet, tools: Any, tmp_path: Path, within_s: float, words: str
) -> None:
    gate = tools.gate(tmp_path / "gate")
    if words == "has left the fleet":
        gate.open()
    run_id = fleet.submit(tools.gated_run(gate, pace_s=0.02, iterations=100_000, rounds=1, min=2))
    tools.in_the_middle(fleet, gate, *NAMES)
    assert fleet.terminate("device-03", timeout_s=within_s) == 0
    tools.eventually(lambda: fleet.get_presence()["device-03"] == "offline")
    assert words in fleet.read_log_tail("device-03")
    gate.open()
    tools.stop(fleet, run_id)
    assert fleet.list_history("updates", run=run_id, device="device-03")[0]["outcome"] == "lost"
    assert len(tools.used(fleet, run_id)) == 2, "what the recalled devices had learnt counts"


def test_a_device_that_comes_late_trains_only_where_the_run_says_so(
    fleet: LocalFleet, tools: Any, tmp_path: Path
) -> None:
    (late,) = tools.devices(1, tools.gated, start=4)
    for join in ("start", "anytime"):
        gate = tools.gate(tmp_path / join)
        run_id = fleet.submit(tools.gated_run(gate, pace_s=0.05, rounds=10_000, join=join))
        tools.in_the_middle(fleet, gate, *NAMES)
        if join == "start":
            fleet.add_device(late)
        else:
            fleet.start_device(late.name)
        fleet.wait_for_devices(5)
        gate.open()
        if join == "start":
            tools.eventually(
                lambda run_id=run_id: len(fleet.list_history("rounds", run=run_id)) > 5, what="it goes on"
            )
            assert not fleet.list_history("updates", run=run_id, device="device-04")
        else:
            first = tools.eventually(lambda run_id=run_id: tools.used(fleet, run_id, "device-04"), what="it trains")[
                0
            ]
            assert first["round"] > 1
        tools.stop(fleet, run_id)
        assert fleet.terminate("device-04") == 0
    fleet.devices = [device for device in fleet.devices if device.name in NAMES]


def test_the_copy_of_a_card_is_refused_while_the_board_trains_on_and_gets_a_name_of_its_own(
    fleet: LocalFleet, tools: Any, tmp_path: Path
) -> None:
    gate = tools.gate(tmp_path / "gate")
    run_id = fleet.submit(tools.gated_run(gate, rounds=1, min=3))
    tools.in_the_middle(fleet, gate, *NAMES)
    shutil.copytree(fleet.root / "device-01", fleet.root / COPY)

    def starts() -> int:
        fleet.start_device(COPY)
        return fleet.processes[COPY].wait(60)

    assert starts() == 39
    assert "copy" in fleet.read_log_tail(COPY, 1)
    (event,) = tools.eventually(lambda: tools.events(fleet, "device-cloned", device="device-01"))
    assert event["message"].startswith("refused the later of two agents (boot ")
    assert "at 127.0.0.1" in event["message"]
    assert "cloned" in tools.as_operator(fleet, "devices", "list").out
    assert fleet.make_client().get("/edgefl/v1/devices/device-01")["cloned"] == event["message"]

    # Whoever starts it again, it stays away; the board itself may restart as it likes.
    assert starts() == 39
    del fleet.processes[COPY]
    gate.open()
    assert fleet.wait_for_run(run_id)["status"] == "finished"
    updates = fleet.list_history("updates", run=run_id)
    assert sorted(row["device_id"] for row in updates if row["outcome"] == "used") == [*NAMES], updates
    assert len(gate.entered()) <= 3 + 2, "a copy may begin what its board has, until the board is heard again"
    fleet.kill("device-01")
    fleet.start_device("device-01")
    tools.eventually(lambda: fleet.get_presence()["device-01"] == "online")
    assert len(tools.events(fleet, "device-cloned", device="device-01")) == 1

    fleet.add_device(replace(fleet.devices[0], name=COPY))
    works(fleet, 4)
    assert fleet.terminate(COPY) == 0
    fleet.devices = [device for device in fleet.devices if device.name in NAMES]

"""The coordinator is stopped, killed and started again under devices that keep running."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from edgefl.config import parse_run
from edgefl.coordinator.brokers.choice import mosquitto_path
from edgefl.local_fleet import LocalFleet, free_port
from edgefl.protocol import POLL_S

NAMES = ("device-01", "device-02")


@pytest.fixture(scope="module")
def fleet(tools: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalFleet]:
    root = tmp_path_factory.mktemp("restarts")
    shards = {"digits": str(tools.test_shard)}
    with tools.fleet(root, tools.devices(2, "digits", tools.gated), test_shards=shards) as running:
        yield running
        assert [running.processes[name].poll() for name in NAMES] == [None, None], "devices outlive the coordinator"
        pids = [running.processes[name].pid for name in NAMES]
        assert len(set(pids)) == 2
    tools.check_logs(root)


def _sound(fleet: LocalFleet) -> sqlite3.Connection:
    connection = sqlite3.connect(fleet.database)
    assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    return connection


def _works(fleet: LocalFleet) -> None:
    """All devices and the evaluator are back by themselves, and a run reaches its end with everybody in it."""
    fleet.wait_present(3)
    run_id = fleet.submit(parse_run({"run": {"task": "digits", "rounds": 2}, "devices": {"min": 2}}))
    assert fleet.wait_run(run_id)["status"] == "finished"
    assert [row["num_updates"] for row in fleet.history("rounds", run=run_id)] == [2, 2]
    assert {row["source"] for row in fleet.history("evaluations", run=run_id)} == {"coordinator"}


def _mid_round(fleet: LocalFleet, tools: Any, folder: Path) -> str:
    """Both devices are at something that would take an hour, unless they are called back."""
    gate = tools.gate(folder)
    gate.open()
    run_id: str = fleet.submit(tools.gated_run(gate, pace_s=0.03, iterations=100_000, rounds=3, min=2))
    pids = {fleet.processes[name].pid for name in NAMES}
    tools.eventually(lambda: pids <= gate.entered(), what="both devices are in an iteration")
    return run_id


def test_an_idle_coordinator_stops_on_sigterm_with_its_database_closed(fleet: LocalFleet, tools: Any) -> None:
    assert fleet.end("coordinator") == 0
    assert not list(fleet.directory.glob("edgefl.db-*"))
    with _sound(fleet) as connection:
        presence = dict(connection.execute("SELECT device_id, presence FROM devices"))
    assert presence["coordinator-evaluator"] == "offline", "its goodbye was the last thing that was kept"
    fleet.start_coordinator()
    _works(fleet)


def test_a_restart_repeats_no_join(fleet: LocalFleet) -> None:
    joined = [row["device_id"] for row in fleet.history("events") if row["kind"] == "device-joined"]
    assert sorted(joined) == ["coordinator-evaluator", *NAMES]


@pytest.mark.parametrize("how", ["stopped", "killed"])
def test_a_round_goes_on_under_the_next_coordinator_and_its_devices_never_stopped(
    fleet: LocalFleet, tools: Any, tmp_path: Path, how: str
) -> None:
    run_id = _mid_round(fleet, tools, tmp_path / "gate")
    given = tools.eventually(lambda: fleet.history("updates", run=run_id), what="the rows of what was given out")
    row_before = next(row for row in given if row["device_id"] == NAMES[0])
    if how == "stopped":
        assert fleet.end("coordinator") == 0
        with _sound(fleet) as connection:
            (row,) = connection.execute("SELECT status, reason FROM runs WHERE run_id = ?", (run_id,))
        assert row == ("interrupted", "the coordinator was stopped")
    else:
        fleet.kill("coordinator")
    fleet.start_coordinator()
    tools.eventually(lambda: tools.status(fleet, run_id) == "running", what="it goes on by itself")
    fleet.wait_present(3)
    fleet.operator().post(f"/edgefl/v1/runs/{run_id}/stop")  # which calls back the very work that was under way
    tools.eventually(lambda: tools.status(fleet, run_id) == "stopped", what="both have answered")
    used = [row for row in fleet.history("updates", run=run_id) if row["outcome"] == "used"]
    assert sorted(row["device_id"] for row in used) == [*NAMES]
    assert row_before["assignment_id"] in {row["assignment_id"] for row in used}
    assert row_before["dispatched_at"] in {row["dispatched_at"] for row in used}, "it was not given out again"
    _works(fleet)
    _sound(fleet).close()


@pytest.mark.parametrize("how", ["stopped", "killed"])
def test_a_run_that_was_being_stopped_ends_so_under_the_next_coordinator_with_what_was_under_way(
    fleet: LocalFleet, tools: Any, tmp_path: Path, how: str
) -> None:
    gate = tools.gate(tmp_path / "gate")
    run_id = fleet.submit(tools.gated_run(gate, rounds=3, min=2))
    tools.eventually(lambda: len(gate.entered()) == 2, what="both devices are in an iteration")
    fleet.operator().post(f"/edgefl/v1/runs/{run_id}/stop")
    assert tools.status(fleet, run_id) == "stopping"
    if how == "stopped":
        assert fleet.end("coordinator") == 0
    else:
        fleet.kill("coordinator")
    fleet.start_coordinator()
    gate.open()
    tools.eventually(lambda: tools.status(fleet, run_id) == "stopped", what="the stop comes to its end")
    row = fleet.operator().get(f"/edgefl/v1/runs/{run_id}")
    assert row["reason"] == "stopped by the operator"
    assert row["model"] is not None
    assert sorted(row["device_id"] for row in tools.used(fleet, run_id)) == [*NAMES]


def test_devices_follow_the_broker_to_another_port(fleet: LocalFleet) -> None:
    assert fleet.end("coordinator") == 0
    fleet.broker_port = free_port()
    fleet.start_coordinator()
    _works(fleet)


def test_work_given_out_while_the_broker_was_away_is_not_left_lying(fleet: LocalFleet, tools: Any) -> None:
    if mosquitto_path() is None:
        pytest.skip("mosquitto is not installed")
    coordinator = psutil.Process(fleet.processes["coordinator"].pid)
    (broker,) = [child for child in coordinator.children() if "mosquitto" in child.cmdline()[0]]
    broker.kill()
    started_s = time.monotonic()
    _works(fleet)
    assert time.monotonic() - started_s < POLL_S / 2

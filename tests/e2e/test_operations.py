"""What keeps a real fleet running: its metrics, its alerts, and a backup when the coordinator's disk is lost."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from webhook_receiver import Receiver

from edgefl.config import parse_run
from edgefl.coordinator import pki
from edgefl.device.state import DeviceState
from edgefl.local_fleet import LocalFleet

NAMES = ("device-01", "device-02")


@pytest.fixture(scope="module")
def receiver() -> Iterator[Receiver]:
    with Receiver() as running:
        yield running


@pytest.fixture(scope="module")
def fleet(tools: Any, receiver: Receiver, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalFleet]:
    root = tmp_path_factory.mktemp("operations")
    with tools.fleet(root, tools.devices(2), test_shards={"digits": str(tools.test_shard)}) as running:
        assert running.end("coordinator") == 0
        with (running.directory / "settings.toml").open("a") as settings:
            settings.write(f'\n[alerts]\nwebhook = "{receiver.url}"\ndevice_gone_s = 0.5\ncheck_s = 0.1\n')
        running.start_coordinator()
        running.wait_present(3)
        yield running
        assert [running.processes[name].poll() for name in NAMES] == [None, None]
    tools.check_logs(root)


def run_of(rounds: int) -> Any:
    return parse_run({"run": {"task": "digits", "rounds": rounds}, "devices": {"min": 2}})


def closed_rounds(fleet: LocalFleet, run_id: str) -> dict[int, Any]:
    return {row["round"]: row for row in fleet.history("rounds", run=run_id, limit=10_000) if row["closed_at"]}


def used_updates(fleet: LocalFleet, run_id: str, through: int) -> list[Any]:
    rows = fleet.history("updates", run=run_id, limit=10_000)
    kept = [row for row in rows if row["outcome"] == "used" and row["round"] <= through]
    return sorted(kept, key=lambda row: row["assignment_id"])


def certificate_of(fleet: LocalFleet, name: str) -> str:
    return pki.serial(DeviceState.load(fleet.root / name).cert.read_bytes())


def test_the_metrics_of_a_run_are_those_of_its_history(fleet: LocalFleet, tools: Any) -> None:
    before = tools.metrics(fleet)
    run_id = fleet.submit(run_of(3))
    fleet.wait_run(run_id)
    now = tools.metrics(fleet)
    gained = {name: now[name] - before.get(name, 0.0) for name in now}
    updates = fleet.history("updates", run=run_id)
    scores = fleet.history("evaluations", run=run_id)
    assert (gained["edgefl_rounds_closed_total"], gained["edgefl_round_duration_seconds_count"]) == (3, 3)
    assert gained["edgefl_updates_totalused"] == gained["edgefl_assignments_total"] == 6
    for direction, name in (("up", "edgefl_uplink_bytes_total"), ("down", "edgefl_downlink_bytes_total")):
        assert gained[name] == sum(row[f"bytes_{direction}"] for row in [*updates, *scores])
    assert gained["edgefl_journal_sync_seconds_count"] > 3
    assert gained["edgefl_runs_ended_totalfinished"] == 1
    assert (now["edgefl_devicesonline"], now["edgefl_broker_connected"]) == (3, 1)
    assert "edgefl_run_info" not in "".join(now)


def test_a_board_that_dies_is_told_and_so_is_its_return(fleet: LocalFleet, receiver: Receiver) -> None:
    before = len(receiver.requests)

    def told() -> list[str]:
        return [
            state for alert, name, state in receiver.told()[before:] if (alert, name) == ("device-gone", NAMES[1])
        ]

    fleet.kill(NAMES[1])
    receiver.wait(lambda: told() == ["started"], 30.0)
    fleet.start_device(NAMES[1])
    receiver.wait(lambda: told() == ["started", "ended"], 30.0)
    fleet.wait_present(3)


def test_a_lost_coordinator_comes_back_with_its_history_and_its_devices(
    fleet: LocalFleet, tools: Any, tmp_path: Path
) -> None:
    done = fleet.submit(run_of(3))
    fleet.wait_run(done)
    busy = fleet.submit(run_of(4000))
    tools.eventually(lambda: len(closed_rounds(fleet, busy)) >= 10, 60.0)
    archive = tmp_path / "fleet.tar.gz"
    said = fleet.command("coordinator", "backup", "--dir", str(fleet.directory), str(archive))
    assert "keys" in said
    at_backup = len(closed_rounds(fleet, busy))
    tools.eventually(lambda: len(closed_rounds(fleet, busy)) > at_backup, what="the run goes on")
    before = {run_id: closed_rounds(fleet, run_id) for run_id in (done, busy)}
    updates = used_updates(fleet, busy, 10)
    runs = {row["run_id"]: row for row in fleet.operator().get("/edgefl/v1/runs")["rows"]}
    certificates = {name: certificate_of(fleet, name) for name in NAMES}
    fleet.command("coordinator", "rotate")
    tools.eventually(lambda: all(certificate_of(fleet, name) != certificates[name] for name in NAMES))
    certificates = {name: certificate_of(fleet, name) for name in NAMES}
    fleet.kill("coordinator")
    shutil.rmtree(fleet.directory)

    fleet.command("coordinator", "restore", str(archive), "--dir", str(fleet.directory))
    fleet.start_coordinator()
    fleet.wait_present(3)
    after = {run_id: closed_rounds(fleet, run_id) for run_id in (done, busy)}
    assert after[done] == before[done]
    # The newest rounds' sums may still have grown after the backup: an evaluation comes after its round has closed.
    settled = max(after[busy]) - 3
    assert settled >= 5
    for number in range(1, settled):
        assert after[busy][number] == before[busy][number]
    assert [row for row in used_updates(fleet, busy, 10) if row["round"] < settled] == [
        row for row in updates if row["round"] < settled
    ]
    restored = {row["run_id"]: row for row in fleet.operator().get("/edgefl/v1/runs")["rows"]}
    assert restored[done] == runs[done]
    assert (restored[busy]["status"], set(restored)) == ("interrupted", set(runs))
    assert tools.eventually(
        lambda: fleet.model_file(fleet.operator().get(f"/edgefl/v1/runs/{done}")["model"]).exists()
    )
    joins = [row for row in fleet.history("events") if row["kind"] == "device-joined"]
    assert len(joins) == 3, "nobody joined again"
    assert certificates == {name: certificate_of(fleet, name) for name in NAMES}
    again = fleet.submit(run_of(2))
    assert fleet.wait_run(again)["status"] == "finished"
    assert [row["num_updates"] for row in fleet.history("rounds", run=again)] == [2, 2]
    assert "problem" not in fleet.command("doctor", "--dir", str(fleet.directory))

"""What keeps a real fleet running: its metrics, its alerts, and a backup when the coordinator's disk is lost."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from webhook_receiver import Receiver

from edgefl.coordinator import pki
from edgefl.core.config import parse_run
from edgefl.device.state_dir import DeviceStateDir
from edgefl.simulation.local_fleet import LocalFleet

pytestmark = pytest.mark.extended

NAMES = ("device-01", "device-02")
RECEIVERS: list[Receiver] = []


@contextmanager
def make_fleet(tools: Any, root: Path) -> Iterator[LocalFleet]:
    """A fleet whose coordinator tells its alerts to a receiver of this process."""
    with Receiver() as receiver, tools.fleet(root, tools.devices(2, "digits", tools.gated), scored=True) as running:
        RECEIVERS[:] = [receiver]
        assert running.terminate("coordinator") == 0
        with (running.directory / "settings.toml").open("a") as settings:
            settings.write(f'\n[alerts]\nwebhook = "{receiver.url}"\ndevice_gone_s = 0.5\ncheck_s = 0.1\n')
        running.start_coordinator()
        yield running


def digits(rounds: int) -> Any:
    return parse_run({"run": {"task": "digits", "rounds": rounds}, "devices": {"min": 2}})


def closed_rounds(fleet: LocalFleet, run_id: str) -> dict[int, Any]:
    return {row["round"]: row for row in fleet.list_history("rounds", run=run_id, limit=10_000) if row["closed_at"]}


def certificate_of(fleet: LocalFleet, name: str) -> str:
    return pki.get_serial(DeviceStateDir.load(fleet.root / name).cert.read_bytes())


def test_the_metrics_of_a_run_are_those_of_its_history(fleet: LocalFleet, tools: Any) -> None:
    before = tools.metrics(fleet)
    run_id = fleet.submit(digits(3))
    fleet.wait_for_run(run_id)
    now = tools.metrics(fleet)
    gained = {name: now[name] - before.get(name, 0.0) for name in now}
    updates, scores = fleet.list_history("updates", run=run_id), fleet.list_history("evaluations", run=run_id)
    assert (gained["edgefl_rounds_closed_total"], gained["edgefl_round_duration_seconds_count"]) == (3, 3)
    assert gained["edgefl_updates_totalused"] == gained["edgefl_assignments_total"] == 6
    for direction, name in (("up", "edgefl_uplink_bytes_total"), ("down", "edgefl_downlink_bytes_total")):
        assert gained[name] == sum(row[f"bytes_{direction}"] for row in [*updates, *scores])
    assert gained["edgefl_journal_sync_seconds_count"] > 3
    assert gained["edgefl_runs_ended_totalfinished"] == 1
    assert (now["edgefl_devicesonline"], now["edgefl_broker_connected"]) == (3, 1)
    assert "edgefl_run_info" not in "".join(now)


def test_a_board_that_dies_is_told_and_so_is_its_return(fleet: LocalFleet) -> None:
    (receiver,) = RECEIVERS
    before = len(receiver.requests)

    def told() -> list[str]:
        return [
            state for alert, name, state in receiver.told()[before:] if (alert, name) == ("device-gone", NAMES[1])
        ]

    fleet.kill(NAMES[1])
    receiver.wait(lambda: told() == ["started"], 30.0)
    fleet.start_device(NAMES[1])
    receiver.wait(lambda: told() == ["started", "ended"], 30.0)


def test_a_lost_coordinator_comes_back_with_its_history_and_its_devices(
    fleet: LocalFleet, tools: Any, tmp_path: Path
) -> None:
    done, busy = fleet.submit(digits(3)), fleet.submit(tools.gated_run(rounds=4000, pace_s=0.05, min=2))
    fleet.wait_for_run(done)
    tools.wait_rounds(fleet, busy, 10)
    archive = tmp_path / "fleet.tar.gz"
    at_backup = len(closed_rounds(fleet, busy))
    assert "keys" in tools.as_operator(fleet, "coordinator", "backup", "--dir", fleet.directory, archive).out
    tools.eventually(lambda: len(closed_rounds(fleet, busy)) > at_backup + 2, what="the run goes on")
    before = {run_id: closed_rounds(fleet, run_id) for run_id in (done, busy)}
    used = {row["assignment_id"]: row for row in tools.used(fleet, busy)}
    runs = {row["run_id"]: row for row in fleet.make_client().get("/edgefl/v1/runs")["rows"]}
    certificates = {name: certificate_of(fleet, name) for name in NAMES}
    tools.as_operator(fleet, "coordinator", "rotate")
    tools.eventually(lambda: all(certificate_of(fleet, name) != certificates[name] for name in NAMES))
    certificates = {name: certificate_of(fleet, name) for name in NAMES}
    fleet.kill("coordinator")
    shutil.rmtree(fleet.directory)

    assert tools.typed("coordinator", "restore", archive, "--dir", fleet.directory).code == 0
    fleet.start_coordinator()
    fleet.wait_for_devices(3)
    after = {run_id: closed_rounds(fleet, run_id) for run_id in (done, busy)}
    assert after[done] == before[done]
    settled = max(after[busy]) - 3  # the newest rounds may have grown after the backup
    assert settled >= 5
    assert [after[busy][number] for number in range(1, settled)] == [before[busy][n] for n in range(1, settled)]
    restored = [row for row in tools.used(fleet, busy) if row["round"] < settled]
    assert [used[row["assignment_id"]] for row in restored] == restored
    assert len(restored) == 2 * (settled - 1)
    rows = {row["run_id"]: row for row in fleet.make_client().get("/edgefl/v1/runs")["rows"]}
    assert rows[done] == runs[done]
    assert (rows[busy]["status"], set(rows)) == ("interrupted", set(runs))
    assert tools.eventually(lambda: fleet.get_model_path(tools.run(fleet, done)["model"]).exists())
    assert len(tools.events(fleet, "device-joined")) == 3, "nobody joined again"
    assert certificates == {name: certificate_of(fleet, name) for name in NAMES}
    again = fleet.submit(digits(2))
    assert fleet.wait_for_run(again)["status"] == "finished"
    assert [row["num_updates"] for row in fleet.list_history("rounds", run=again)] == [2, 2]
    assert "problem" not in tools.as_operator(fleet, "doctor", "--dir", fleet.directory).out

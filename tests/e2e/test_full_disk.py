"""The disk of the store fills up for real: a small file system that is nearly full."""

from __future__ import annotations

import os
import sqlite3
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from edgefl.errors import RunFailedError
from edgefl.local_fleet import LocalFleet

SIZE = "16m"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "small"
    place.mkdir()
    if os.geteuid() != 0:
        pytest.skip("only root can mount a small file system")
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs", str(place)],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        pytest.skip(f"a small file system cannot be mounted here: {done.stderr.strip()}")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)


def _fill(place: Path) -> Path:
    filler = place / "filler"
    with filler.open("wb", buffering=0) as file:
        for size in (4096, 512, 1):
            try:
                while True:
                    file.write(b"x" * size)
            except OSError:
                continue
    return filler


@pytest.fixture
def fleet(request: pytest.FixtureRequest, tools: Any, small_disk: Path, tmp_path: Path) -> Iterator[LocalFleet]:
    root = tmp_path / "fleet"
    root.mkdir()
    (root / "coordinator").symlink_to(small_disk)
    with tools.fleet(root, tools.devices(request.param, "digits", tools.gated)) as running:
        yield running


def _event_kinds(fleet: LocalFleet, run: str | None = None) -> list[Any]:
    return [row["kind"] for row in fleet.history("events", run=run)]


@pytest.mark.parametrize("fleet", [2], indirect=True)
def test_a_full_disk_pauses_the_run_which_goes_on_by_itself_and_ends_with_the_same_model(
    fleet: LocalFleet, tools: Any, small_disk: Path
) -> None:
    coordinator = fleet.processes["coordinator"]
    run_file = tools.gated_run(rounds=40, min=2, iterations=2, pace_s=0.05)
    active = fleet.submit(run_file)
    tools.eventually(lambda: len(tools.used(fleet, active)) > 4)
    kept = {row["assignment_id"] for row in tools.used(fleet, active)}
    filler = _fill(small_disk)

    tools.eventually(lambda: tools.status(fleet, active) == "paused")
    row = fleet.operator().get(f"/edgefl/v1/runs/{active}")
    assert "no room" in row["reason"] or "cannot be written" in row["reason"]
    assert str(fleet.directory) in row["reason"]
    assert "paused" in fleet.command("run", "list")
    assert set(fleet.presence().values()) == {"online"}
    assert coordinator.poll() is None

    filler.unlink()
    assert fleet.wait_run(active)["status"] == "finished"
    assert coordinator.poll() is None
    used = [row["assignment_id"] for row in tools.used(fleet, active)]
    assert (len(used), len(set(used))) == (80, 80)
    assert kept <= set(used)
    kinds = _event_kinds(fleet, active)
    assert kinds.count("run-paused") == kinds.count("run-unpaused") >= 1
    metrics = tools.metrics(fleet)
    assert metrics["edgefl_assignments_total"] == metrics["edgefl_updates_totalused"] == 80
    assert metrics["edgefl_rounds_closed_total"] == 40
    assert metrics["edgefl_uplink_bytes_total"] == sum(row["bytes_up"] for row in tools.used(fleet, active))
    connection = sqlite3.connect(fleet.database)
    assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    connection.close()

    again = fleet.submit(run_file)
    assert fleet.wait_run(again)["model"] == fleet.operator().get(f"/edgefl/v1/runs/{active}")["model"]
    tools.check_logs(fleet.root)


@pytest.mark.slow
@pytest.mark.parametrize("fleet", [2], indirect=True)
def test_a_coordinator_that_is_stopped_while_its_run_is_paused_goes_on_with_it_later(
    fleet: LocalFleet, tools: Any, small_disk: Path
) -> None:
    active = fleet.submit(tools.gated_run(rounds=100_000, min=2, iterations=2, pace_s=0.05))
    tools.eventually(lambda: len(tools.used(fleet, active)) > 4)
    filler = _fill(small_disk)
    tools.eventually(lambda: tools.status(fleet, active) == "paused")
    assert fleet.end("coordinator") == 0
    filler.unlink()
    fleet.start_coordinator()
    before = len(tools.used(fleet, active))
    tools.eventually(lambda: len(tools.used(fleet, active)) > before + 2, what="it goes on")
    tools.check_logs(fleet.root)


@pytest.mark.parametrize("fleet", [1], indirect=True)
def test_a_full_disk_without_a_run_is_said_and_devices_are_heard_meanwhile(
    fleet: LocalFleet, tools: Any, small_disk: Path
) -> None:
    fleet.wait_present(1)
    filler = _fill(small_disk)
    log = fleet.root / "coordinator.log"
    tools.eventually(lambda: "what there is to write waits" in log.read_text())
    assert fleet.presence() == {"device-01": "online"}
    filler.unlink()
    tools.eventually(lambda: "store-hindered" in _event_kinds(fleet))
    assert fleet.processes["coordinator"].poll() is None
    tools.check_logs(fleet.root)


@pytest.mark.slow
@pytest.mark.parametrize("fleet", [1], indirect=True)
def test_a_store_that_another_program_holds_ends_nothing(fleet: LocalFleet, tools: Any) -> None:
    fleet.wait_present(1)
    run = fleet.submit(tools.gated_run(rounds=100, min=1, iterations=2, pace_s=0.1))
    tools.eventually(lambda: len(tools.used(fleet, run)) > 2)
    log, other = fleet.root / "coordinator.log", sqlite3.connect(fleet.database, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    tools.eventually(lambda: "is in use by another program" in log.read_text())
    other.execute("ROLLBACK")
    other.close()
    assert fleet.wait_run(run)["status"] == "finished"
    assert len(tools.used(fleet, run)) == 100
    assert "store-hindered" in _event_kinds(fleet) or "run-paused" in _event_kinds(fleet, run)
    tools.check_logs(fleet.root)


@pytest.mark.parametrize("fleet", [0], indirect=True)
def test_a_coordinator_does_not_start_on_a_full_disk(fleet: LocalFleet, small_disk: Path) -> None:
    assert fleet.end("coordinator") == 0
    _fill(small_disk)
    with pytest.raises(RunFailedError, match="no room"):
        fleet.start_coordinator()
    assert fleet.processes["coordinator"].wait(10) == 11

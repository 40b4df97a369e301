"""The disk of the store fills up for real, a small file system; or another program holds the store."""

from __future__ import annotations

import sqlite3
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from requirements import needs

from edgefl.core.errors import RunFailedError, StoreFullError
from edgefl.simulation.local_fleet import LocalFleet

pytestmark = [pytest.mark.extended, needs("root")]

SIZE = "16m"


@contextmanager
def make_fleet(tools: Any, root: Path) -> Iterator[LocalFleet]:
    with (
        _mounted(root, "coordinator"),
        _mounted(root, "device-01"),
        tools.fleet(root, tools.devices(2, "digits", tools.gated)) as running,
    ):
        yield running


@contextmanager
def _mounted(root: Path, name: str) -> Iterator[None]:
    """A small file system at this name."""
    place = root / f"small-{name}"
    place.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs", str(place)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(
            f"a small file system cannot be mounted here, {done.stderr.strip()}: run it outside of a container"
        )
    (root / name).symlink_to(place)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


def _fill(fleet: LocalFleet, name: str = "coordinator") -> Path:
    filler = fleet.root / name / "filler"
    with filler.open("wb", buffering=0) as file:
        for size in (4096, 512, 1):
            try:
                while True:
                    file.write(b"x" * size)
            except OSError:
                continue
    return filler


def test_a_full_disk_pauses_the_run_which_goes_on_by_itself_and_ends_with_the_same_model(
    fleet: LocalFleet, tools: Any
) -> None:
    before = tools.metrics(fleet)
    run = fleet.submit(tools.gated_run(rounds=40, min=2, iterations=2, pace_s=0.05))
    tools.eventually(lambda: len(tools.used(fleet, run)) > 4)
    kept = {row["assignment_id"] for row in tools.used(fleet, run)}
    filler = _fill(fleet)

    tools.eventually(lambda: tools.status(fleet, run) == "paused")
    reason = tools.run(fleet, run)["reason"]
    assert "no room" in reason or "cannot be written" in reason
    assert str(fleet.directory) in reason
    assert "paused" in tools.as_operator(fleet, "run", "list").out
    assert set(fleet.get_presence().values()) == {"online"}

    filler.unlink()
    assert fleet.wait_for_run(run)["status"] == "finished"
    used = tools.used(fleet, run)
    assert (len(used), len({row["assignment_id"] for row in used})) == (80, 80)
    assert kept <= {row["assignment_id"] for row in used}
    pauses, ends = (tools.events(fleet, kind, run=run) for kind in ("run-paused", "run-unpaused"))
    assert len(pauses) == len(ends) >= 1
    now = tools.metrics(fleet)
    gained = {name: value - before.get(name, 0.0) for name, value in now.items()}
    assert gained["edgefl_assignments_total"] == gained["edgefl_updates_totalused"] == 80
    assert gained["edgefl_rounds_closed_total"] == 40
    assert gained["edgefl_uplink_bytes_total"] == sum(row["bytes_up"] for row in used)
    connection = sqlite3.connect(fleet.database)
    assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    connection.close()
    again = fleet.submit(tools.gated_run(rounds=40, min=2, iterations=2))
    assert fleet.wait_for_run(again)["model"] == tools.run(fleet, run)["model"]


def test_a_full_disk_without_a_run_is_said_and_devices_are_heard_meanwhile(fleet: LocalFleet, tools: Any) -> None:
    filler, log = _fill(fleet), fleet.root / "coordinator.log"
    seen = len(log.read_text())
    tools.eventually(lambda: "what there is to write waits" in log.read_text()[seen:])
    assert set(fleet.get_presence().values()) == {"online"}
    filler.unlink()
    tools.eventually(lambda: tools.events(fleet, "store-unavailable"))
    assert fleet.processes["coordinator"].poll() is None


def test_a_coordinator_that_is_stopped_while_its_run_is_paused_starts_on_no_full_disk_and_then_goes_on(
    fleet: LocalFleet, tools: Any
) -> None:
    run = fleet.submit(tools.gated_run(rounds=100_000, min=2, iterations=2, pace_s=0.05))
    tools.eventually(lambda: len(tools.used(fleet, run)) > 4)
    _fill(fleet)
    tools.eventually(lambda: tools.status(fleet, run) == "paused")
    assert fleet.terminate("coordinator") == 0
    filler = _fill(fleet)  # what it has left at its end is filled, too
    with pytest.raises(RunFailedError, match=r"no room|No space left on device; free some space"):
        fleet.start_coordinator()
    assert fleet.processes["coordinator"].wait(10) == StoreFullError.exit_code
    filler.unlink()
    fleet.start_coordinator()
    before = len(tools.used(fleet, run))
    tools.eventually(lambda: len(tools.used(fleet, run)) > before + 2, what="it goes on")
    tools.stop(fleet, run)


def test_a_device_on_a_full_card_works_on_and_says_once_what_it_cannot_keep(fleet: LocalFleet, tools: Any) -> None:
    log = fleet.root / "device-01.log"
    run = fleet.submit(tools.gated_run(rounds=10, min=2, pace_s=0.2, compression={"up": "topk:0.1"}))
    tools.eventually(lambda: len(tools.used(fleet, run)) >= 2)  # a device without room is not admitted
    filler, seen = _fill(fleet, "device-01"), len(log.read_text())
    assert fleet.wait_for_run(run)["status"] == "finished"
    assert len(tools.used(fleet, run, "device-01")) == 10
    told = log.read_text()[seen:]
    assert told.count("the log of this device cannot be written: No space left on device") <= 1
    assert not [word for word in ("Traceback", "Logging error") if word in told]

    assert fleet.terminate("device-01") == 0
    fleet.start_device("device-01")
    assert fleet.processes["device-01"].wait(30) == StoreFullError.exit_code
    filler.unlink()
    fleet.start_device("device-01")
    fleet.wait_for_devices(2)
    assert not [word for word in ("Traceback", "Logging error") if word in log.read_text()[seen:]]


def test_a_store_that_another_program_holds_ends_nothing(fleet: LocalFleet, tools: Any) -> None:
    run = fleet.submit(tools.gated_run(rounds=60, min=1, iterations=2, pace_s=0.1))
    tools.eventually(lambda: len(tools.used(fleet, run)) > 2)
    log, other = fleet.root / "coordinator.log", sqlite3.connect(fleet.database, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    tools.eventually(lambda: "is in use by another program" in log.read_text())
    other.execute("ROLLBACK")
    other.close()
    assert fleet.wait_for_run(run)["status"] == "finished"
    used = tools.used(fleet, run)
    assert len({row["assignment_id"] for row in used}) == len(used) == 120
    assert tools.events(fleet, "store-unavailable") or tools.events(fleet, "run-paused", run=run)

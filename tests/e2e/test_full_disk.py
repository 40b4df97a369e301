"""The disk of the store fills up for real: a small file system that is nearly full."""

from __future__ import annotations

import os
import sqlite3
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from edgefl.config import parse_run
from edgefl.errors import RunFailedError
from edgefl.local_fleet import LocalFleet

SIZE = "4m"


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
    with tools.fleet(root, tools.devices(request.param)) as running:
        yield running


@pytest.mark.parametrize("fleet", [2], indirect=True)
def test_a_full_disk_ends_the_coordinator_with_one_line_and_loses_nothing(
    fleet: LocalFleet, tools: Any, small_disk: Path
) -> None:
    done = fleet.submit(parse_run({"run": {"task": "digits", "rounds": 2}, "devices": {"min": 2}}))
    fleet.wait_run(done)
    active = fleet.submit(parse_run({"run": {"task": "digits", "rounds": 100_000}, "devices": {"min": 2}}))
    tools.eventually(lambda: len(tools.used(fleet, active)) > 2)
    kept = {row["assignment_id"] for row in tools.used(fleet, active)}
    filler = _fill(small_disk)

    assert fleet.processes["coordinator"].wait(30) == 11
    lines = (fleet.root / "coordinator.log").read_text().splitlines()
    told = [line for line in lines if line.startswith("edgefl: ")]
    assert len(told) == 1
    assert "no room" in told[0]
    tools.check_logs(fleet.root)

    filler.unlink()
    fleet.start_coordinator()
    assert tools.status(fleet, done) == "finished"
    tools.eventually(lambda: tools.status(fleet, active) == "running", what="it goes on where it was")
    assert len(tools.used(fleet, done)) == 2 * 2
    assert kept <= {row["assignment_id"] for row in tools.used(fleet, active)}
    connection = sqlite3.connect(fleet.database)
    assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    connection.close()
    fleet.wait_present(2)
    tools.eventually(lambda: len(tools.used(fleet, active)) > len(kept) + 2, what="more updates are used")
    fleet.operator().post(f"/edgefl/v1/runs/{active}/stop")
    again = fleet.submit(parse_run({"run": {"task": "digits", "rounds": 2}, "devices": {"min": 2}}))
    assert fleet.wait_run(again)["status"] == "finished"


@pytest.mark.parametrize("fleet", [1], indirect=True)
def test_a_full_disk_is_noticed_without_a_run_too(fleet: LocalFleet, tools: Any, small_disk: Path) -> None:
    _fill(small_disk)
    assert fleet.processes["coordinator"].wait(60) == 11
    assert "no room" in fleet.log_tail("coordinator", 1)
    tools.check_logs(fleet.root)


@pytest.mark.parametrize("fleet", [0], indirect=True)
def test_a_coordinator_does_not_start_on_a_full_disk(fleet: LocalFleet, small_disk: Path) -> None:
    assert fleet.end("coordinator") == 0
    _fill(small_disk)
    with pytest.raises(RunFailedError, match="no room"):
        fleet.start_coordinator()
    assert fleet.processes["coordinator"].wait(10) == 11

"""A bit turns over in a journal that was on the disk, while its coordinator is away."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from edgefl.local_fleet import LocalFleet
from edgefl.storage.wal import HEADER_BYTES

ROUNDS = 60


@pytest.fixture
def fleet(tools: Any, tmp_path: Path) -> Iterator[LocalFleet]:
    with tools.fleet(tmp_path / "fleet", tools.devices(2, tools.gated)) as running:
        yield running


@pytest.mark.parametrize("has_checkpoint", [False, True])
def test_the_run_goes_on_from_its_checkpoint_and_counts_no_update_twice(
    fleet: LocalFleet, tools: Any, has_checkpoint: bool
) -> None:
    run_file = tools.gated_run(rounds=ROUNDS, min=2, iterations=2, pace_s=0.1)
    run = fleet.submit(run_file)
    folder = fleet.directory / "runs" / run

    def is_far_enough() -> bool:
        newest = max(folder.glob("journal/*.wal"), default=None)
        has_one = any(folder.glob("checkpoints/*.checkpoint.json"))
        return newest is not None and newest.stat().st_size > 100_000 and has_one == has_checkpoint

    tools.eventually(is_far_enough)
    fleet.kill("coordinator")
    damaged = max(folder.glob("journal/*.wal"))
    content = bytearray(damaged.read_bytes())
    content[HEADER_BYTES + 8] ^= 1
    damaged.write_bytes(content)

    fleet.start_coordinator()
    tools.eventually(lambda: tools.status(fleet, run) == "finished", what="it goes on by itself")
    used = [row["assignment_id"] for row in tools.used(fleet, run)]
    assert (len(used), len(set(used))) == (2 * ROUNDS, 2 * ROUNDS)
    assert [row["num_updates"] for row in fleet.history("rounds", run=run)] == [2] * ROUNDS
    told = [row["message"] for row in fleet.history("events", run=run) if row["kind"] == "journal-damaged"]
    assert len(told) == 1
    assert f"{damaged} is damaged at byte {HEADER_BYTES}" in told[0]
    again = fleet.submit(run_file)
    assert fleet.wait_run(again)["model"] == fleet.operator().get(f"/edgefl/v1/runs/{run}")["model"]
    tools.check_logs(fleet.root)

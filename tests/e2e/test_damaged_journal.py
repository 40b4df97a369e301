"""A bit turns over in a journal that was on the disk, while its coordinator is away."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from edgefl.config import RunConfig, parse_run
from edgefl.local_fleet import LocalFleet
from edgefl.storage.wal import HEADER_BYTES

ROUNDS = 60


@pytest.fixture
def fleet(tools: Any, tmp_path: Path) -> Iterator[LocalFleet]:
    with tools.fleet(tmp_path / "fleet", tools.devices(2, tools.gated)) as running:
        yield running


def _is_far_enough(folder: Path, *, has_checkpoint: bool) -> bool:
    newest = max(folder.glob("journal/*.wal"), default=None)
    has_one = any(folder.glob("checkpoints/*.checkpoint.json"))
    return newest is not None and newest.stat().st_size > 100_000 and has_one == has_checkpoint


def _damage(folder: Path, at: float) -> Path:
    """Turns a bit over in the newest journal file of a run, in its first record or so far behind it (0 to 1)."""
    damaged = max(folder.glob("journal/*.wal"))
    content = bytearray(damaged.read_bytes())
    content[HEADER_BYTES + 8 + int(at * (len(content) - HEADER_BYTES))] ^= 1
    damaged.write_bytes(content)
    return damaged


def _messages(fleet: LocalFleet, run: str, kind: str) -> list[str]:
    return [row["message"] for row in fleet.history("events", run=run) if row["kind"] == kind]


@pytest.mark.parametrize("has_checkpoint", [pytest.param(False, marks=pytest.mark.slow), True])
def test_the_run_goes_on_from_its_checkpoint_and_counts_no_update_twice(
    fleet: LocalFleet, tools: Any, has_checkpoint: bool
) -> None:
    run_file = tools.gated_run(rounds=ROUNDS, min=2, iterations=2, pace_s=0.1)
    run = fleet.submit(run_file)
    folder = fleet.directory / "runs" / run
    tools.eventually(lambda: _is_far_enough(folder, has_checkpoint=has_checkpoint))
    fleet.kill("coordinator")
    damaged = _damage(folder, 0.0)

    fleet.start_coordinator()
    tools.eventually(lambda: tools.status(fleet, run) == "finished", what="it goes on by itself")
    _check_whole(fleet, tools, run)
    [told] = _messages(fleet, run, "journal-damaged")
    assert f"{damaged} is damaged at byte {HEADER_BYTES}" in told
    again = fleet.submit(run_file)
    assert fleet.wait_run(again)["model"] == fleet.operator().get(f"/edgefl/v1/runs/{run}")["model"]
    tools.check_logs(fleet.root)


def _check_whole(fleet: LocalFleet, tools: Any, run: str) -> None:
    used = [row["assignment_id"] for row in tools.used(fleet, run)]
    counts = [row["num_updates"] for row in fleet.history("rounds", run=run)]
    assert counts[:ROUNDS] == [2] * ROUNDS
    assert sum(counts) <= 2 * ROUNDS + 2, "what came after the goal was reached is a round of its own"
    assert len(used) == len(set(used)) == sum(counts)


def _buffered(run_file: RunConfig) -> RunConfig:
    values = run_file.to_json()
    return parse_run({**values, "strategy": {"name": "fedbuff", "buffer_size": 2, "iterations": 2}})


@pytest.mark.parametrize("strategy", ["fedavg", "fedbuff"])
def test_what_is_whole_before_the_damage_is_kept_and_only_what_came_later_is_asked_for_again(
    fleet: LocalFleet, tools: Any, strategy: str
) -> None:
    run_file = tools.gated_run(rounds=ROUNDS, min=2, iterations=2, pace_s=0.1)
    run = fleet.submit(run_file if strategy == "fedavg" else _buffered(run_file))
    folder = fleet.directory / "runs" / run
    tools.eventually(lambda: len(tools.used(fleet, run)) >= 12)
    assert _is_far_enough(folder, has_checkpoint=False)
    before = {row["assignment_id"]: row for row in tools.used(fleet, run)}
    fleet.kill("coordinator")
    _damage(folder, 0.7)

    fleet.start_coordinator()
    tools.eventually(lambda: tools.status(fleet, run) == "finished", what="it goes on by itself")
    _check_whole(fleet, tools, run)
    [told] = _messages(fleet, run, "journal-followed")
    version = int(told.split("was followed to version ")[1].split()[0])
    assert version > 0
    used = {row["assignment_id"]: row for row in tools.used(fleet, run)}
    kept = {name: row for name, row in before.items() if row["applied_version"] < version}
    assert kept
    given = {name: row["dispatched_at"] for name, row in kept.items()}
    assert {name: used[name]["dispatched_at"] for name in kept} == given, "they were not given out again"
    assert [row for row in before.values() if row["applied_version"] >= version], "some were lost"
    row = fleet.operator().get(f"/edgefl/v1/runs/{run}")
    if strategy == "fedavg":
        again = fleet.submit(run_file)
        assert fleet.wait_run(again)["model"] == row["model"]
    tools.check_logs(fleet.root)

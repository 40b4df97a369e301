"""A bit turns over in a journal that was on the disk, while its coordinator is away."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from edgefl.core.errors import RunFailedError, StoreError
from edgefl.simulation.local_fleet import LocalFleet
from edgefl.storage.journal.file_format import HEADER_BYTES

pytestmark = pytest.mark.extended

ROUNDS = 60
"""More than ten seconds: no checkpoint is due before."""
PACE_S = 0.1
FEDBUFF = {"name": "fedbuff", "buffer_size": 2}


@contextmanager
def make_fleet(tools: Any, root: Path) -> Iterator[LocalFleet]:
    with tools.fleet(root, tools.devices(2, tools.gated)) as running:
        yield running


def _is_far_enough(folder: Path, *, has_checkpoint: bool) -> bool:
    newest = max(folder.glob("journal/*.wal"), default=None)
    has_one = any(folder.glob("checkpoints/*.checkpoint.json"))
    return newest is not None and newest.stat().st_size > 100_000 and has_one == has_checkpoint


def _goes_on_after_damage(fleet: LocalFleet, tools: Any, run: str, at: float) -> Path:
    """Turns a bit over in the newest journal file, in its first record or so far behind it (0 to 1), and restarts."""
    fleet.kill("coordinator")
    damaged = max((fleet.directory / "runs" / run).glob("journal/*.wal"))
    content = bytearray(damaged.read_bytes())
    content[HEADER_BYTES + 8 + int(at * (len(content) - HEADER_BYTES))] ^= 1
    damaged.write_bytes(content)
    fleet.start_coordinator()
    tools.eventually(lambda: tools.status(fleet, run) == "finished", what="it goes on by itself")
    used = [row["assignment_id"] for row in tools.used(fleet, run)]
    counts = [row["num_updates"] for row in fleet.list_history("rounds", run=run)]
    assert counts[:ROUNDS] == [2] * ROUNDS
    assert sum(counts) <= 2 * ROUNDS + 2, "what came after the goal was reached is a round of its own"
    assert len(used) == len(set(used)) == sum(counts)
    return damaged


def test_a_lost_write_ahead_log_is_said_and_the_newest_run_goes_on_from_its_journal(
    fleet: LocalFleet, tools: Any
) -> None:
    fleet.terminate("coordinator")
    fleet.start_coordinator()  # so that the database itself has all that came before
    run = fleet.submit(tools.gated_run(rounds=ROUNDS, min=2, iterations=2, pace_s=PACE_S))
    tools.eventually(lambda: len(tools.used(fleet, run)) >= 12)
    fleet.kill("coordinator")
    for end in ("-wal", "-shm"):
        fleet.database.with_name(f"{fleet.database.name}{end}").unlink()
    fleet.start_coordinator()
    (told,) = tools.events(fleet, "lineage-began")
    assert "its write-ahead log (-wal) was removed or cut" in told["message"]
    assert f"but for {run}, from the journal" in told["message"]
    tools.eventually(lambda: tools.status(fleet, run) == "finished", what="it goes on by itself")
    assert _has_the_model_of_an_undisturbed_run(fleet, tools, run)


def test_a_damaged_database_ends_the_start_at_once(fleet: LocalFleet) -> None:
    fleet.terminate("coordinator")
    content = fleet.database.read_bytes()
    damaged = bytearray(content)
    middle = len(damaged) // 2
    damaged[middle : middle + len(damaged) // 4] = bytes(len(damaged) // 4)
    fleet.database.write_bytes(damaged)
    with pytest.raises(RunFailedError, match="is damaged; restore a backup"):
        fleet.start_coordinator()
    assert fleet.processes["coordinator"].wait(10) == StoreError.exit_code
    fleet.database.write_bytes(content)
    fleet.start_coordinator()


def _has_the_model_of_an_undisturbed_run(fleet: LocalFleet, tools: Any, run: str) -> bool:
    again = fleet.submit(tools.gated_run(rounds=ROUNDS, min=2, iterations=2))
    return bool(fleet.wait_for_run(again)["model"] == tools.run(fleet, run)["model"])


@pytest.mark.parametrize("has_checkpoint", [pytest.param(False, marks=pytest.mark.slow), True])
def test_the_run_goes_on_from_its_checkpoint_and_counts_no_update_twice(
    fleet: LocalFleet, tools: Any, has_checkpoint: bool
) -> None:
    run = fleet.submit(tools.gated_run(rounds=ROUNDS, min=2, iterations=2, pace_s=PACE_S))
    folder = fleet.directory / "runs" / run
    tools.eventually(lambda: _is_far_enough(folder, has_checkpoint=has_checkpoint))
    damaged = _goes_on_after_damage(fleet, tools, run, 0.0)
    (told,) = tools.events(fleet, "journal-damaged", run=run)
    assert f"{damaged} is damaged at byte {HEADER_BYTES}" in told["message"]
    assert _has_the_model_of_an_undisturbed_run(fleet, tools, run)


@pytest.mark.parametrize("strategy", [{}, FEDBUFF], ids=["fedavg", "fedbuff"])
def test_what_is_whole_before_the_damage_is_kept_and_only_what_came_later_is_asked_for_again(
    fleet: LocalFleet, tools: Any, strategy: dict[str, Any]
) -> None:
    run = fleet.submit(tools.gated_run(rounds=ROUNDS, min=2, iterations=2, pace_s=PACE_S, strategy=strategy))
    tools.eventually(lambda: len(tools.used(fleet, run)) >= 12)
    assert _is_far_enough(fleet.directory / "runs" / run, has_checkpoint=False)
    before = {row["assignment_id"]: row for row in tools.used(fleet, run)}
    _goes_on_after_damage(fleet, tools, run, 0.7)
    (told,) = tools.events(fleet, "journal-replayed", run=run)
    version = int(told["message"].split("was followed to version ")[1].split()[0])
    assert version > 0
    used = {row["assignment_id"]: row for row in tools.used(fleet, run)}
    kept = {name: row["dispatched_at"] for name, row in before.items() if row["applied_version"] < version}
    assert kept
    assert {name: used[name]["dispatched_at"] for name in kept} == kept, "they were not given out again"
    assert [row for row in before.values() if row["applied_version"] >= version], "some were lost"
    if not strategy:
        assert _has_the_model_of_an_undisturbed_run(fleet, tools, run)

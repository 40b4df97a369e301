"""Runs side by side on one coordinator: each as if it were alone, whoever else is stopped or killed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from edgefl.simulation.local_fleet import LocalFleet

pytestmark = [pytest.mark.extended, pytest.mark.timeout(600)]

LEFT, RIGHT = ["device-01", "device-02"], ["device-03", "device-04"]
ROUNDS, KILLS = 40, 3


@contextmanager
def make_fleet(tools: Any, root: Path) -> Iterator[LocalFleet]:
    with tools.fleet(root, tools.devices(4, tools.gated), parallel_runs=2) as running:
        yield running


def submit(fleet: LocalFleet, tools: Any, names: list[str], *, priority: int = 0, **more: Any) -> str:
    options = {"iterations": 2, "rounds": ROUNDS, "devices": {"names": names, "min": len(names)}, **more}
    body = {"config": tools.gated_run(**options).to_json(), "priority": priority}
    return str(fleet.make_client().post("/edgefl/v1/runs", body)["run_id"])


def test_two_runs_lose_and_double_nothing_over_kills_of_their_coordinator(fleet: LocalFleet, tools: Any) -> None:
    """Each gets the model that it gets alone and undisturbed."""
    undisturbed = [
        fleet.wait_for_run(submit(fleet, tools, names, seed=seed))["model"] for names, seed in ((LEFT, 1), (RIGHT, 2))
    ]
    runs = [submit(fleet, tools, names, seed=seed, pace_s=0.3) for names, seed in ((LEFT, 1), (RIGHT, 2))]
    for number in range(KILLS):
        for run_id in runs:
            tools.wait_rounds(fleet, run_id, 2 * number + 1)
        assert {tools.status(fleet, run_id) for run_id in runs} == {"running"}
        fleet.kill("coordinator")
        fleet.start_coordinator()
    for run_id, names, model in zip(runs, (LEFT, RIGHT), undisturbed, strict=True):
        run = fleet.wait_for_run(run_id)
        assert (run["status"], run["resumes"], run["model"]) == ("finished", 0, model)
        used = tools.used(fleet, run_id)
        expected = [(number, name) for number in range(1, ROUNDS + 1) for name in names]
        assert sorted((row["round"], row["device_id"]) for row in used) == expected
        assert len({row["assignment_id"] for row in used}) == len(expected)


def test_a_run_that_is_stopped_or_fails_leaves_the_other_alone(fleet: LocalFleet, tools: Any, tmp_path: Path) -> None:
    gate = tools.gate(tmp_path / "gate")
    held = submit(fleet, tools, LEFT, gate=gate, rounds=3)
    tools.in_the_middle(fleet, gate, *LEFT)
    stopped = submit(fleet, tools, RIGHT, pace_s=0.05, rounds=1000)
    tools.wait_rounds(fleet, stopped, 2)
    behind = submit(fleet, tools, RIGHT, rounds=2)

    def list_states() -> dict[str, tuple[str, str | None]]:
        rows = tools.as_operator(fleet, "run", "list", "--format", "json").rows
        return {row["run_id"]: (row["status"], row["reason"]) for row in rows}

    reason = "2 runs are active, and --parallel-runs is 2"
    tools.eventually(lambda: list_states()[behind] == ("queued", reason), what="it says what it waits for")
    assert [list_states()[run_id][0] for run_id in (held, stopped)] == ["running", "running"]
    tools.stop(fleet, stopped)
    assert fleet.wait_for_run(behind)["rounds"] == 2
    assert tools.status(fleet, held) == "running"
    gate.open()
    assert fleet.wait_for_run(held)["rounds"] == 3
    assert len(tools.used(fleet, held)) == 6


def test_a_run_of_higher_priority_takes_the_boards_of_another_which_goes_on_afterwards(
    fleet: LocalFleet, tools: Any
) -> None:
    low = submit(fleet, tools, LEFT, pace_s=0.1, min=1, devices={"names": LEFT}, rounds=60)
    tools.wait_rounds(fleet, low, 2)
    high = submit(fleet, tools, LEFT[:1], priority=5, rounds=3)
    assert fleet.wait_for_run(high)["rounds"] == 3
    recalled = [row for row in fleet.list_history("updates", run=low) if row["outcome"] == "lost"]
    assert {row["device_id"] for row in recalled} <= {LEFT[0]}
    assert all(row["reason"] == f"its board works for run {high} now" for row in recalled)
    newest = tools.run(fleet, low)["rounds"]
    tools.eventually(
        lambda: any(row["round"] > newest for row in tools.used(fleet, low, LEFT[0])), what="its board is back"
    )
    tools.stop(fleet, low)
    used = tools.used(fleet, low)
    assert len({row["assignment_id"] for row in used}) == len(used)

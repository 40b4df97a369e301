"""A board that is to be forgotten: what came of its data, and a run that is made again without it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from edgefl.core.config import parse_run
from edgefl.simulation.local_fleet import LocalFleet

pytestmark = pytest.mark.extended


def test_a_run_is_made_again_from_the_model_before_a_board_came_and_without_it(tools: Any, tmp_path: Path) -> None:
    *first, late = tools.devices(3, "digits")
    with tools.fleet(tmp_path, first, scored=True, kind=LocalFleet) as fleet:
        config = parse_run(
            {
                "run": {"task": "digits", "rounds": 40, "seed": 7, "evaluate_on": "coordinator"},
                "strategy": {"name": "fedavg", "iterations": 300},
                "models": {"keep_every": 1},
            }
        )
        run_id = fleet.submit(config)
        tools.wait_rounds(fleet, run_id, 3)
        fleet.add_device(late)
        assert fleet.wait_for_run(run_id)["status"] == "finished"
        (use,) = json.loads(fleet.run_command("history", "uses", late.name, "--format", "json"))["rows"]
        assert (use["run_id"], use["num_used"] > 0, use["first_round"] > 3) == (run_id, True, True)
        assert use["clean_version"] >= 3
        assert all(model["version"] > use["clean_version"] for model in use["models"])

        new_id = fleet.run_command("run", "forget", run_id, "--device", late.name).split()[-1]
        assert fleet.wait_for_run(new_id)["status"] == "finished"
        rounds = fleet.list_history("rounds", run=new_id)
        assert len(rounds) == 40 - use["clean_version"]
        assert {row["device_id"] for row in fleet.list_history("updates", run=new_id)} == {
            device.name for device in first
        }
        uses = json.loads(fleet.run_command("history", "uses", late.name, "--format", "json"))["rows"]
        assert [(row["run_id"], row["replaced_by"]) for row in uses] == [(run_id, [new_id])]

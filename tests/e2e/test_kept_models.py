"""A coordinator that is killed in the middle of a run leaves models that can be used, and rows that name them."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from edgefl.config import parse_run
from edgefl.local_fleet import COORDINATOR, LocalFleet
from edgefl.local_run import cut_devices
from edgefl.storage.model_rows import kept_models
from edgefl.storage.store import Store


@pytest.mark.slow
def test_every_row_has_its_file_after_a_kill_and_the_models_are_those_of_the_history(
    tools: Any, tmp_path: Path
) -> None:
    cut = cut_devices("digits", "iid", 2, tmp_path / "shards", None, 7)
    run = {"task": "digits", "rounds": 100_000, "evaluate_on": "coordinator"}
    with LocalFleet(root=tmp_path, devices=cut.devices, test_shards=cut.test_shards) as fleet:
        for num_rounds in (30, 47):
            run_id = fleet.submit(parse_run({"run": run, "devices": {"min": 2}}))
            tools.eventually(partial(_has_rounds, fleet, run_id, num_rounds))
            fleet.kill(COORDINATOR)
            with Store.open(fleet.database) as store:
                rows = kept_models(store, run_id)
            files = {path.stem for path in (fleet.directory / "models").glob("*.safetensors")}
            assert 1 <= len(rows) <= 12
            assert {row["sha256"] for row in rows} <= files
            fleet.start_coordinator()
            fleet.wait_present(3)
            told = fleet.command("model", "evaluate", "--run", run_id, "--on", "coordinator", "--dir",
                                 str(fleet.directory), "--format", "json")  # fmt: skip
            scored = [row for row in json.loads(told)["rows"] if row["recorded_accuracy"] is not None]
            assert scored
            assert all(row["accuracy"] == pytest.approx(row["recorded_accuracy"]) for row in scored)
            fleet.operator().post(f"/edgefl/v1/runs/{run_id}/stop")  # it went on by itself
            assert fleet.wait_run(run_id)["status"] == "stopped"


def _has_rounds(fleet: LocalFleet, run_id: str, number: int) -> bool:
    return len(fleet.history("rounds", run=run_id)) >= number

"""Redundant shards over real processes: a device that is lost costs nothing, not a bit of the model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from edgefl.config import parse_run
from edgefl.local_fleet import LocalDevice, LocalFleet
from edgefl.tasks.cutting import cut_shards

NUM_DEVICES = 3


@pytest.fixture(scope="module")
def fleet(tools: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalFleet]:
    root = tmp_path_factory.mktemp("redundant")
    paths = cut_shards("digits", "redundant:2", NUM_DEVICES, root / "shards")
    devices = [LocalDevice(name=path.stem, shards={"digits": str(path)}) for path in paths]
    with tools.fleet(root, devices) as running:
        yield running
    tools.check_logs(root)


def test_the_model_is_the_same_bit_for_bit_when_a_holder_of_its_blocks_is_gone(fleet: LocalFleet, tools: Any) -> None:
    models, used = [], []
    for num_left in (NUM_DEVICES, NUM_DEVICES - 1):
        if num_left < NUM_DEVICES:
            fleet.end("device-02")
            tools.eventually(lambda: fleet.presence()["device-02"] == "offline", what="it has left")
        config = {
            "run": {"task": "digits", "rounds": 3, "evaluate_on": "none", "local_test_fraction": 0.0},
            "strategy": {"name": "redundant", "learning_rate": 0.3, "iterations": 3},
            "devices": {"min": num_left},
        }
        run_id = fleet.submit(parse_run(config))
        run = fleet.wait_run(run_id)
        assert run["status"] == "finished"
        models.append(run["model"])
        used.append(tools.used(fleet, run_id))
    assert [len(rows) for rows in used] == [3 * NUM_DEVICES] * 2, "one copy of every block in every round"
    assert {row["device_id"] for row in used[1]} == {"device-01", "device-03"}
    assert models[0] == models[1]

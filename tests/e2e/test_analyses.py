"""Analyses on real agents, confined: over a killed coordinator the answer is the one of the simulation."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import edgefl
from edgefl.core.config import parse_run
from edgefl.simulation.local_fleet import LocalDeviceSpec, LocalFleet

pytestmark = [pytest.mark.extended, pytest.mark.timeout(400)]

EXAMPLE = Path(__file__).parents[2] / "examples" / "diabetes"
TASK = "diabetes:Diabetes"
NAMES = ("device-01", "device-02", "device-03")


@pytest.fixture(scope="module")
def running(tools: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalFleet]:
    root, rng, devices = tmp_path_factory.mktemp("analyses"), np.random.default_rng(4), []
    for name in NAMES:
        rows = rng.standard_normal((40, 11))
        rows[:, -1] = 150 + 50 * (rows[:, 2] > 0) + 20 * rows[:, 5] + rows[:, -1]
        (root / name).mkdir()
        np.savetxt(root / name / "patients.csv", rows, delimiter=",")
        devices.append(LocalDeviceSpec(name=name, shards={TASK: str(root / name)}))
    environment = {"EDGEFL_CONFINE": "auto", "EDGEFL_ALLOW_MODULES": "diabetes"}
    with tools.fleet(
        root / "fleet", devices, environment=environment, also_importable=[EXAMPLE], kind=LocalFleet
    ) as fleet:
        yield fleet


def test_trees_over_a_killed_coordinator_are_those_of_the_simulation(
    running: LocalFleet, tools: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    strategy = {"name": "boosted-trees", "trees": 8, "depth": 2}
    config = parse_run({"run": {"task": TASK}, "strategy": strategy, "devices": {"min": 3}})
    run_id = running.submit(config)
    tools.wait_rounds(running, run_id, 6)
    running.kill("coordinator")
    running.start_coordinator()
    ended = running.wait_for_run(run_id)
    assert (ended["status"], ended["rounds"]) == ("finished", 2 + 8 * 2)
    path = tmp_path / "result.json"
    assert tools.as_operator(running, "run", "result", run_id, "--out", path).code == 0
    monkeypatch.syspath_prepend(EXAMPLE)
    shards = [next(iter(device.shards.values())) for device in running.devices]
    simulated = edgefl.simulate(config, devices=shards, root=tmp_path / "runs", allow_modules=["diabetes"])
    assert json.loads(path.read_text()) == json.loads(simulated.result.read_text())

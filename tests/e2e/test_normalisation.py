"""Means and scales of a fleet on real agents: one coordinator is killed between finding them and the first round."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from safetensors.numpy import load_file

import edgefl
from edgefl.core.config import RunConfig, parse_run
from edgefl.simulation.local_fleet import LocalDeviceSpec, LocalFleet
from edgefl.storage.journal.wal_journal import load_journal_entries

pytestmark = [pytest.mark.extended, pytest.mark.timeout(400)]

NAMES = ("device-01", "device-02", "device-03")
TASK = {"columns": ["pressure", "flow", "site"], "target": "is_leak", "labels": ["no", "yes"], "model": "linear"}
CONFIG = parse_run(
    {
        "run": {"task": "table", "name": "leaks", "rounds": 12},
        "task": {**TASK, "normalise": "fleet"},
        "strategy": {"name": "fedavg", "learning_rate": 0.3},
        "devices": {"min": 3},
    }
)


def make_rows(seed: int) -> np.ndarray:
    """Rows of pressures about 100,000 and flows about 0.01, a constant, and a class that follows from both."""
    rng = np.random.default_rng(seed)
    pressure, flow = rng.normal(101_325, 900, 60), rng.normal(0.01, 0.002, 60)
    is_leak = (pressure - 101_325) / 900 < (flow - 0.01) / 0.002
    return np.stack([pressure, flow, np.full(60, 7.0), is_leak], axis=1)


def make_fleet(tools: Any, root: Path) -> Any:
    devices = []
    for number, name in enumerate(NAMES):
        path = root / f"{name}.csv"
        lines = [",".join(map(repr, row)) for row in make_rows(number).tolist()]
        path.write_text("\n".join(["pressure,flow,site,is_leak", *lines]) + "\n")
        devices.append(LocalDeviceSpec(name=name, shards={"table": str(path)}))
    return tools.fleet(root / "fleet", devices)


@pytest.fixture(scope="module")
def running(tools: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalFleet]:
    with make_fleet(tools, tmp_path_factory.mktemp("normalisation")) as fleet:
        yield fleet


@pytest.fixture(scope="module")
def simulated(running: LocalFleet, tmp_path_factory: pytest.TempPathFactory) -> dict[str, np.ndarray]:
    shards = [device.shards["table"] for device in running.devices]
    return load_file(edgefl.simulate(CONFIG, devices=shards, root=tmp_path_factory.mktemp("simulated")).model)


def get_model(tools: Any, fleet: LocalFleet, run_id: str) -> dict[str, np.ndarray]:
    return load_file(fleet.get_model_path(tools.run(fleet, run_id)["model"]))


def test_a_fleet_finds_its_scales_before_the_first_round_and_the_export_has_them(
    running: LocalFleet, tools: Any, simulated: dict[str, np.ndarray], tmp_path: Path
) -> None:
    run_id = running.submit(CONFIG)
    assert running.wait_for_run(run_id)["status"] == "finished"
    for name, tensor in get_model(tools, running, run_id).items():
        assert tensor.tobytes() == simulated[name].tobytes()
    ended = tools.as_operator(running, "model", "export", f"{run_id}:latest", "--out", tmp_path / "leaks.onnx")
    assert ended.code == 0, ended.err
    session, rows = onnxruntime.InferenceSession(tmp_path / "leaks.onnx"), make_rows(99)
    (outputs,) = session.run(None, {session.get_inputs()[0].name: rows[:, :3].astype(np.float32)})[:1]
    assert np.mean(np.argmax(outputs, axis=1) == rows[:, 3]) > 0.9


def test_a_coordinator_killed_before_the_first_round_goes_on_with_the_same_scales(
    running: LocalFleet, tools: Any, simulated: dict[str, np.ndarray]
) -> None:
    rows = running.make_client().get("/edgefl/v1/runs")["rows"]
    scales = next(row["run_id"] for row in rows if row["name"] == "leaks-scales")
    for name in NAMES:
        running.terminate(name)
    run_id = running.submit(_name(CONFIG, scales))
    journal = running.directory / "runs" / run_id / "journal"
    tools.eventually(lambda: journal.is_dir() and any(load_journal_entries(journal)), what="a run that has begun")
    found = tools.run(running, run_id)["config"]["task"]["means"]
    assert tools.run(running, run_id)["rounds"] == 0
    running.kill("coordinator")
    running.start_coordinator()
    for name in NAMES:
        running.start_device(name)
    ended = running.wait_for_run(run_id)
    assert (ended["status"], tools.run(running, run_id)["config"]["task"]["means"]) == ("finished", found)
    for name, tensor in get_model(tools, running, run_id).items():
        assert tensor.tobytes() == simulated[name].tobytes()


def _name(config: RunConfig, run_id: str) -> RunConfig:
    return replace(config, task={**config.task, "normalise": f"run:{run_id}"})

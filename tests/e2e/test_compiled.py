"""Boards without torch train a network of torch by its compiled task, beside one that has torch, in one run."""

import os
import sys
from pathlib import Path

import numpy as np
import pytest
from peer_boards import eventually

from edgefl.core.config import parse_run
from edgefl.simulation.local_fleet import LocalDeviceSpec, LocalFleet

pytest.importorskip("torch", reason="needs torch: pip install '.[train]'")
pytest.importorskip("onnxscript", reason="needs onnxscript: pip install '.[export]'")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

WITHOUT_TORCH = Path(__file__).parent / "without_torch"
NAMES = ("small-1", "small-2", "large")
RUN = {
    "run": {"task": "mnist", "rounds": 6, "local_test_fraction": 0.2, "seed": 3},
    "task": {"model": "cnn-small"},
    "strategy": {"epochs": 2, "batch_size": 10, "learning_rate": 0.05},
    "devices": {"require": 3, "min": 3, "ready_s": 180},
}


def write_patterns(path, seed, count=120):
    """Images of ten patterns, under noise: a network that trains tells them apart in a few rounds."""
    patterns = np.random.default_rng(1).integers(0, 256, (10, 28, 28))
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 10, count)
    inputs = np.clip(0.5 * patterns[labels] + rng.normal(64, 40, (count, 28, 28)), 0, 255).astype(np.uint8)
    path.mkdir()
    np.savez(path / "monday.npz", inputs=inputs, labels=labels)


def make_devices(tools, folder):
    folder.mkdir()
    blocked = f"{WITHOUT_TORCH}{os.pathsep}{tools.environment['PYTHONPATH']}"
    program = ("env", f"PYTHONPATH={blocked}", sys.executable, "-m", "edgefl.cli.main")
    for seed, name in enumerate(NAMES):
        write_patterns(folder / name, seed)
    return [
        LocalDeviceSpec(
            name=name, shards={"mnist": str(folder / name)}, **({"program": program} if name != "large" else {})
        )
        for name in NAMES
    ]


def get_artefact(fleet, name):
    files = list((fleet.root / name / "bases").glob("*.safetensors"))
    return files[0].stem if files else None


def test_a_mixed_fleet_trains_one_run_and_goes_on_with_the_same_file_after_a_kill(tools, tmp_path):
    with tools.fleet(tmp_path / "fleet", make_devices(tools, tmp_path / "shards"), kind=LocalFleet) as fleet:
        facts = fleet.make_client().get("/edgefl/v1/devices/small-1")["capabilities"]
        assert facts["backends"] == ["numpy", "onnx"]
        config = parse_run(RUN)
        rows = fleet.make_client().post("/edgefl/v1/runs/plan", {"config": config.to_json()})["rows"]
        assert {row["device_id"]: row["backend"] for row in rows} == {
            "small-1": "onnx", "small-2": "onnx", "large": "torch",
        }  # fmt: skip
        run_id = fleet.submit(config)
        eventually(
            lambda: len(fleet.list_history("rounds", run=run_id)) >= 2, timeout_s=300, what="two rounds of all boards"
        )
        sha256 = get_artefact(fleet, "small-1")
        fleet.kill("coordinator")
        fleet.start_coordinator()
        run = fleet.wait_for_run(run_id)
        assert sha256 is not None
        assert sha256 == run["config"]["run"]["compiled"] == get_artefact(fleet, "small-1")
        assert get_artefact(fleet, "small-2") == sha256
        assert get_artefact(fleet, "large") is None
        events = [row["kind"] for row in fleet.list_history("events", run=run_id)]
        assert events.count("task-compiled") == 1
        updates = fleet.list_history("updates", run=run_id)
        assert {row["device_id"] for row in updates} == set(NAMES)
        losses = {name: [row["loss"] for row in updates if row["device_id"] == name] for name in NAMES}
        assert all(found[-1] < 0.5 * found[0] for found in losses.values()), losses
        assert run["accuracy"] > 0.8

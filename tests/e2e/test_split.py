"""Split learning over real processes: the model of undisturbed training, whatever is killed meanwhile."""

import os
import signal
import subprocess
from pathlib import Path

import numpy as np
import pytest

import edgefl
from edgefl.core.config import parse_run
from edgefl.simulation.local_fleet import LocalDeviceSpec
from edgefl.storage.checkpoints import load_model_file

pytest.importorskip("torch", reason="needs torch: pip install '.[train]'")
pytestmark = [pytest.mark.extended, pytest.mark.timeout(600)]

NUM_DEVICES, ROUNDS, EXAMPLES, BATCH = 3, 3, 120, 8
NUM_KILLS = 20


def write_shard(folder, seed):
    """Writes images of 28x28 whose class is where they are bright."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 10, EXAMPLES)
    inputs = rng.integers(0, 60, (EXAMPLES, 28, 28)).astype(np.uint8)
    for image, label in zip(inputs, labels, strict=True):
        image[2 * label : 2 * label + 6] += 150
    folder.mkdir(parents=True)
    np.savez(folder / "data.npz", inputs=inputs, labels=labels)
    return folder


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    root = tmp_path_factory.mktemp("split-shards")
    return [write_shard(root / f"device-{number + 1:02}", number) for number in range(NUM_DEVICES)]


def make_run(labels, rounds=ROUNDS, **split):
    return {
        "run": {"task": "mnist", "rounds": rounds, "evaluate_on": "none", "local_test_fraction": 0.0},
        "task": {"model": "cnn-small"},
        "strategy": {"epochs": 2, "batch_size": BATCH, "learning_rate": 0.02, "momentum": 0.5},
        "split": {"after": "pool2", "labels": labels, "up": "fp16", **split},
        "devices": {"require": NUM_DEVICES, "ready_s": 120},
        "simulation": {"workers": 0, "iteration_s": 0.01},
    }


@pytest.fixture
def fleet(tools, shards, tmp_path):
    devices = [LocalDeviceSpec(name=path.name, shards={"mnist": str(path)}) for path in shards]
    with tools.fleet(tmp_path / "fleet", devices) as running:
        yield running


@pytest.fixture
def expected(shards, tmp_path):
    """Returns the model of a run that nothing disturbs."""

    def simulate(config):
        result = edgefl.simulate(config, devices=shards, root=tmp_path / "simulated")
        return load_model_file(result.model)

    return simulate


def submit(fleet, config):
    return fleet.submit(parse_run(config))


def check_result(tools, fleet, run_id, expected_model, rounds=ROUNDS):
    used = tools.used(fleet, run_id)
    assert sorted((row["base_version"], row["device_id"]) for row in used) == [
        (version, f"device-{number + 1:02}") for version in range(rounds) for number in range(NUM_DEVICES)
    ]
    model = load_model_file(next((fleet.directory / "models").glob("*.safetensors")))
    for name, tensor in expected_model.items():
        np.testing.assert_allclose(model[name], tensor, atol=2e-3, err_msg=name)
    return used


def find_rest_process(fleet):
    """Returns the pid of the coordinator's process that trains the rest; None while there is none."""
    parent = fleet.processes["coordinator"].pid
    found = subprocess.run(
        ["pgrep", "-P", str(parent), "-f", "split.rest_process"], capture_output=True, text=True, check=False
    ).stdout.split()
    return int(found[0]) if found else None


@pytest.mark.parametrize("labels", ["coordinator", "device"])
def test_a_run_ends_with_the_model_of_the_simulated_one(tools, fleet, expected, labels):
    config = make_run(labels)
    run_id = submit(fleet, config)
    tools.eventually(lambda: tools.status(fleet, run_id) == "finished", 240, "the run to finish")
    used = check_result(tools, fleet, run_id, expected(config))
    batches = 2 * EXAMPLES * 32 * 7 * 7  # two epochs, at two and at four bytes
    assert all(2 * batches < row["bytes_up"] < 3 * batches for row in used)
    assert all(4 * batches < row["bytes_down"] < 5 * batches for row in used)
    maps = Path(f"/proc/{fleet.processes['coordinator'].pid}/maps")
    assert "libtorch" not in maps.read_text()
    assert find_rest_process(fleet) is None


def test_twenty_kills_lose_and_double_nothing(tools, fleet, expected):
    rounds = 24
    config = make_run("coordinator", rounds)
    run_id, rng = submit(fleet, config), np.random.default_rng(5)
    victims = ["coordinator", "rest", *[device.name for device in fleet.devices]]
    num_kills, coordinator_log = 0, fleet.root / "coordinator.log"
    # A board that is killed before is not in the first round.
    tools.eventually(lambda: f"{NUM_DEVICES} devices are ready" in coordinator_log.read_text(), 120, "all ready")
    while num_kills < NUM_KILLS and tools.status(fleet, run_id) in {"queued", "running"}:
        tools.pause(float(rng.uniform(0.2, 1.5)))
        victim = victims[num_kills % len(victims)]
        if victim == "rest":
            pid = find_rest_process(fleet)
            if pid is None:
                continue
            os.kill(pid, signal.SIGKILL)
        elif victim == "coordinator":
            fleet.kill("coordinator")
            fleet.start_coordinator()
        else:
            fleet.kill(victim)
            fleet.start_device(victim)
        num_kills += 1
    assert num_kills == NUM_KILLS, "the run ended too soon"
    tools.eventually(lambda: tools.status(fleet, run_id) == "finished", 400, "the run to finish")
    check_result(tools, fleet, run_id, expected(config), rounds)

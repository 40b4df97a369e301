"""`edgefl.run`: a whole run as one call."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

import edgefl
from edgefl.core.errors import ConfigError, DataError, TaskError
from edgefl.simulation.local_fleet import default_scheme, partition_devices
from edgefl.storage.checkpoints import load_model_file

CONFIG = {"run": {"task": "digits", "rounds": 3, "seed": 7}, "devices": {"min": 2}}


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    return edgefl.run(CONFIG, devices=2, scheme="dirichlet:0.5", root=tmp_path_factory.mktemp("api"))


def test_it_returns_how_the_run_went_and_what_happened(result):
    assert (result.status, result.reason) == ("finished", "rounds reached 3")
    assert (result.metrics["accuracy"] > 0.7, result.metrics["loss"] < 1.2, result.metrics["seconds"] > 0) == (
        True,
    ) * 3
    assert result.metrics["bytes_up"] == sum(row["bytes_up"] for row in result.updates)
    assert [row["round"] for row in result.rounds] == [1, 2, 3]
    assert [row["outcome"] for row in result.updates] == ["used"] * 3 * 2
    assert [row["version"] for row in result.evaluations] == [1, 2, 3]
    assert result.evaluations[-1]["accuracy"] == result.metrics["accuracy"]
    assert list(load_model_file(result.model)) == ["fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"]
    with pytest.raises(dataclasses.FrozenInstanceError):
        result.status = "other"


def test_a_virtual_fleet_gives_the_very_same_model(result, tmp_path):
    virtual = edgefl.simulate(CONFIG, devices=2, scheme="dirichlet:0.5", root=tmp_path)
    assert virtual.model.read_bytes() == result.model.read_bytes()
    assert [row["accuracy"] for row in virtual.rounds] == [row["accuracy"] for row in result.rounds]


@pytest.mark.slow
def test_it_takes_a_run_file_and_shards_that_there_are(result, tmp_path):
    devices, _ = partition_devices("digits", "iid", 2, tmp_path / "shards", None, 7)
    file = tmp_path / "run.toml"
    file.write_text('[run]\ntask = "digits"\nrounds = 1\ninit = "start.safetensors"\n[devices]\nmin = 2\n')
    (tmp_path / "start.safetensors").write_bytes(result.model.read_bytes())
    found = edgefl.run(file, devices=[d.shards["digits"] for d in devices], root=tmp_path / "fleet")
    assert len(found.updates) == 2
    assert {row["source"] for row in found.evaluations} == {"device"}
    assert found.metrics["accuracy"] > 0.7, "it went on from a trained model"


def test_what_makes_no_sense_is_told_before_anything_starts(tmp_path, monkeypatch):
    root = tmp_path / "fleet"
    with pytest.raises(ConfigError, match="at least 5 devices, got 2"):
        edgefl.run({"run": {"task": "digits"}, "devices": {"min": 5}}, devices=2, root=root)
    with pytest.raises(ConfigError, match=r"run\.round"):
        edgefl.run({"run": {"task": "digits", "round": 3}}, root=root)
    with pytest.raises(TaskError, match="digitz"):
        edgefl.run({"run": {"task": "digitz"}}, root=root)
    monkeypatch.delenv("EDGEFL_DATA", raising=False)
    with pytest.raises(DataError, match="--data"):
        partition_devices("mnist", "iid", 3, root, None, 7)
    assert not root.exists()


def test_cutting_names_the_devices_after_their_shards_and_keeps_a_test_shard(tmp_path):
    devices, test_shards = partition_devices("digits", "iid", 3, tmp_path, None, 7)
    assert [device.name for device in devices] == ["device-01", "device-02", "device-03"]
    assert all(Path(device.shards["digits"]).exists() for device in devices)
    assert Path(test_shards["digits"]).exists()
    schemes = {"motionsense": "natural", "digits": "dirichlet:0.5", "fashion-mnist": "iid"}
    assert {task: default_scheme(task) for task in schemes} == schemes


def test_importing_edgefl_costs_nothing():
    program = "import sys, edgefl; sys.exit(len([name for name in sys.modules if name.startswith('edgefl.')]))"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0

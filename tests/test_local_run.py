"""`edgefl.run`: a whole run as one call."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import edgefl
from edgefl.errors import ConfigError, DataError, TaskError
from edgefl.local_run import cut_devices, default_scheme
from edgefl.storage.checkpoints import load_model_file


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    config = {"run": {"task": "digits", "rounds": 4, "seed": 7}, "devices": {"min": 2}}
    return edgefl.run(config, devices=2, scheme="iid", root=tmp_path_factory.mktemp("api"))


def test_it_returns_how_the_run_went(result):
    assert (result.status, result.reason) == ("finished", "rounds reached 4")
    assert result.metrics["accuracy"] > 0.8
    assert result.metrics["loss"] < 1.0
    assert result.metrics["seconds"] > 0
    assert result.metrics["bytes_up"] == sum(row["bytes_up"] for row in result.updates)


def test_it_returns_the_history(result):
    assert [row["round"] for row in result.rounds] == [1, 2, 3, 4]
    assert len(result.updates) == 4 * 2
    assert {row["outcome"] for row in result.updates} == {"used"}
    assert [row["version"] for row in result.evaluations] == [1, 2, 3, 4]
    assert result.evaluations[-1]["accuracy"] == result.metrics["accuracy"]


def test_it_returns_the_model(result):
    model = load_model_file(result.model)
    assert list(model) == ["fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"]
    assert all(np.isfinite(tensor).all() for tensor in model.values())


def test_what_it_returns_cannot_be_changed(result):
    with pytest.raises(dataclasses.FrozenInstanceError):
        result.status = "other"


@pytest.mark.slow
def test_it_takes_a_run_file_and_shards_that_there_are(result, tmp_path):
    cut = cut_devices("digits", "iid", 2, tmp_path / "shards", None, 7)
    file = tmp_path / "run.toml"
    file.write_text('[run]\ntask = "digits"\nrounds = 1\ninit = "start.safetensors"\n[devices]\nmin = 2\n')
    (tmp_path / "start.safetensors").write_bytes(result.model.read_bytes())
    found = edgefl.run(file, devices=[d.shards["digits"] for d in cut.devices], root=tmp_path / "fleet")
    assert len(found.updates) == 2
    assert {row["source"] for row in found.evaluations} == {"device"}
    assert found.metrics["accuracy"] > 0.8, "it went on from a trained model"


def test_what_makes_no_sense_is_told_before_anything_starts(tmp_path):
    root = tmp_path / "fleet"
    with pytest.raises(ConfigError, match="at least 5 devices, got 2"):
        edgefl.run({"run": {"task": "digits"}, "devices": {"min": 5}}, devices=2, root=root)
    with pytest.raises(ConfigError, match=r"run\.round"):
        edgefl.run({"run": {"task": "digits", "round": 3}}, root=root)
    with pytest.raises(TaskError, match="digitz"):
        edgefl.run({"run": {"task": "digitz"}}, root=root)
    assert not root.exists()


def test_people_s_data_is_cut_by_person():
    assert default_scheme("motionsense") == "natural"
    assert default_scheme("digits") == "dirichlet:0.5"
    assert default_scheme("fashion-mnist") == "iid"


def test_cutting_names_the_devices_after_their_shards_and_keeps_a_test_shard(tmp_path):
    cut = cut_devices("digits", "iid", 3, tmp_path, None, 7)
    assert [device.name for device in cut.devices] == ["device-01", "device-02", "device-03"]
    assert all(Path(device.shards["digits"]).exists() for device in cut.devices)
    assert Path(cut.test_shards["digits"]).exists()


def test_cutting_needs_data(tmp_path, monkeypatch):
    monkeypatch.delenv("EDGEFL_DATA", raising=False)
    with pytest.raises(DataError, match="--data"):
        cut_devices("mnist", "iid", 3, tmp_path, None, 7)


def test_importing_edgefl_costs_nothing():
    program = "import sys, edgefl; sys.exit(len([name for name in sys.modules if name.startswith('edgefl.')]))"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0

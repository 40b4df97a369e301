"""Data of a task of one's own is cut like a built-in data set, in files and in memory."""

import json
from itertools import pairwise

import numpy as np
import pytest

from edgefl.core.errors import ConfigError, DataError, TaskError
from edgefl.core.extensions import allow_modules
from edgefl.core.types import Dataset
from edgefl.simulation.backends.partitioned_data import partition_in_memory
from edgefl.tasks.datasets.central import create_shards, load_central_data, read_test_data
from edgefl.tasks.datasets.partitioning import compute_strata
from edgefl.tasks.datasets.shards import check_shard, compute_file_sha256, load_task_data
from edgefl.tasks.registry import make_task

NAME = "orchard:Orchard"
MODULE = """
import numpy as np
from edgefl.core.types import Dataset, Task
from edgefl.tasks.learners.numpy_learner import DenseModel


class Orchard(Task):
    name = "orchard:Orchard"
    loss = "mse"
    model = DenseModel(sizes=(2, 1))

    def read(self, path):
        rows = np.loadtxt(path, delimiter=",", ndmin=2)
        return Dataset(inputs=rows[:, :2], targets=rows[:, 2], weights=rows[:, 3], groups=rows[:, 4].astype(int))
"""


@pytest.fixture
def orchard(tmp_path, monkeypatch):
    (tmp_path / "orchard.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    rows = np.random.default_rng(0).normal(size=(400, 5))
    rows[:, 3], rows[:, 4] = np.abs(rows[:, 3]), np.arange(400) % 8
    np.savetxt(tmp_path / "trees.csv", rows, "%.4f", delimiter=",")
    with allow_modules(["orchard"]):
        yield tmp_path / "trees.csv"


def test_shards_of_own_data_are_read_back_without_the_tasks_reader(orchard, tmp_path):
    paths = create_shards(NAME, "iid", 4, tmp_path / "shards", orchard)
    task = make_task(NAME)
    parts = [load_task_data(task, path) for path in paths]
    train = load_central_data(NAME, orchard).train
    assert sum(map(len, parts)) == len(train) == pytest.approx(320, abs=25)
    pooled = Dataset.concatenate(parts)
    assert sorted(pooled.targets) == sorted(train.targets)
    assert sorted(pooled.weights) == sorted(train.weights)
    assert check_shard(task, str(paths[0])).target_range == (parts[0].targets.min(), parts[0].targets.max())


def test_a_file_of_the_users_own_beside_the_data_is_no_card(orchard):
    orchard.with_suffix(".json").write_text("{}")
    assert len(load_task_data(make_task(NAME), orchard)) == 400


def test_schemes_by_class_go_by_tenths_of_the_target(orchard, tmp_path):
    paths = create_shards(NAME, "by-class", 10, tmp_path / "shards", orchard)
    targets = [load_task_data(make_task(NAME), path).targets for path in paths]
    assert all(below.max() <= above.min() for below, above in pairwise(targets))


def test_the_shards_in_memory_are_those_in_files(orchard, tmp_path):
    paths = create_shards(NAME, "dirichlet:0.5", 3, tmp_path / "shards", orchard, seed=3)
    fleet = partition_in_memory(NAME, "dirichlet:0.5", 3, data=orchard, seed=3, test_fraction=0.1)
    for path, shard in zip(paths, fleet.shards, strict=True):
        data = load_task_data(make_task(NAME), path)
        np.testing.assert_array_equal(fleet.pool.take(shard.rows).targets, data.targets)
        np.testing.assert_array_equal(fleet.pool.take(shard.rows).weights, data.weights)


def test_given_test_data_must_be_of_the_shapes_that_are_trained_on(orchard, monkeypatch):
    data = load_task_data(make_task(NAME), orchard)
    central = load_central_data(NAME, orchard, test=orchard)
    assert (len(central.train), len(central.test)) == (400, 400)
    for other, message in (
        (Dataset(inputs=data.inputs[:, :1], targets=data.targets), r"inputs of .* are \[1\] each, .* are \[2\]"),
        (Dataset(inputs=data.inputs, targets=data.inputs), r"targets of .* are \[2\] each, .* are \[\]"),
        (data.take(slice(0)), "holds no examples"),
    ):
        monkeypatch.setattr("edgefl.tasks.datasets.central.read_own_data", lambda *_, other=other: other)
        with pytest.raises(DataError, match=message):
            read_test_data(make_task(NAME), orchard, data)


def test_natural_shards_are_the_groups_that_the_reader_names(orchard, tmp_path):
    fleet = partition_in_memory(NAME, "natural", 4, data=orchard, seed=3, test_fraction=0.1)
    held = [set(fleet.pool.take(shard.rows).groups) for shard in fleet.shards]
    assert sorted(len(groups) for groups in held) == [2, 2, 2, 2]
    assert set.union(*held) == set(range(8))


def test_a_cut_shard_whose_arrays_are_no_rows_is_one_clear_line(orchard, tmp_path):
    path = create_shards(NAME, "iid", 2, tmp_path / "shards", orchard)[0]
    for labels, message in (
        (np.array(1.0), "labels of shard .* must be numbers"),
        (np.zeros(2), "2 targets and 3 in"),
    ):
        np.savez(path, inputs=np.zeros((3, 2)), labels=labels)
        card = json.loads(path.with_suffix(".json").read_text())
        path.with_suffix(".json").write_text(json.dumps({**card, "sha256": compute_file_sha256(path)}))
        with pytest.raises(DataError, match=message):
            load_task_data(make_task(NAME), path)


def test_own_data_without_a_path_or_with_damage_is_one_clear_line(orchard, tmp_path):
    with pytest.raises(TaskError, match=r"name the path that your task reads \(--data PATH\)"):
        create_shards(NAME, "iid", 2, tmp_path / "shards")
    with pytest.raises(ConfigError, match="devices must be 1 to"):
        create_shards(NAME, "iid", 1000, tmp_path / "shards", orchard)
    with pytest.raises(DataError, match=r"task orchard:Orchard cannot read shard .*: ValueError: .*-vv shows where"):
        create_shards(NAME, "iid", 2, tmp_path / "shards", tmp_path / "orchard.py")
    path = create_shards(NAME, "iid", 2, tmp_path / "shards", orchard)[0]
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(DataError, match="is damaged: its SHA-256"):
        load_task_data(make_task(NAME), path)


def test_strata_hold_equally_many_and_keep_the_order():
    values = np.random.default_rng(1).exponential(size=1000)
    strata = compute_strata(values)
    assert np.bincount(strata).tolist() == [100] * 10
    assert (np.diff(strata[np.argsort(values)]) >= 0).all()

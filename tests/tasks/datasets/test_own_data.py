"""Data of a task of one's own is cut like a built-in data set, in files and in memory."""

import json
from itertools import pairwise

import numpy as np
import pytest

import edgefl
from edgefl.core.errors import ConfigError, DataError, TaskError
from edgefl.core.extensions import allow_modules
from edgefl.core.named_arrays import NamedArrays
from edgefl.core.types import Dataset
from edgefl.device.training.task_cache import TaskCache
from edgefl.simulation.backends.partitioned_data import load_data, partition_in_memory, read_shards, save_data
from edgefl.tasks.datasets.central import create_shards, load_central_data, read_test_data
from edgefl.tasks.datasets.partitioning import compute_strata
from edgefl.tasks.datasets.shards import (
    check_shard,
    compute_file_sha256,
    compute_sample_hashes,
    load_task_data,
    split_train_test,
)
from edgefl.tasks.registry import make_task

NAME, GARDEN = "orchard:Orchard", "orchard:Garden"
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


class Garden(Orchard):
    name = "orchard:Garden"
    model = DenseModel(sizes=(2, 1), prepare=lambda inputs: np.stack([inputs["light"], inputs["water"]], axis=1))

    def read(self, path):
        data = super().read(path)
        named = {"water": data.inputs[:, 0], "light": data.inputs[:, 1].astype("f4")}
        return Dataset(inputs=named, targets=data.targets, weights=data.weights, groups=data.groups)


class Other(Garden):
    name = "orchard:Garden"
    model = DenseModel(sizes=(2, 1), prepare=lambda inputs: np.stack([inputs["light"], inputs["shade"]], axis=1))


class Bare(Garden):
    name = "orchard:Garden"
    model = DenseModel(sizes=(2, 1))
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


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        ({"a": np.zeros(3)}, r"targets of .* are a \[\] each, those .* are a \[\], b \[2\]"),
        ({"a": np.zeros(3), "b": np.zeros((3, 4))}, r"targets of .* are a \[\], b \[4\] each, those .* b \[2\]"),
    ],
)
def test_given_test_data_must_have_the_targets_by_name_that_are_trained_on(tmp_path, monkeypatch, targets, message):
    train, test = (
        Dataset(inputs=np.zeros((3, 2)), targets=one) for one in ({"a": np.zeros(3), "b": np.zeros((3, 2))}, targets)
    )
    monkeypatch.setattr("edgefl.tasks.datasets.central.read_own_data", lambda *_: test)
    with pytest.raises(DataError, match=message):
        read_test_data(make_task("digits"), tmp_path, train)


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


@pytest.mark.parametrize("scheme", ["iid", "dirichlet:0.5", "by-class", "natural"])
def test_inputs_by_name_are_cut_and_split_as_one_array_is(orchard, tmp_path, scheme):
    paths = create_shards(GARDEN, scheme, 3, tmp_path / "shards", orchard)
    in_memory = partition_in_memory(GARDEN, scheme, 3, data=orchard, seed=7, test_fraction=0.1)
    save_data(tmp_path, in_memory)
    there = load_data(tmp_path)
    for path, shard in zip(paths, there.shards, strict=True):
        whole = load_task_data(make_task(GARDEN), path)
        for rows, data in zip((shard.train, shard.test), split_train_test(whole, 0.1), strict=True):
            assert there.pool.take(rows).inputs.keys() == data.inputs.keys() == ["light", "water"]
            for name in data.inputs:
                np.testing.assert_array_equal(there.pool.take(rows).inputs[name], data.inputs[name])
            np.testing.assert_array_equal(there.pool.take(rows).targets, data.targets)
    other = Dataset(inputs={"water": np.zeros(3)}, targets=np.zeros(3))
    task = make_task(GARDEN)
    task.read = lambda path: other
    with pytest.raises(
        DataError,
        match=r"inputs of test data .* are water float \[\] each, .* are light float \[\], water float \[\]",
    ):
        read_test_data(task, orchard, in_memory.pool)


def test_the_order_of_names_moves_no_example_and_each_array_counts():
    a, b = np.arange(40.0), np.arange(40.0)[::-1]
    hashes = compute_sample_hashes(NamedArrays({"a": a, "b": b}))
    np.testing.assert_array_equal(hashes, compute_sample_hashes(NamedArrays({"b": b, "a": a})))
    assert len({*hashes, *compute_sample_hashes(NamedArrays({"a": a, "b": a}))}) == 80


@pytest.mark.parametrize("workers", [0, 1])
def test_a_model_in_numpy_trains_on_inputs_that_its_prepare_joins(orchard, tmp_path, workers):
    settings = {"run": {"task": GARDEN, "rounds": 2}, "simulation": {"devices": 2, "workers": workers}}
    result = edgefl.simulate(settings, data=str(orchard), root=tmp_path, allow_modules=["orchard"])
    first, second = (row["loss"] for row in result.rounds)
    assert second < first


def test_inputs_by_name_of_another_type_are_refused_beside_those_of_other_boards(orchard):
    task = make_task(GARDEN)
    task.read = lambda path: Dataset(inputs={"light": np.ones(3, path), "water": np.zeros(3)}, targets=np.zeros(3))
    assert len(read_shards(task, ["f8", "f4"], test_fraction=0.1).pool) == 6
    kinds = r"light float \[\], water float \[\]; light int \[\], water float \[\]"
    with pytest.raises(DataError, match=f"different shapes or types: {kinds}"):
        read_shards(task, ["f4", "i4"], test_fraction=0.1)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Other", "prepare of the task raised KeyError: 'shade' at inputs named light, water"),
        ("Bare", r"inputs are arrays by name \(light, water\), and a model in NumPy takes one"),
    ],
)
def test_names_that_a_model_does_not_take_are_refused_before_the_first_round(orchard, tmp_path, name, message):
    (path,) = create_shards(GARDEN, "iid", 1, tmp_path / "shards", orchard)
    cache = TaskCache(lambda: {f"orchard:{name}": str(path)}, accelerator="cpu", threads=1)
    with pytest.raises(TaskError, match=message):
        cache.load_data(cache.get(f"orchard:{name}", {}))
    settings = {"run": {"task": f"orchard:{name}", "rounds": 2}, "simulation": {"devices": 2}}
    with pytest.raises(TaskError, match=message):
        edgefl.simulate(settings, data=str(orchard), root=tmp_path, allow_modules=["orchard"])

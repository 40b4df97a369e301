"""The shards of the demos, and that plain federated averaging on them reaches what it should."""

import os
import time
from pathlib import Path

import numpy as np
import pytest

from edgefl.errors import DataError, TaskError
from edgefl.tasks.cards import read_card
from edgefl.tasks.cutting import cut_shards
from edgefl.tasks.local_training import train
from edgefl.tasks.registry import make_task
from edgefl.tasks.sources import central_data
from edgefl.types import LocalPlan, derived_rng


def real_data(task):
    root = os.environ.get("EDGEFL_DATA")
    if not root or not (Path(root) / task).is_dir():
        pytest.skip(f"EDGEFL_DATA names no folder with {task}")
    return Path(root) / task


def federated_average(task, shards, test, *, rounds):
    """Returns the accuracy after each round of plain federated averaging with the task's own defaults."""
    model, learner, plan = task.init(7), task.learner(threads=1), LocalPlan(**task.defaults)
    total, accuracies = sum(map(len, shards)), []
    for version in range(rounds):
        mean = {name: np.zeros_like(value) for name, value in model.items()}
        for device, data in enumerate(shards):
            learner.load(model)
            rng = derived_rng(7, "test", version, device)
            result = train(learner, data, plan, rng, clock=time.monotonic, on_iteration=lambda *_: False)
            for name, moved in result.displacement.items():
                mean[name] += moved * np.float32(len(data) / total)
        model = {name: value + mean[name] for name, value in model.items()}
        learner.load(model)
        accuracies.append(learner.evaluate(test)[1])
    return accuracies


def cut_and_train(name, options, scheme, devices, out, *, rounds, data=None):
    paths = cut_shards(name, scheme, devices, out, data)
    task = make_task(name, options)
    shards = [task.read(str(path)) for path in paths]
    return federated_average(task, shards, task.read(str(out / "test.npz")), rounds=rounds)


def test_digits_reach_93_percent_on_skewed_shards_within_the_demo(tmp_path):
    accuracies = cut_and_train("digits", {}, "dirichlet:0.5", 4, tmp_path, rounds=20)
    assert accuracies[9] >= 0.93
    assert accuracies[19] >= 0.945


def test_digits_logistic_learns_too(tmp_path):
    assert cut_and_train("digits", {"model": "logistic"}, "iid", 4, tmp_path, rounds=5)[-1] >= 0.93


@pytest.mark.parametrize("model", ["logistic", pytest.param("mlp", marks=pytest.mark.slow)])
def test_motionsense_in_numpy_reaches_92_percent_on_held_out_trials(tmp_path, model):
    data = real_data("motionsense")
    accuracies = cut_and_train("motionsense", {"model": model}, "natural", 6, tmp_path, rounds=5, data=data)
    assert accuracies[-1] >= 0.92


@pytest.mark.slow
def test_motionsense_cnn_reaches_88_percent_in_two_rounds(tmp_path):
    pytest.importorskip("torch", reason="the train extra is not installed")
    data = real_data("motionsense")
    assert cut_and_train("motionsense", {}, "natural", 6, tmp_path, rounds=2, data=data)[-1] >= 0.88


def test_fashion_logistic_reaches_78_percent_in_three_rounds(tmp_path):
    data = real_data("fashion-mnist")
    accuracies = cut_and_train("fashion-mnist", {"model": "logistic"}, "iid", 4, tmp_path, rounds=3, data=data)
    assert accuracies[-1] >= 0.78


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("name", "scheme", "devices", "rounds", "least"),
    [("fashion-mnist", "iid", 4, 10, 0.85), ("motionsense", "natural", 6, 10, 0.92), ("mnist", "iid", 4, 2, 0.97)],
)
def test_the_default_networks_reach_the_published_goals(tmp_path, name, scheme, devices, rounds, least):
    pytest.importorskip("torch", reason="the train extra is not installed")
    data = real_data(name)
    assert cut_and_train(name, {}, scheme, devices, tmp_path, rounds=rounds, data=data)[-1] >= least


def test_shards_and_test_part_together_are_the_whole_data_set(tmp_path):
    paths = cut_shards("digits", "dirichlet:0.5", 4, tmp_path, seed=7)
    assert [path.name for path in paths] == [f"device-0{i}.npz" for i in (1, 2, 3, 4)]
    task = make_task("digits", {})
    parts = [task.read(str(path)).inputs for path in [*paths, tmp_path / "test.npz"]]
    everything = np.concatenate(parts).reshape(-1, 64)
    assert len(everything) == 1797
    assert 280 < len(parts[-1]) < 440
    trained = {row.tobytes() for part in parts[:-1] for row in part}
    assert not trained & {row.tobytes() for row in parts[-1]}


def test_the_same_seed_writes_the_same_shards(tmp_path):
    first = cut_shards("digits", "dirichlet:0.5", 4, tmp_path / "a", seed=7)
    again = cut_shards("digits", "dirichlet:0.5", 4, tmp_path / "b", seed=7)
    other = cut_shards("digits", "dirichlet:0.5", 4, tmp_path / "c", seed=8)
    task = make_task("digits", {})
    rows = [[task.read(str(path)).inputs.tobytes() for path in paths] for paths in (first, again, other)]
    assert rows[0] == rows[1] != rows[2]


def test_a_redundant_card_names_the_rows_of_each_block(tmp_path):
    paths = cut_shards("digits", "redundant:2", 3, tmp_path)
    cards = [read_card(path) for path in paths]
    task = make_task("digits", {})
    blocks = {}
    for path, card in zip(paths, cards, strict=True):
        data = task.read(str(path))
        for block, (start, stop) in card.blocks.items():
            blocks.setdefault(block, []).append(data.inputs[start:stop].tobytes())
    assert sorted(blocks) == [0, 1, 2]
    assert all(len(copies) == 2 and copies[0] == copies[1] for copies in blocks.values())


def test_a_natural_card_names_the_people(tmp_path):
    paths = cut_shards("motionsense", "natural", 6, tmp_path, real_data("motionsense"))
    people = [person for path in paths for person in read_card(path).groups]
    assert sorted(map(int, people)) == list(range(1, 25))
    sizes = [read_card(path).num_examples for path in paths]
    assert max(sizes) < 1.1 * min(sizes)


def test_a_task_without_central_data_is_one_clear_line(tmp_path):
    with pytest.raises(TaskError, match="'own:Task' has no data set to cut; cut one of digits, mnist"):
        cut_shards("own:Task", "iid", 2, tmp_path)


def test_a_data_set_that_nobody_named_is_one_clear_line(monkeypatch, tmp_path):
    monkeypatch.delenv("EDGEFL_DATA", raising=False)
    with pytest.raises(DataError, match="task mnist needs data: name the folder with --data DIR"):
        central_data("mnist")
    monkeypatch.setenv("EDGEFL_DATA", str(tmp_path))
    with pytest.raises(DataError, match=r"data folder .*/mnist of task mnist does not exist"):
        central_data("mnist")

"""The shards of the demos, and that plain federated averaging on them reaches what it should."""

import time

import numpy as np
import pytest
from requirements import real_data_at

from edgefl.core.errors import DataError, TaskError
from edgefl.core.types import TrainConfig, derive_rng
from edgefl.tasks.datasets.central import create_shards, load_central_data
from edgefl.tasks.datasets.shards import read_metadata
from edgefl.tasks.local_algorithms.local_training import train
from edgefl.tasks.registry import make_task


def real_data(task):
    if task == "digits":
        return None
    return real_data_at(task)


def federated_average(task, shards, test, *, rounds):
    """Returns the accuracy after each round of plain federated averaging with the task's own defaults."""
    model, learner, plan = task.init(7), task.learner(threads=1), TrainConfig(**({"epochs": 1} | task.defaults))
    total, accuracies = sum(map(len, shards)), []
    for version in range(rounds):
        mean = {name: np.zeros_like(value) for name, value in model.items()}
        for device, data in enumerate(shards):
            learner.load(model)
            rng = derive_rng(7, "test", version, device)
            result = train(learner, data, plan, rng, clock=time.monotonic, on_iteration=lambda *_: False)
            for name, moved in result.displacement.items():
                mean[name] += moved * np.float32(len(data) / total)
        model = {name: value + mean[name] for name, value in model.items()}
        learner.load(model)
        accuracies.append(learner.evaluate(test)[1])
    return accuracies


def case(name, model, scheme, devices, rounds, least, *marks):
    return pytest.param(name, model, scheme, devices, rounds, least, marks=marks, id=f"{name}-{model}")


SLOW = (pytest.mark.slow, pytest.mark.timeout(900))


@pytest.mark.parametrize(
    ("name", "model", "scheme", "devices", "rounds", "least"),
    [
        case("digits", None, "dirichlet:0.5", 4, 10, 0.93),
        case("digits", "logistic", "iid", 4, 5, 0.93),
        case("mnist", "mlp-tanh", "iid", 4, 4, 0.9, pytest.mark.extended),
        case("motionsense", "logistic", "natural", 6, 5, 0.92, pytest.mark.extended),
        case("fashion-mnist", "logistic", "iid", 4, 3, 0.78, pytest.mark.extended),
        case("motionsense", "mlp", "natural", 6, 5, 0.92, *SLOW),
        case("fashion-mnist", None, "iid", 4, 10, 0.85, *SLOW),
        case("motionsense", None, "natural", 6, 10, 0.92, *SLOW),
        case("mnist", None, "iid", 4, 2, 0.97, *SLOW),
        case("cifar-10", None, "iid", 4, 5, 0.5, *SLOW),
    ],
)
def test_federated_averaging_reaches_the_published_goal(  # noqa: PLR0917 pytest passes them by name
    tmp_path, name, model, scheme, devices, rounds, least
):
    if name != "digits" and model is None:
        pytest.importorskip("torch", reason="needs torch: pip install '.[train]'")
    paths = create_shards(name, scheme, devices, tmp_path, real_data(name))
    task = make_task(name, {"model": model} if model else {})
    shards = [task.read(str(path)) for path in paths]
    assert federated_average(task, shards, task.read(str(tmp_path / "test.npz")), rounds=rounds)[-1] >= least


def test_shards_and_test_part_together_are_the_whole_data_set_and_the_seed_s_alone(tmp_path):
    task, cuts = make_task("digits", {}), []
    for folder, seed in (("a", 7), ("b", 7), ("c", 8)):
        paths = create_shards("digits", "dirichlet:0.5", 4, tmp_path / folder, seed=seed)
        assert [path.name for path in paths] == [f"device-0{i}.npz" for i in (1, 2, 3, 4)]
        cuts.append([task.read(str(path)).inputs for path in [*paths, tmp_path / folder / "test.npz"]])
    rows = [[row.tobytes() for part in cut for row in part] for cut in cuts]
    assert rows[0] == rows[1] != rows[2]
    *trained, test = cuts[0]
    assert sum(map(len, cuts[0])) == 1797
    assert 280 < len(test) < 440
    assert not {row.tobytes() for part in trained for row in part} & {row.tobytes() for row in test}


def test_a_redundant_card_names_the_rows_of_each_block(tmp_path):
    task, blocks = make_task("digits", {}), {}
    for path in create_shards("digits", "redundant:2", 3, tmp_path):
        data = task.read(str(path))
        for block, (start, stop) in read_metadata(path).blocks.items():
            blocks.setdefault(block, []).append(data.inputs[start:stop].tobytes())
    assert sorted(blocks) == [0, 1, 2]
    assert all(len(copies) == 2 and copies[0] == copies[1] for copies in blocks.values())


@pytest.mark.extended
def test_a_natural_card_names_the_people(tmp_path):
    cards = [
        read_metadata(path) for path in create_shards("motionsense", "natural", 6, tmp_path, real_data("motionsense"))
    ]
    assert sorted(int(person) for card in cards for person in card.groups) == list(range(1, 25))
    sizes = [card.num_examples for card in cards]
    assert max(sizes) < 1.1 * min(sizes)


def test_data_that_is_not_there_or_that_nobody_named_is_one_clear_line(monkeypatch, tmp_path):
    with pytest.raises(TaskError, match="'own:Task' has no data set to cut; cut one of digits, mnist"):
        create_shards("own:Task", "iid", 2, tmp_path)
    monkeypatch.delenv("EDGEFL_DATA", raising=False)
    with pytest.raises(DataError, match="task mnist needs data: name the folder with --data DIR"):
        load_central_data("mnist")
    monkeypatch.setenv("EDGEFL_DATA", str(tmp_path))
    with pytest.raises(DataError, match=r"data folder .*/mnist of task mnist does not exist"):
        load_central_data("mnist")

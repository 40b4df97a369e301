"""Training by a compiled task is training with torch: every local algorithm, on a network of convolutions."""

import importlib.util
from functools import partial

import numpy as np
import pytest

from edgefl.core.config import AdaptSection
from edgefl.core.errors import TaskError
from edgefl.core.types import Algorithm, Dataset, Task, TrainConfig, derive_rng
from edgefl.tasks.adaptation.adapted_task import AdaptedTask
from edgefl.tasks.adaptation.parts import select_parts
from edgefl.tasks.local_algorithms.local_training import train
from edgefl.tasks.local_algorithms.registry import BUILT_IN

MISSING = [name for name in ("torch", "onnx", "onnxscript") if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.extended,
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(MISSING), reason="needs torch and onnx: pip install '.[train,export]'"),
]
BATCH_SIZE = 8


class SmallCnn(Task):
    """Two convolutions, one of them normalised, and a linear layer."""

    name = "small"

    def __init__(self, norm="BatchNorm2d"):
        from edgefl.tasks.learners.torch_learner import TorchModel  # noqa: PLC0415 only where torch is

        self.model = TorchModel(build=partial(build_network, norm))

    input_shape = (1, 8, 8)
    labels = ("a", "b", "c")

    def read(self, path):
        raise AssertionError(path)


def build_network(norm):
    # No bias before a normalisation: its gradient is rounding alone, which adam makes a step of.
    from torch import nn  # noqa: PLC0415 only where torch is

    middle = nn.BatchNorm2d(4) if norm == "BatchNorm2d" else nn.GroupNorm(2, 4)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1, bias=False), middle, nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 6, 3, padding=1),
        nn.ReLU(), nn.Flatten(), nn.Linear(96, 3),
    )  # fmt: skip


def make_both(norm, constant=()):
    """Returns the task with torch, and by its compiled form."""
    from edgefl.tasks.compiled.board.graph_check import check_compiled_task  # noqa: PLC0415 likewise
    from edgefl.tasks.compiled.board.graph_task import GraphTask  # noqa: PLC0415 likewise
    from edgefl.tasks.compiler.compilation import compile_task  # noqa: PLC0415 likewise

    task = SmallCnn(norm)
    compiled, _ = compile_task(task, name="small", batch_size=BATCH_SIZE, constant=constant)
    check_compiled_task(compiled)
    return task, GraphTask(task, compiled)


@pytest.fixture(scope="module")
def tasks():
    return make_both("BatchNorm2d")


@pytest.fixture(scope="module")
def tasks_without_statistics():
    return make_both("GroupNorm")


def make_examples(count=48, weights=None):
    rng = np.random.default_rng(2)
    inputs, targets = rng.standard_normal((count, 1, 8, 8)).astype(np.float32), rng.integers(0, 3, count)
    inputs += targets[:, None, None, None] * np.linspace(-1, 1, 8, dtype=np.float32)
    return Dataset(inputs=inputs, targets=targets, weights=weights)


def train_both(tasks, plan, data, **options):
    results = []
    for task in tasks:
        learner = task.learner(threads=1)
        learner.load(task.init(3))
        result = train(
            learner, data, plan, derive_rng(5), clock=lambda: 0.0, on_iteration=lambda *_: False, **options
        )
        results.append((result, learner))
    return results


def assert_equal(results):
    (theirs, torch_learner), (ours, learner) = results
    assert ours.loss == pytest.approx(theirs.loss, rel=1e-4)
    assert list(ours.displacement) == list(theirs.displacement)
    for name, moved in theirs.displacement.items():
        scale = max(1e-3, float(np.abs(moved).max()))
        np.testing.assert_allclose(ours.displacement[name], moved, atol=2e-3 * scale, err_msg=name)
    data = make_examples(11)
    np.testing.assert_allclose(learner.evaluate(data)[0], torch_learner.evaluate(data)[0], rtol=1e-3)


PLANS = {
    # Those of private examples are refused: a compiled task has no gradients by example.
    **{str(name): {"algorithm": name} for name in BUILT_IN if name != Algorithm.DP_SGD},
    "momentum": {"momentum": 0.9, "weight_decay": 0.01},
    "personal": {"personal_lambda": 0.1},
}


@pytest.mark.parametrize("name", PLANS)
def test_every_local_algorithm_moves_the_model_as_with_torch(tasks, name):
    plan = TrainConfig(**PLANS[name], batch_size=BATCH_SIZE, iterations=6, learning_rate=0.01)
    assert_equal(train_both(tasks, plan, make_examples()))


def test_weights_of_examples_count_as_with_torch(tasks):
    plan = TrainConfig(batch_size=BATCH_SIZE, iterations=6, learning_rate=0.01)
    assert_equal(train_both(tasks, plan, make_examples(weights=np.linspace(0, 2, 48))))


PARTS = {
    "head": AdaptSection(method="head", shared=("4.*",)),
    "lora": AdaptSection(method="lora", targets=("7.weight",), rank=2),
    "local": AdaptSection(local=("7.*",)),
}


@pytest.mark.parametrize("name", PARTS)
def test_a_part_is_trained_as_with_torch(tasks_without_statistics, name):
    base = tasks_without_statistics[0].init(3)
    adapted = [AdaptedTask(task, PARTS[name], base) for task in tasks_without_statistics]
    plan = TrainConfig(batch_size=BATCH_SIZE, iterations=4, learning_rate=0.01)
    assert_equal(train_both(adapted, plan, make_examples()))


FROZEN = {
    "head": AdaptSection(method="head"),
    "lora": AdaptSection(method="lora", targets=("4.weight",), rank=2),
    "statistics": AdaptSection(frozen=("1.running*", "1.num*")),
}


@pytest.mark.parametrize("name", FROZEN)
def test_frozen_statistics_stay_and_their_layers_work_as_in_an_evaluation_as_with_torch(name):
    parts = select_parts(FROZEN[name], SmallCnn().shapes())
    assert "1.running_mean" in parts.constant_names
    pair = make_both("BatchNorm2d", parts.constant_names)
    base = {**pair[0].init(3), "1.running_mean": np.linspace(-1, 1, 4), "1.running_var": np.linspace(0.5, 3, 4)}
    base = {name: np.asarray(tensor, np.float32 if tensor.ndim else np.int64) for name, tensor in base.items()}
    adapted = [AdaptedTask(task, FROZEN[name], base) for task in pair]
    plan = TrainConfig(batch_size=BATCH_SIZE, iterations=6, learning_rate=0.01)
    results = train_both(adapted, plan, make_examples())
    assert_equal(results)
    for _, learner in results:
        found = learner._inner.read()
        for constant in parts.constant_names:
            np.testing.assert_array_equal(found[constant], base[constant], err_msg=constant)


def test_a_file_is_of_the_tensors_that_it_was_compiled_to_leave_as_they_are(tasks):
    base = tasks[0].init(3)
    with pytest.raises(TaskError, match=r"changes '1.running_mean', a statistic of batches that the run freezes"):
        AdaptedTask(tasks[1], FROZEN["head"], base).learner()
    pair = make_both("BatchNorm2d", select_parts(FROZEN["head"], tasks[0].shapes()).constant_names)
    with pytest.raises(TaskError, match=r"the compiled task freezes '4.bias', which the run trains"):
        AdaptedTask(pair[1], PARTS["head"], base).learner()
    with pytest.raises(TaskError, match=r"freezes '0.weight', which is trained here"):
        pair[1].learner().gradient(make_examples(4))

"""A task says its loss, and its learner trains with it: NumPy and torch alike."""

import numpy as np
import pytest

from edgefl.core.errors import ConfigError, TaskError
from edgefl.core.types import Dataset, Task, TrainConfig
from edgefl.tasks.datasets.shards import check_shard
from edgefl.tasks.learners.numpy_learner import DenseModel
from edgefl.tasks.learners.torch_learner import TorchModel
from edgefl.tasks.local_algorithms.local_training import train
from edgefl.tasks.registry import make_task

RNG = np.random.default_rng(2)
INPUTS = RNG.normal(size=(200, 3)).astype(np.float32)
SLOPES = np.array([1.0, -2.0, 0.5], np.float32)


class Yields(Task):
    name = "yields:Yields"
    loss = "huber"
    model = DenseModel(sizes=(3, 1))


def trained(learner, data, **plan):
    plan = TrainConfig(**{"learning_rate": 0.1, "batch_size": 20, "epochs": 30, **plan})
    train(learner, data, plan, np.random.default_rng(0), clock=lambda: 0.0, on_iteration=lambda *_: False)
    return learner


def test_a_task_of_a_model_and_a_loss_alone_learns_a_regression():
    task, data = Yields(), Dataset(inputs=INPUTS, targets=INPUTS @ SLOPES + 3.0)
    learner = task.learner()
    learner.load(task.init(0))
    loss, accuracy = trained(learner, data).evaluate(data)
    assert loss < 1e-3
    assert np.isnan(accuracy)
    np.testing.assert_allclose(learner.read()["fc1.weight"][0], SLOPES, atol=0.02)
    assert learner.read()["fc1.bias"] == pytest.approx(3.0, abs=0.02)


def test_the_outputs_of_quantiles_leave_that_share_of_the_targets_below():
    task, noise = Yields(), RNG.normal(size=200)
    task.loss, task.model = "quantile:0.1,0.9", DenseModel(sizes=(3, 2))
    data = Dataset(inputs=np.zeros((200, 3), np.float32), targets=noise)
    low, high = trained(task.learner(), data, learning_rate=0.3).read()["fc1.bias"]
    assert np.mean(noise < low) == pytest.approx(0.1, abs=0.05)
    assert np.mean(noise < high) == pytest.approx(0.9, abs=0.05)


def test_a_reconstruction_takes_the_prepared_input_for_the_target():
    task = Yields()
    task.loss, task.model = "reconstruction", DenseModel(sizes=(3, 3), prepare=lambda rows: rows / 2)
    data = Dataset(inputs=INPUTS, targets=np.zeros(200))
    learner = trained(task.learner(), data)
    np.testing.assert_allclose(learner.read()["fc1.weight"], np.eye(3), atol=0.05)


def test_examples_of_weight_zero_teach_nothing():
    targets = np.where(np.arange(200) % 2, 5.0, -70.0)
    weights = np.where(np.arange(200) % 2, 1.0, 0.0)
    data = Dataset(inputs=np.zeros((200, 3)), targets=targets, weights=weights)
    learner = trained(Yields().learner(), data)
    assert learner.read()["fc1.bias"] == pytest.approx(5.0, abs=0.05)
    assert learner.evaluate(data)[0] == pytest.approx(0.0, abs=1e-3)


def test_a_function_as_loss_needs_torch():
    task = Yields()
    task.loss = lambda outputs, targets: (outputs - targets) ** 2
    with pytest.raises(ConfigError, match="loss function needs a model of torch; one in NumPy takes another"):
        task.learner()


def test_a_task_without_a_model_says_what_it_needs():
    class Bare(Task):
        name = "bare:Bare"

    for call in (Bare().shapes, Bare().learner, lambda: Bare().init(0)):
        with pytest.raises(TaskError, match=r"task Bare has no model; give it one \(model = DenseModel"):
            call()


@pytest.fixture
def torch():
    return pytest.importorskip("torch", reason="needs torch: pip install '.[train]'")


def torch_task(torch, loss, module):
    class InTorch(Task):
        name = "yields:InTorch"
        model = TorchModel(build=module)

    task = InTorch()
    task.loss = loss
    return task


@pytest.mark.parametrize("weights", [None, np.linspace(0, 2, 200)], ids=["alike", "weighted"])
@pytest.mark.parametrize("loss", ["huber", "mse", "mae", "quantile:0.3", "poisson", "binary-cross-entropy"])
def test_a_module_and_a_dense_model_train_alike_with_any_loss(torch, loss, weights):
    targets = (INPUTS @ SLOPES > 0).astype(int)
    data = Dataset(inputs=INPUTS, targets=targets, weights=weights)
    plain, task = Yields(), torch_task(torch, loss, lambda: torch.nn.Linear(3, 1))
    plain.loss = loss
    by_hand, by_torch = plain.learner(), task.learner(threads=1)
    start = task.init(3)
    by_torch.load(start)
    by_hand.load({"fc1.weight": start["weight"], "fc1.bias": start["bias"]})
    for learner in (by_hand, by_torch):
        trained(learner, data, epochs=2)
    for mine, theirs in zip(by_hand.read().values(), by_torch.read().values(), strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-5)
    assert by_hand.evaluate(data) == pytest.approx(by_torch.evaluate(data), rel=1e-5, nan_ok=True)


def test_a_module_has_the_same_first_weights_for_the_same_seed(torch):
    task = torch_task(torch, "mse", lambda: torch.nn.Linear(3, 1))
    first, again, other = task.init(1), task.init(1), task.init(2)
    assert [spec.name for spec in task.shapes()] == list(first) == ["weight", "bias"]
    assert all(np.array_equal(first[name], again[name]) for name in first)
    assert not np.array_equal(first["weight"], other["weight"])


def test_pixels_have_classes_of_their_own(torch):
    images = RNG.normal(size=(40, 1, 4, 4)).astype(np.float32)
    data = Dataset(inputs=images, targets=(images[:, 0] > 0).astype(np.uint8))
    task = torch_task(torch, "cross-entropy", lambda: torch.nn.Conv2d(1, 2, 1))
    loss, accuracy = trained(task.learner(threads=1), data, learning_rate=2.0).evaluate(data)
    assert accuracy > 0.98
    assert loss < 0.2


def test_a_function_of_tensors_is_a_loss_as_method_static_method_or_attribute(torch):
    def cubic(outputs, targets):
        return (outputs[:, 0] - targets).abs() ** 3

    class Attribute(Task):
        name = "yields:Attribute"
        loss = cubic
        model = torch_task(torch, None, lambda: torch.nn.Linear(3, 1)).model

    class Static(Attribute):
        loss = staticmethod(cubic)

    class Method(Attribute):
        def loss(self, outputs, targets):
            return cubic(outputs, targets)

    data = Dataset(inputs=np.zeros((4, 3), np.float32), targets=np.array([2.0, 2.0, 2.0, 2.0]))
    for kind in (Attribute, Static, Method):
        learner = kind().learner(threads=1)
        learner.load({"weight": np.zeros((1, 3)), "bias": np.zeros(1)})
        assert learner.gradient(data) == pytest.approx(8.0)
        assert learner.gradients["bias"].item() == pytest.approx(-12.0)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda outputs, _: outputs.mean(), r"one number for each example, \[2\], got a tensor \[\]"),
        (lambda *_: 3.0, r"one number for each example, \[2\], got float"),
        (lambda outputs, _: outputs.nonsense, "the task's loss raised AttributeError"),
    ],
)
def test_a_function_that_is_no_loss_is_one_clear_line(torch, function, message):
    learner = torch_task(torch, function, lambda: torch.nn.Linear(3, 1)).learner(threads=1)
    with pytest.raises(TaskError, match=message):
        learner.gradient(Dataset(inputs=np.zeros((2, 3), np.float32), targets=np.zeros(2)))


class Misspelt(Yields):
    loss = "hubber"


def test_a_loss_that_there_is_not_is_refused_when_the_task_is_made(monkeypatch):
    monkeypatch.setattr("edgefl.tasks.registry.find_task_factory", lambda _: Misspelt)
    with pytest.raises(ConfigError, match=r"there is no loss 'hubber'; did you mean huber\?"):
        make_task("misspelt:Misspelt")


def test_a_shard_of_values_is_reported_by_its_range():
    task = Yields()
    task.read = lambda _: Dataset(inputs=INPUTS, targets=np.linspace(-1.0, 3.0, 200))
    report = check_shard(task, "yields")
    assert (report.counts, report.target_range) == ({}, (-1.0, 3.0))

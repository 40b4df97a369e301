import numpy as np
import pytest

from edgefl.core.errors import TaskError
from edgefl.core.types import Dataset, TensorKind, TrainConfig
from edgefl.tasks.images import fashion_mnist, mnist
from edgefl.tasks.learners.numpy_learner import DenseModel
from edgefl.tasks.learners.torch_learner import TorchLearner, module_shapes
from edgefl.tasks.local_algorithms.local_training import train
from edgefl.tasks.motionsense import motionsense

torch = pytest.importorskip("torch", reason="needs torch: pip install '.[train]'")


def some_data(n=24, features=6, classes=4):
    rng = np.random.default_rng(0)
    return Dataset(inputs=rng.standard_normal((n, features)).astype(np.float32), labels=rng.integers(0, classes, n))


def trained(learner, data, seed=0, **plan):
    rng = np.random.default_rng(seed)
    return train(learner, data, TrainConfig(**plan), rng, clock=lambda: 0.0, on_iteration=lambda *_: False)


@pytest.fixture
def pair():
    """A logistic regression in NumPy and one in torch, with the same weights."""
    model = DenseModel(sizes=(6, 4), prepare=lambda x: x)
    by_hand, by_torch = model.learner(), TorchLearner(torch.nn.Linear(6, 4), threads=1)
    start = model.init(1)
    by_hand.load(start)
    by_torch.load(dict(zip(["weight", "bias"], start.values(), strict=True)))
    return by_hand, by_torch


def normalised():
    return torch.nn.Sequential(torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 4))


def test_agrees_with_the_numpy_logistic_regression_on_loss_and_gradient(pair):
    by_hand, by_torch = pair
    data = some_data()
    assert by_torch.gradient(data) == pytest.approx(by_hand.gradient(data), rel=1e-5)
    for mine, torchs in zip(by_hand.gradients.values(), by_torch.gradients.values(), strict=True):
        np.testing.assert_allclose(torchs.numpy(), mine, atol=1e-6)
    assert by_torch.evaluate(data) == pytest.approx(by_hand.evaluate(data), rel=1e-5)


@pytest.mark.parametrize("algorithm", ["sgd", "gradient"])
def test_the_same_plan_gives_the_same_displacement_in_numpy_and_torch(pair, algorithm):
    plan = {"algorithm": algorithm, "epochs": 3, "batch_size": 5, "learning_rate": 0.1, "momentum": 0.9}
    by_hand, by_torch = (trained(learner, some_data(), 3, weight_decay=0.01, **plan) for learner in pair)
    assert by_hand.loss == pytest.approx(by_torch.loss, rel=1e-5)
    for mine, torchs in zip(by_hand.displacement.values(), by_torch.displacement.values(), strict=True):
        np.testing.assert_allclose(torchs, mine, atol=1e-5)


def test_gradients_stay_the_modules_own_tensors_and_do_not_add_up_over_batches():
    module = torch.nn.Linear(6, 4)
    learner = TorchLearner(module, threads=1)
    learner.gradient(some_data())
    once = learner.gradients["weight"].clone()
    learner.gradient(some_data())
    assert learner.gradients["weight"].data_ptr() == module.weight.grad.data_ptr()
    assert learner.parameters["weight"].data_ptr() == module.weight.data_ptr()
    assert torch.equal(learner.gradients["weight"], once)


def test_takes_read_only_arrays_as_they_come_from_the_network():
    learner = TorchLearner(torch.nn.Linear(1, 2), threads=1)
    learner.load({"bias": np.frombuffer(np.array([1, 2], "<f4").tobytes(), "<f4")})
    assert learner.read()["bias"].tolist() == [1.0, 2.0]


def test_buffers_float_and_integer_are_read_loaded_and_displaced_and_evaluation_changes_none():
    module = normalised()
    kinds = {spec.name: (spec.kind, spec.dtype) for spec in module_shapes(module)}
    assert kinds["0.running_mean"] == (TensorKind.BUFFER, "float32")
    assert kinds["0.num_batches_tracked"] == (TensorKind.BUFFER, "int64")
    learner = TorchLearner(module, threads=1)
    learner.load({"0.num_batches_tracked": np.array(40)})
    before = learner.read()
    learner.evaluate(some_data())
    assert all(np.array_equal(value, before[name]) for name, value in learner.read().items())
    moved = trained(learner, some_data(), iterations=3, batch_size=8, learning_rate=0.1).displacement
    assert list(moved) == [spec.name for spec in module_shapes(module)]
    assert (moved["0.num_batches_tracked"].dtype, moved["0.num_batches_tracked"]) == (np.int64, 3)
    assert learner.read()["0.num_batches_tracked"] == 43
    assert moved["0.running_mean"].any()


IMAGES = np.random.default_rng(0).integers(0, 256, (4, 28, 28)).astype(np.uint8)
WINDOWS = np.random.default_rng(0).standard_normal((4, 9, 128)).astype(np.float32)


@pytest.mark.parametrize(
    ("task", "inputs"),
    [
        pytest.param(mnist(), IMAGES, id="cnn"),
        pytest.param(fashion_mnist(model="cnn-small"), IMAGES, id="cnn-small"),
        pytest.param(fashion_mnist(model="lenet"), IMAGES, id="lenet"),
        pytest.param(motionsense(), WINDOWS, id="motionsense"),
        pytest.param(fashion_mnist(model="cnn-large"), IMAGES, id="cnn-large", marks=pytest.mark.extended),
        pytest.param(fashion_mnist(model="resnet18-gn"), IMAGES, id="resnet18-gn", marks=pytest.mark.extended),
    ],
)
def test_a_built_in_network_has_the_tensors_of_its_layout_and_learns_a_batch_by_heart(task, inputs):
    assert module_shapes(task.model.build()) == task.shapes()
    learner, batch = task.learner(threads=1), Dataset(inputs=inputs, labels=np.array([0, 1, 2, 3]))
    learner.load(task.init(7))
    first = learner.gradient(batch)
    trained(learner, batch, iterations=8, batch_size=4, learning_rate=0.01)
    assert learner.evaluate(batch)[0] < first


def test_a_missing_gpu_is_one_clear_line():
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU: run it on one without")
    with pytest.raises(TaskError, match=r"cuda:1 is not here: torch sees 0 CUDA device"):
        mnist().learner(accelerator="cuda:1")


def test_trains_on_a_gpu_as_on_the_cpu():
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU that torch sees: run it on a machine with one")
    data = some_data()
    torch.manual_seed(0)
    on_cpu, on_gpu = TorchLearner(torch.nn.Linear(6, 4)), TorchLearner(torch.nn.Linear(6, 4), accelerator="cuda")
    on_gpu.load(on_cpu.read())
    assert on_gpu.gradient(data) == pytest.approx(on_cpu.gradient(data), rel=1e-4)
    assert on_gpu.evaluate(data) == pytest.approx(on_cpu.evaluate(data), rel=1e-4)

import numpy as np
import pytest

from edgefl.errors import TaskError
from edgefl.tasks.images import fashion_mnist, mnist
from edgefl.tasks.local_training import train
from edgefl.tasks.motionsense import motionsense
from edgefl.tasks.numpy_learner import DenseModel
from edgefl.tasks.torch_learner import TorchLearner, module_shapes
from edgefl.types import Dataset, LocalPlan, TensorKind

torch = pytest.importorskip("torch", reason="the train extra is not installed")


def some_data(n=24, features=6, classes=4):
    rng = np.random.default_rng(0)
    return Dataset(inputs=rng.standard_normal((n, features)).astype(np.float32), labels=rng.integers(0, classes, n))


def renamed(tensors, names):
    return dict(zip(names, tensors.values(), strict=True))


def test_agrees_with_the_numpy_logistic_regression_on_loss_and_gradient():
    data, model = some_data(), DenseModel(sizes=(6, 4), prepare=lambda x: x)
    by_hand, by_torch = model.learner(), TorchLearner(torch.nn.Linear(6, 4), threads=1)
    start = model.init(1)
    by_hand.load(start)
    by_torch.load(renamed(start, ["weight", "bias"]))
    assert by_torch.gradient(data) == pytest.approx(by_hand.gradient(data), rel=1e-5)
    for (_, mine), (_, torchs) in zip(by_hand.gradients.items(), by_torch.gradients.items(), strict=True):
        np.testing.assert_allclose(torchs.numpy(), mine, atol=1e-6)
    assert by_torch.evaluate(data) == pytest.approx(by_hand.evaluate(data), rel=1e-5)


@pytest.mark.parametrize("algorithm", ["sgd", "gradient"])
def test_the_same_plan_gives_the_same_displacement_in_numpy_and_torch(algorithm):
    data, model = some_data(), DenseModel(sizes=(6, 4), prepare=lambda x: x)
    by_hand, by_torch = model.learner(), TorchLearner(torch.nn.Linear(6, 4), threads=1)
    start = model.init(1)
    by_hand.load(start)
    by_torch.load(renamed(start, ["weight", "bias"]))
    plan = LocalPlan(algorithm=algorithm, epochs=3, batch_size=5, learning_rate=0.1, momentum=0.9, weight_decay=0.01)
    results = [
        train(learner, data, plan, np.random.default_rng(3), clock=lambda: 0.0, on_iteration=lambda *_: False)
        for learner in (by_hand, by_torch)
    ]
    assert results[0].loss == pytest.approx(results[1].loss, rel=1e-5)
    for mine, torchs in zip(results[0].displacement.values(), results[1].displacement.values(), strict=True):
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


def test_buffers_float_and_integer_are_read_loaded_and_displaced():
    module = torch.nn.Sequential(torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 4))
    kinds = {spec.name: (spec.kind, spec.dtype) for spec in module_shapes(module)}
    assert kinds["0.running_mean"] == (TensorKind.BUFFER, "float32")
    assert kinds["0.num_batches_tracked"] == (TensorKind.BUFFER, "int64")
    learner = TorchLearner(module, threads=1)
    learner.load({"0.num_batches_tracked": np.array(40)})
    plan = LocalPlan(iterations=3, batch_size=8, learning_rate=0.1)
    result = train(
        learner, some_data(), plan, np.random.default_rng(0), clock=lambda: 0.0, on_iteration=lambda *_: False
    )
    assert list(result.displacement) == [spec.name for spec in module_shapes(module)]
    assert result.displacement["0.num_batches_tracked"].dtype == np.int64
    assert result.displacement["0.num_batches_tracked"] == 3
    assert learner.read()["0.num_batches_tracked"] == 43
    assert result.displacement["0.running_mean"].any()


def test_evaluation_changes_no_buffer():
    module = torch.nn.Sequential(torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 4))
    learner = TorchLearner(module, threads=1)
    before = learner.read()
    learner.evaluate(some_data())
    assert all(np.array_equal(value, before[name]) for name, value in learner.read().items())


@pytest.mark.parametrize(
    ("task", "inputs"),
    [
        (mnist(), np.random.default_rng(0).integers(0, 256, (4, 28, 28)).astype(np.uint8)),
        (fashion_mnist(model="cnn-small"), np.random.default_rng(0).integers(0, 256, (4, 28, 28)).astype(np.uint8)),
        (fashion_mnist(model="resnet18-gn"), np.random.default_rng(0).integers(0, 256, (4, 28, 28)).astype(np.uint8)),
        (fashion_mnist(model="cnn-large"), np.random.default_rng(0).integers(0, 256, (4, 28, 28)).astype(np.uint8)),
        (fashion_mnist(model="lenet"), np.random.default_rng(0).integers(0, 256, (4, 28, 28)).astype(np.uint8)),
        (motionsense(), np.random.default_rng(0).standard_normal((4, 9, 128)).astype(np.float32)),
    ],
    ids=["cnn", "cnn-small", "resnet18-gn", "cnn-large", "lenet", "motionsense"],
)
def test_a_built_in_network_has_the_tensors_of_its_layout_and_learns_a_batch_by_heart(task, inputs):
    assert module_shapes(task.model.build()) == task.shapes()
    learner = task.learner(threads=1)
    learner.load(task.init(7))
    batch = Dataset(inputs=inputs, labels=np.array([0, 1, 2, 3]))
    plan = LocalPlan(iterations=8, batch_size=4, learning_rate=0.01)
    first = learner.gradient(batch)
    train(learner, batch, plan, np.random.default_rng(0), clock=lambda: 0.0, on_iteration=lambda *_: False)
    assert learner.evaluate(batch)[0] < first


def test_a_missing_gpu_is_one_clear_line():
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(TaskError, match=r"cuda:1 is not here: torch sees 0 CUDA device"):
        mnist().learner(accelerator="cuda:1")


def test_trains_on_a_gpu_as_on_the_cpu():
    if not torch.cuda.is_available():
        pytest.skip("this machine has no GPU")
    data = some_data()
    torch.manual_seed(0)
    on_cpu, on_gpu = TorchLearner(torch.nn.Linear(6, 4)), TorchLearner(torch.nn.Linear(6, 4), accelerator="cuda")
    on_gpu.load(on_cpu.read())
    assert on_gpu.gradient(data) == pytest.approx(on_cpu.gradient(data), rel=1e-4)
    assert on_gpu.evaluate(data) == pytest.approx(on_cpu.evaluate(data), rel=1e-4)

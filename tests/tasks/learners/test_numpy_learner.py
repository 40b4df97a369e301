import numpy as np
import pytest

from edgefl.core.errors import TaskError
from edgefl.core.types import Dataset, SparseTensor
from edgefl.tasks.learners.numpy_learner import ACTIVATIONS, DenseModel
from edgefl.tasks.losses.registry import CLASS_LOSSES


def small_model(*sizes, **kinds):
    return DenseModel(sizes=sizes, prepare=lambda inputs: inputs.astype(np.float32), **kinds)


def loaded(*sizes, seed=0, **kinds):
    model = small_model(*sizes, **kinds)
    learner = model.learner()
    learner.load(model.init(seed))
    return learner


def some_data(n=12, features=5, classes=3, seed=0):
    rng = np.random.default_rng(seed)
    return Dataset(inputs=rng.standard_normal((n, features)), targets=rng.integers(0, classes, n))


@pytest.mark.parametrize("loss", CLASS_LOSSES)
@pytest.mark.parametrize(
    ("sizes", "activation"), [((5, 3), "relu"), ((5, 7, 3), "relu"), *(((5, 7, 4, 3), name) for name in ACTIVATIONS)]
)
def test_the_gradient_is_the_slope_of_the_loss(sizes, activation, loss):
    def loss_at(model):
        learner.load(model)
        return learner.gradient(data)

    kinds = {"activation": activation, "loss": loss}
    data, size, learner, rng = some_data(), 1e-2, loaded(*sizes, seed=3, **kinds), np.random.default_rng(1)
    start = learner.read()
    learner.gradient(data)
    gradients = {name: value.copy() for name, value in learner.gradients.items()}
    for name, value in start.items():
        direction = rng.standard_normal(value.shape).astype(np.float32)
        direction /= np.linalg.norm(direction)
        ahead, behind = (loss_at(start | {name: value + sign * size * direction}) for sign in (1, -1))
        slope = (ahead - behind) / (2 * size)
        assert float((gradients[name] * direction).sum()) == pytest.approx(slope, abs=2e-3)


@pytest.mark.parametrize("loss", CLASS_LOSSES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_logits_loss_and_gradient_are_those_of_torch(activation, loss):
    torch = pytest.importorskip("torch", reason="needs torch: pip install '.[train]'")
    functional, data = torch.nn.functional, some_data()
    learner = loaded(5, 7, 4, 3, seed=3, activation=activation, loss=loss)
    tensors = {name: torch.tensor(value, requires_grad=True) for name, value in learner.read().items()}
    between = {"gelu": lambda x: functional.gelu(x, approximate="tanh")}.get(activation) or getattr(torch, activation)
    hidden = torch.tensor(data.inputs, dtype=torch.float32)
    for layer in (1, 2, 3):
        hidden = functional.linear(hidden, tensors[f"fc{layer}.weight"], tensors[f"fc{layer}.bias"])
        hidden = hidden if layer == 3 else between(hidden)
    classes = torch.tensor(data.targets)
    value = (
        functional.cross_entropy(hidden, classes)
        if loss == "cross-entropy"
        else functional.mse_loss(hidden, functional.one_hot(classes, 3).float())
    )
    value.backward()
    assert learner.gradient(data) == pytest.approx(value.item(), rel=1e-5)
    np.testing.assert_allclose(learner.logits(data.inputs), hidden.detach().numpy(), atol=1e-6)
    for name, gradient in learner.gradients.items():
        np.testing.assert_allclose(gradient, tensors[name].grad.numpy(), atol=1e-6)


def test_no_activation_overflows_at_sums_that_are_far_out():
    sums = np.array([-1e4, 0.0, 1e4], np.float32)
    for name, activation in ACTIVATIONS.items():
        values = activation.compute(sums)
        slopes = np.asarray(activation.derive(sums, values), np.float32)
        assert np.isfinite([*values, *slopes]).all(), name


def test_a_model_that_knows_nothing_loses_log_of_the_classes_and_its_gradient_is_right_by_hand():
    learner = small_model(2, 2).learner()
    assert learner.gradient(Dataset(inputs=np.array([[1.0, 2.0]]), targets=np.array([1]))) == pytest.approx(np.log(2))
    assert learner.gradients["fc1.weight"].tolist() == [[0.5, 1.0], [-0.5, -1.0]]
    assert learner.gradients["fc1.bias"].tolist() == [0.5, -0.5]


def test_large_logits_do_not_overflow():
    learner = small_model(1, 2).learner()
    learner.load({"fc1.weight": np.array([[1000.0], [-1000.0]], np.float32)})
    data = Dataset(inputs=np.array([[1.0], [1.0]]), targets=np.array([0, 1]))
    assert learner.gradient(data) == pytest.approx(1000.0)


def test_evaluation_counts_every_example_once_over_several_batches():
    learner, data = loaded(5, 3), some_data(n=2500)
    loss, accuracy = learner.evaluate(data)
    assert loss == pytest.approx(learner.gradient(data), rel=1e-5)
    weight, bias = learner.parameters["fc1.weight"], learner.parameters["fc1.bias"]
    right = (data.inputs.astype(np.float32) @ weight.T + bias).argmax(axis=1) == data.targets
    assert accuracy == pytest.approx(right.mean())


def test_loading_some_tensors_leaves_the_others_and_reading_gives_a_copy():
    learner = loaded(4, 2)
    before = learner.read()
    learner.load({"fc1.bias": SparseTensor(indices=np.array([1]), values=np.array([5.0], np.float32), shape=(2,))})
    learner.read()["fc1.bias"][:] = 9
    assert learner.read()["fc1.bias"].tolist() == [0.0, 5.0]
    assert np.array_equal(learner.read()["fc1.weight"], before["fc1.weight"])


def test_a_tensor_or_an_accelerator_that_does_not_fit_is_refused():
    learner = small_model(4, 2).learner()
    with pytest.raises(TaskError, match=r"shape \(3,\), the model needs \(2,\)"):
        learner.load({"fc1.bias": np.zeros(3)})
    with pytest.raises(TaskError, match=r"no tensor 'fc9.bias', only fc1.weight, fc1.bias"):
        learner.load({"fc9.bias": np.zeros(2)})
    with pytest.raises(TaskError, match="must be cpu, cuda or cuda:N, got 'tpu'"):
        small_model(4, 2).learner(accelerator="tpu")

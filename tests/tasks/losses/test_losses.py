"""Losses by mathematics: values by hand, slopes by finite differences, torch's form, and what is refused."""

import numpy as np
import pytest

from edgefl.core.errors import ConfigError, DataError, TaskError
from edgefl.core.types import Dataset, Task
from edgefl.tasks.learners.numpy_learner import DenseModel
from edgefl.tasks.learners.torch_losses import TorchLoss
from edgefl.tasks.losses.class_losses import CrossEntropy
from edgefl.tasks.losses.registry import BUILT_IN, check_data, make_loss
from edgefl.tasks.losses.torch_only_losses import TorchOnlyLoss

N, WIDTH = 6, 3
RNG = np.random.default_rng(5)
VALUES = RNG.normal(size=(N, WIDTH))
CLASSES = RNG.integers(0, WIDTH, N)
PIXELS = np.where(RNG.random((N, 2, 2)) < 0.2, -100, RNG.integers(0, WIDTH, (N, 2, 2)))
CASES = {
    "cross-entropy": (make_loss("cross-entropy"), CLASSES, (N, WIDTH)),
    "weighted": (CrossEntropy(class_weights=(0.5, 2.0, 3.0), label_smoothing=0.2), CLASSES, (N, WIDTH)),
    "pixels": (make_loss("cross-entropy"), PIXELS, (N, WIDTH, 2, 2)),
    "weighted pixels": (CrossEntropy(class_weights=(0.5, 2.0, 3.0), label_smoothing=0.2), PIXELS, (N, WIDTH, 2, 2)),
    "labels": (make_loss("binary-cross-entropy"), RNG.integers(0, 2, (N, WIDTH)), (N, WIDTH)),
    "mse": (make_loss("mse"), VALUES, (N, WIDTH)),
    "mse of classes": (make_loss("mse"), CLASSES, (N, WIDTH)),
    "mse of one value": (make_loss("mse"), VALUES[:, 0], (N, 1)),
    "mae": (make_loss("mae"), VALUES, (N, WIDTH)),
    "huber": (make_loss("huber"), 3 * VALUES, (N, WIDTH)),
    "huber:0.3": (make_loss("huber:0.3"), VALUES, (N, WIDTH)),
    "quantile:0.9": (make_loss("quantile:0.9"), VALUES, (N, WIDTH)),
    "quantiles": (make_loss("quantile:0.1,0.5,0.9"), VALUES[:, 0], (N, WIDTH)),
    "quantiles of vectors": (make_loss("quantile:0.2,0.7"), VALUES, (N, WIDTH, 2)),
    "poisson": (make_loss("poisson"), RNG.poisson(2.0, (N, WIDTH)), (N, WIDTH)),
    "reconstruction": (make_loss("reconstruction:mae"), VALUES, (N, WIDTH)),
}
WEIGHTS = np.array([0.0, 1.0, 2.0, 0.5, 1.0, 3.0])


@pytest.fixture(params=CASES)
def case(request):
    loss, targets, shape = CASES[request.param]
    outputs = np.random.default_rng(1).normal(size=shape)
    return loss, outputs, loss.convert_targets(targets, shape)


def test_there_is_a_case_of_every_loss():
    of_torch_alone = {name for name, kind in BUILT_IN.items() if issubclass(kind, TorchOnlyLoss)}
    assert {loss.name for loss, _, _ in CASES.values()} | of_torch_alone == set(BUILT_IN)


@pytest.mark.parametrize("weights", [None, WEIGHTS], ids=["alike", "weighted"])
def test_the_gradient_is_the_slope_of_the_mean_loss(case, weights):
    loss, outputs, targets = case
    _, gradient = loss.compute_mean(outputs.copy(), targets, weights)
    step = 1e-5
    for index in np.ndindex(outputs.shape):
        ahead, behind = outputs.copy(), outputs.copy()
        ahead[index] += step
        behind[index] -= step
        slope = (loss.compute_mean(ahead, targets, weights)[0] - loss.compute_mean(behind, targets, weights)[0]) / (
            2 * step
        )
        assert gradient[index] == pytest.approx(slope, abs=1e-6)


@pytest.mark.parametrize("weights", [None, WEIGHTS], ids=["alike", "weighted"])
def test_torch_computes_the_same_loss_of_each_example_and_the_same_gradient(case, weights):
    torch = pytest.importorskip("torch", reason="needs torch: pip install '.[train]'")
    loss, outputs, targets = case
    outputs = outputs.astype(np.float32)
    tensor = torch.tensor(outputs, requires_grad=True)
    in_torch = TorchLoss(loss, torch.device("cpu"))
    np.testing.assert_allclose(
        in_torch.compute(tensor, targets).detach(), loss.compute(outputs, targets)[0], atol=1e-5
    )
    mean = in_torch.compute_mean(tensor, targets, weights)
    mean.backward()
    expected, gradient = loss.compute_mean(outputs.copy(), targets, weights)
    assert mean.item() == pytest.approx(expected, abs=1e-5)
    assert in_torch.compute_sum(tensor, targets, weights).item() == pytest.approx(N * expected, abs=1e-5)
    np.testing.assert_allclose(tensor.grad, gradient, atol=1e-6)


def test_an_example_of_weight_two_counts_like_two_of_them(case):
    loss, outputs, targets = case
    twice = np.r_[0, np.arange(N)]
    mean, _ = loss.compute_mean(outputs[twice], targets[twice])
    weighted, _ = loss.compute_mean(outputs, targets, np.r_[2.0, np.ones(N - 1)])
    assert N * weighted == pytest.approx((N + 1) * mean, rel=1e-6)


@pytest.mark.parametrize(
    ("name", "output", "target", "value"),
    [
        ("mse", 3.0, 1.0, 4.0),
        ("mae", 3.0, 1.0, 2.0),
        ("huber", 3.0, 1.0, 1.5),
        ("huber", 1.5, 1.0, 0.125),
        ("huber:4", 3.0, 1.0, 2.0),
        ("quantile:0.9", 3.0, 1.0, 0.2),
        ("quantile:0.9", 1.0, 3.0, 1.8),
        ("binary-cross-entropy", 0.0, 1.0, np.log(2)),
        ("binary-cross-entropy", -1000.0, 1.0, 1000.0),
        ("poisson", 0.0, 0.0, 1.0),
        ("poisson", np.log(4.0), 4.0, 0.0),
    ],
)
def test_the_loss_of_one_value_is_that_of_its_formula(name, output, target, value):
    values, _ = make_loss(name).compute(np.array([[output]]), np.array([[target]]))
    assert values[0] == pytest.approx(value, abs=1e-12)


def test_a_pixel_without_a_class_counts_neither_in_the_loss_nor_as_right():
    loss, outputs = make_loss("cross-entropy"), np.zeros((1, 2, 3), np.float32)
    outputs[0, 0, 0] = 5.0
    targets = loss.convert_targets(np.array([[0, 1, -100]]), outputs.shape)
    values, slopes = loss.compute(outputs, targets)
    assert values[0] == pytest.approx((np.log1p(np.exp(-5)) + np.log(2)) / 2, rel=1e-5)
    assert not slopes[0, :, 2].any()
    assert loss.count_right(outputs, targets) == 0.5


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("hubr", "there is no loss 'hubr'; did you mean huber?"),
        ("quantile:1", "a quantile must be above 0 and below 1, got 1"),
        ("quantile:0.5,nan", "a quantile must be above 0 and below 1, got nan"),
        ("quantile:a", "'a' is no list of numbers, such as 0.1,0.9"),
        ("huber:0", "delta of huber must be finite and above 0, got 0"),
        ("mse:2", "loss mse has no setting, got 'mse:2'"),
        ("contrastive:0", "temperature of contrastive must be finite and above 0, got 0"),
        ("contrastive:0.1,0.2", "loss contrastive has no setting"),
        ("ctc:1", "loss ctc has no setting, got 'ctc:1'"),
        ("reconstruction:cross-entropy", "takes a loss of single values, such as mae, got 'cross-entropy'"),
        (3, "loss must be a name or a function of outputs and targets, got 3"),
    ],
)
def test_a_loss_that_there_is_not_is_refused_in_one_line(name, message):
    with pytest.raises(ConfigError, match=message.replace("?", r"\?")):
        make_loss(name)


class Yields(Task):
    name = "yields:Yields"
    model = DenseModel(sizes=(2, 3))

    def __init__(self, loss):
        self.loss = loss


@pytest.mark.parametrize(
    ("loss", "targets", "message"),
    [
        ("cross-entropy", [0.0, 1.5], "a label is 1.5; .* whole numbers from 0 to 2 "),
        ("cross-entropy", VALUES[:2], r"targets are float64 \[n, 3\] .* outputs \[n, 3\]; .* targets must be \[n\]"),
        ("mse", [0.0, np.nan], "must be finite, got nan in row 1"),
        ("mse", [[0.0], [np.inf]], "must be finite, got inf in row 1"),
        ("mse", [0.5, 1.0], r"targets are float64 \[n\] .* with mse targets must be \[n, 3\]"),
        ("mae", ["a", "b"], "targets of mae must be numbers, got <U1"),
        ("binary-cross-entropy", [[0, 1, 1], [0, 1, 2]], "must be 0 or 1, got 2"),
        ("poisson", [[0, 1, 1], [0, 1, -2]], "are counts, at least 0, got -2"),
        ("quantile:0.5,0.9", [1.0, 2.0], r"with quantile outputs must be \[n, 2\]"),
    ],
)
def test_targets_that_are_none_of_the_loss_are_refused_in_one_line(loss, targets, message):
    data = Dataset(inputs=np.zeros((2, 2)), targets=np.array(targets))
    with pytest.raises(DataError, match=message) as caught:
        check_data(Yields(loss), data)
    assert "\n" not in str(caught.value)
    learner = Yields(loss).learner()
    with pytest.raises(TaskError):
        learner.gradient(data)


@pytest.mark.parametrize("weights", [[1.0, np.nan], [1.0, -1.0], [[1.0], [1.0]], ["1", "2"]])
def test_weights_that_are_none_are_refused(weights):
    data = Dataset(inputs=np.zeros((2, 2)), targets=np.zeros((2, 3)), weights=np.array(weights))
    with pytest.raises(DataError, match=r"weights .* must be finite numbers \[n\], at least 0"):
        check_data(Yields("mse"), data)


def test_parts_of_unequal_length_are_refused():
    data = Dataset(inputs=np.zeros((3, 2)), targets=np.zeros((2, 3)))
    with pytest.raises(DataError, match="reads 2 targets and 3 inputs; there must be as many"):
        check_data(Yields("mse"), data)

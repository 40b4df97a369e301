"""Losses of torch alone: those of its own functions and of their formulas, and what is refused."""

import math

import numpy as np
import pytest

from edgefl.core.errors import ConfigError, DataError, TaskError
from edgefl.core.types import Dataset, Task, TrainConfig
from edgefl.tasks.learners.numpy_learner import DenseModel
from edgefl.tasks.learners.torch_learner import TorchLearner, TorchModel
from edgefl.tasks.learners.torch_losses import TorchLoss
from edgefl.tasks.local_algorithms.local_training import train
from edgefl.tasks.losses.registry import check_data, make_loss
from edgefl.tasks.registry import make_task

torch = pytest.importorskip("torch", reason="needs torch: pip install '.[train]'")

WORDS = np.array([[1, 2, 2, 3], [3, -100, -100, -100], [2, 1, -100, -100], [-100] * 4])
"""Of 4 labels, 1, 2 and none."""


def compute(loss, outputs, targets):
    """The loss of each example, and the tensor of outputs with the gradient of their sum."""
    found = make_loss(loss)
    tensor = torch.tensor(outputs, requires_grad=True)
    values = TorchLoss(found, torch.device("cpu")).compute(tensor, found.convert_targets(targets, outputs.shape))
    values.sum().backward()
    return values.detach().numpy(), tensor


def test_ctc_is_that_of_torch_for_sequences_of_any_length():
    outputs = np.random.default_rng(2).normal(size=(4, 5, 9))
    values, tensor = compute("ctc", outputs, WORDS)
    lengths = torch.tensor([4, 1, 2, 0])
    inputs = torch.tensor(outputs, requires_grad=True)
    flat = torch.tensor([1, 2, 2, 3, 3, 2, 1])
    sums = torch.nn.CTCLoss(reduction="none")(
        inputs.log_softmax(1).permute(2, 0, 1), flat, torch.full((4,), 9), lengths
    )
    expected = sums / torch.tensor([4, 1, 2, 1])
    expected.sum().backward()
    np.testing.assert_allclose(values, expected.detach(), rtol=1e-12)
    np.testing.assert_allclose(tensor.grad, inputs.grad, atol=1e-12)
    mean = torch.nn.CTCLoss()(inputs.log_softmax(1).permute(2, 0, 1), flat, torch.full((4,), 9), lengths)
    assert values.mean() == pytest.approx(mean.item(), rel=1e-12)


def test_ctc_is_the_probability_of_every_path_that_makes_the_sequence():
    outputs = np.log(np.array([[[0.6, 0.1, 0.3], [0.4, 0.9, 0.7]]]))
    # Label 1 in three positions: one run of it, with blanks before and behind; 1, blank, 1 is another sequence.
    p, blank = [0.4, 0.9, 0.7], [0.6, 0.1, 0.3]
    runs = ["100", "010", "001", "110", "011", "111"]
    total = sum(math.prod(p[i] if one == "1" else blank[i] for i, one in enumerate(run)) for run in runs)
    assert compute("ctc", outputs, np.array([[1]]))[0][0] == pytest.approx(-math.log(total))
    twice = p[0] * blank[1] * p[2]
    assert compute("ctc", outputs, np.array([[1, 1]]))[0][0] == pytest.approx(-math.log(twice) / 2)


def test_a_sequence_is_right_where_the_best_path_says_it():
    best = np.array([[0, 1, 1, 0, 2], [1, 1, 0, 1, 0], [0, 0, 0, 0, 0], [1, 2, 3, 0, 0]])
    targets = np.array([[1, 2, -100], [1, 1, -100], [-100, -100, -100], [1, 2, -100]])
    assert make_loss("ctc").count_right(np.eye(4)[best].transpose(0, 2, 1), targets) == 3.0


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (np.ones((2, 3)), r"must be whole numbers \[n, labels\].* filled up with -100, got float64 \[2, 3\]"),
        (np.ones(2, int), r"got int64 \[2\]"),
        (np.array([[1, 2], [1, 0]]), "classes from 1 .*0 is the blank.*got 0 in row 1"),
        (np.array([[1, 2], [-1, -100]]), "got -1 in row 1"),
        (np.array([[1, 2], [-100, 1]]), "only behind the last label, row 1"),
        (np.array([[1, 2], [4, 1]]), "a target of ctc is 4, the model has classes 0 to 3"),
        (np.array([[1, 2, 3, 3, 3], [1, -100, -100, -100, -100]]), "needs 7 positions, the model's outputs have 6"),
    ],
)
def test_sequences_that_ctc_cannot_learn_are_one_clear_line(targets, message):
    with pytest.raises(TaskError, match=message) as error:
        make_loss("ctc").convert_targets(targets, (2, 4, 6))
    assert "\n" not in str(error.value)
    with pytest.raises(TaskError, match=r"outputs must be \[n, classes, positions\], got \[n, 5\]"):
        make_loss("ctc").convert_targets(WORDS, (4, 5))


@pytest.mark.parametrize("temperature", [0.5, 0.1])
def test_contrastive_is_nt_xent_by_hand(temperature):
    outputs = np.random.default_rng(3).normal(size=(4, 2, 3))
    views = outputs / np.linalg.norm(outputs, axis=2, keepdims=True)
    expected = []
    for i in range(4):
        losses = []
        for v in range(2):
            similar = {
                (j, w): math.exp(views[i, v] @ views[j, w] / temperature)
                for j in range(4) for w in range(2) if (j, w) != (i, v)
            }  # fmt: skip
            losses.append(-math.log(similar[i, 1 - v] / sum(similar.values())))
        expected.append(np.mean(losses))
    name = "contrastive" if temperature == 0.5 else f"contrastive:{temperature}"
    values, tensor = compute(name, outputs, np.zeros(4))
    np.testing.assert_allclose(values, expected, rtol=1e-12)
    # Only the direction of an output counts.
    np.testing.assert_allclose(compute(name, 3 * outputs, np.zeros(4))[0], expected, rtol=1e-12)
    np.testing.assert_allclose((tensor.grad.numpy() * outputs).sum(axis=2), 0.0, atol=1e-12)


def test_a_last_batch_of_one_example_has_nothing_to_be_told_apart_from():
    values, tensor = compute("contrastive", np.ones((1, 2, 3)), np.zeros(1))
    assert values.tolist() == [0.0]
    assert not tensor.grad.numpy().any()


def test_outputs_without_two_views_are_one_clear_line():
    for shape in ((4, 3), (4, 3, 2)):
        with pytest.raises(TaskError, match=r"must be \[n, 2, size\], both views of each example, got \[n, 3"):
            make_loss("contrastive").convert_targets(np.zeros(4), shape)


class Speller(torch.nn.Module):
    """Says a class for each position of a signal [n, 6, positions]."""

    def __init__(self):
        super().__init__()
        first, last = torch.nn.Conv1d(6, 16, 3, padding=1), torch.nn.Conv1d(16, 4, 1)
        self.layers = torch.nn.Sequential(first, torch.nn.ReLU(), last)

    def forward(self, signal):
        return self.layers(signal)


class Spelling(Task):
    name = "spelling:Spelling"
    loss = "ctc"
    model = TorchModel(build=Speller)


def make_spelled(count=120):
    """Labels 1 to 3 held for 2 or 3 positions each, with gaps; their positions are not in the targets."""
    rng = np.random.default_rng(0)
    signals, targets = rng.normal(0, 0.3, (count, 6, 14)).astype(np.float32), np.full((count, 4), -100)
    for row in range(count):
        place = 0
        for label in range(rng.integers(1, 5)):
            targets[row, label] = rng.integers(1, 4)
            length = rng.integers(2, 4)
            signals[row, targets[row, label] - 1, place : place + length] += 2.0
            place += length + 1
    return Dataset(inputs=signals[:, :, :14], targets=targets)


def test_a_network_learns_to_spell_without_being_told_where():
    task, data = Spelling(), make_spelled()
    learner = task.learner(threads=1)
    learner.load(task.init(1))
    check_data(task, data)
    plan = TrainConfig(epochs=25, batch_size=16, learning_rate=0.3)
    train(learner, data, plan, np.random.default_rng(0), clock=lambda: 0.0, on_iteration=lambda *_: False)
    loss, accuracy = learner.evaluate(data)
    assert accuracy > 0.9
    assert loss < 0.3


def test_views_by_name_teach_an_encoder_to_know_an_example_again():
    class Twins(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.encode = torch.nn.Linear(8, 4)

        def forward(self, first, second):
            return torch.stack([self.encode(first), self.encode(second)], dim=1)

    rng = np.random.default_rng(0)
    # What both views share is in half of the numbers; the rest is noise, and louder.
    shared, (one, two) = rng.normal(size=(200, 4)), 3 * rng.normal(size=(2, 200, 4))
    inputs = {"first": np.hstack([shared, one]), "second": np.hstack([shared, two])}
    data = Dataset(inputs=inputs, targets=np.zeros(200))
    learner = TorchLearner(Twins(), prepare=lambda each: each, threads=1, loss="contrastive:0.2")
    before = learner.evaluate(data)[0]
    plan = TrainConfig(epochs=40, batch_size=50, learning_rate=0.3)
    train(learner, data, plan, np.random.default_rng(0), clock=lambda: 0.0, on_iteration=lambda *_: False)
    after, accuracy = learner.evaluate(data)
    assert after < 0.5 * before
    assert np.isnan(accuracy)
    weight = np.abs(learner.parameters["encode.weight"].numpy())
    assert weight[:, :4].mean() > 5 * weight[:, 4:].mean()


@pytest.mark.parametrize("loss", ["ctc", "contrastive"])
def test_models_without_torch_refuse_them_before_they_train(loss):
    class Own(Task):
        name = "own:Own"
        model = DenseModel(sizes=(2, 3), loss=loss)

    with pytest.raises(ConfigError, match=f"loss {loss} needs a model of torch"):
        Own().learner()
    with pytest.raises(ConfigError, match=f"task.loss = '{loss}' is for a task of your own, with a network of torch"):
        make_task("table", {"columns": "a", "target": "b", "loss": loss})


def test_a_board_whose_targets_are_no_sequences_is_told_so():
    data = Dataset(inputs=np.zeros((2, 6, 14)), targets=np.array([[1, 2], [0, 1]]))
    with pytest.raises(DataError, match="data of task spelling:Spelling: targets of ctc must be classes from 1"):
        check_data(Spelling(), data)

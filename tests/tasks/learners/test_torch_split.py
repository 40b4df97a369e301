"""A network cut in two: its gradients are those of the whole, and where it cannot be cut is said."""

import numpy as np
import pytest

from edgefl.core.errors import ConfigError, TaskError
from edgefl.core.types import Dataset, TrainConfig
from edgefl.tasks.images import digits, mnist
from edgefl.tasks.learners.torch_learner import TorchLearner
from edgefl.tasks.learners.torch_split import compute_loss_gradient, cut_learner, cut_module, list_cuts
from edgefl.tasks.local_algorithms.local_training import train
from edgefl.tasks.local_algorithms.rest_training import SPLIT_ALGORITHMS, RestTraining

torch = pytest.importorskip("torch", reason="needs torch: pip install '.[train]'")
nn, functional = torch.nn, torch.nn.functional


class Blocks(nn.Module):
    """Functions between modules, a block with a skip connection, and one around two modules."""

    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
        self.middle = nn.Conv2d(4, 4, 3, padding=1)
        self.inner = nn.Conv2d(4, 4, 1)
        self.head = nn.Linear(4 * 4 * 4, 3)

    def forward(self, x):
        x = self.features(x)
        x = functional.max_pool2d(functional.relu(self.middle(x)), 2)
        x = x + functional.relu(self.inner(x))
        return self.head(x.view(x.size(0), -1))


def chain():
    return nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(256, 8), nn.Linear(8, 3))


def images(n=6):
    rng = np.random.default_rng(0)
    return Dataset(inputs=rng.standard_normal((n, 1, 8, 8)).astype(np.float32), targets=rng.integers(0, 3, n))


def learners(network, after, seed=0):
    """Returns a whole learner, and those of another network with the same weights, cut."""
    torch.manual_seed(seed)
    whole = TorchLearner(network(), threads=1)
    parts = cut_learner(TorchLearner(network(), threads=1), after, threads=1)
    for part in parts:
        part.load({name: array for name, array in whole.read().items() if name in part.read()})
    return whole, *parts


def exchange_with_labels_there(training):
    return training.step


def exchange_with_labels_here(training):
    def exchange(activations, labels):
        loss, gradient = compute_loss_gradient(training.forward(activations), labels)
        return loss, training.backward(gradient)

    return exchange


EXCHANGES = [exchange_with_labels_there, exchange_with_labels_here]


@pytest.mark.parametrize("make_exchange", EXCHANGES)
@pytest.mark.parametrize(
    ("network", "after"),
    [(chain, "0"), (chain, "2"), (Blocks, "features"), (Blocks, "features.0"), (Blocks, "middle")],
)
def test_gradients_on_both_sides_are_those_of_the_whole_network(network, after, make_exchange):
    whole, front, rest = learners(network, after)
    plan = TrainConfig(iterations=1, learning_rate=0.0)
    front.exchange = make_exchange(RestTraining(rest, plan, rest.read()))
    assert front.gradient(images()) == pytest.approx(whole.gradient(images()), abs=1e-6)
    both = {**front.gradients, **rest.gradients}
    assert sorted(both) == sorted(whole.gradients)
    for name, gradient in whole.gradients.items():
        np.testing.assert_allclose(both[name].numpy(), gradient.numpy(), atol=1e-6)


@pytest.mark.parametrize("make_exchange", EXCHANGES)
@pytest.mark.parametrize("algorithm", SPLIT_ALGORITHMS)
def test_an_assignment_moves_both_sides_as_it_moves_the_whole_network(algorithm, make_exchange):
    whole, front, rest = learners(Blocks, "features.2")
    plan = TrainConfig(
        algorithm=algorithm, epochs=2, batch_size=4, learning_rate=0.02, momentum=0.5 * (algorithm == "sgd")
    )
    training = RestTraining(rest, plan, rest.read())
    front.exchange = make_exchange(training)
    run = {"clock": lambda: 0.0, "on_iteration": lambda *_: False}
    expected = train(whole, images(), plan, np.random.default_rng(3), **run)
    result = train(front, images(), plan, np.random.default_rng(3), **run)
    assert (result.iterations, training.iterations, result.loss) == (4, 4, pytest.approx(expected.loss, abs=1e-5))
    moved = {**result.displacement, **training.finish()}
    assert sorted(moved) == sorted(expected.displacement)
    for name, displacement in expected.displacement.items():
        np.testing.assert_allclose(moved[name], displacement, atol=2e-5)


def test_a_part_holds_only_its_own_weights():
    front, rest = cut_module(Blocks(), "middle")
    assert {name.partition(".")[0] for name, _ in front.named_parameters()} == {"features", "middle"}
    assert {name.partition(".")[0] for name, _ in rest.named_parameters()} == {"inner", "head"}


@pytest.mark.parametrize(
    ("after", "reason"),
    [
        ("fetures", "no such module"),
        ("", "no such module"),
        ("inner", "another value .* goes past it"),
        ("head", "nothing is to be trained after"),
    ],
)
def test_a_cut_that_is_none_is_answered_with_those_that_are(after, reason):
    with pytest.raises(ConfigError, match=f"split.after must be .*features.0, .*middle.*{reason}") as raised:
        cut_module(Blocks(), after)
    assert list_cuts(Blocks()) == ["features", "features.0", "features.1", "features.2", "middle"]
    assert "\n" not in str(raised.value)


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.head, self.spare = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x):
        return self.head(self.layer(self.layer(x)))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.second(self.first(x))


class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x):
        x = self.first(x)
        return self.second(x if x.sum() > 0 else -x)


@pytest.mark.parametrize(
    ("network", "after", "reason"),
    [
        (Twice, "layer", "called 2 times"),
        (Twice, "spare", "called 0 times"),
        (Tied, "first", "the same weights"),
        (Branching, "first", "cannot follow the network"),
    ],
)
def test_a_network_that_cannot_be_cut_says_why(network, after, reason):
    with pytest.raises(ConfigError, match=rf"\(none\).*{reason}"):
        cut_module(network(), after)


def test_a_network_without_torch_cannot_be_cut():
    with pytest.raises(ConfigError, match=r"split\.after = 'fc1' needs a network of torch.*NumpyLearner"):
        cut_learner(digits().learner(), "fc1")


def test_the_built_in_networks_can_be_cut_after_each_block():
    learner = mnist(model="cnn-small").learner(threads=1)
    assert list_cuts(learner.module) == ["conv1", "relu1", "pool1", "conv2", "relu2", "pool2", "flat", "fc1", "relu3"]
    cuts = list_cuts(mnist(model="resnet18-gn").learner(threads=1).module)
    assert {"stem_relu", "stage1_block1", "stage4_block2"} <= set(cuts)
    assert "stage1_block1.body.0" not in cuts


def test_the_first_layers_alone_do_not_train():
    front, rest = cut_learner(TorchLearner(chain()), "0")
    with pytest.raises(TaskError, match="only with the rest"):
        front.gradient(images())
    with pytest.raises(TaskError, match="before their activations"):
        rest.backward(np.zeros((1, 3)))


def test_labels_that_are_no_classes_of_the_network_are_refused():
    _, rest = cut_learner(TorchLearner(chain()), "0")
    training = RestTraining(rest, TrainConfig(iterations=1), rest.read())
    with pytest.raises(TaskError, match="a label is 3"):
        training.step(np.zeros((1, 4, 8, 8), np.float32), np.array([3]))
    assert training.iterations == 0


@pytest.mark.parametrize(
    ("plan", "message"),
    [({"algorithm": "scaffold"}, "strategy.optimizer"), ({"keeps_state": True}, "strategy.keep_optimizer")],
)
def test_a_plan_that_needs_more_than_a_gradient_is_refused(plan, message):
    _, rest = cut_learner(TorchLearner(chain()), "0")
    with pytest.raises(ConfigError, match=message):
        RestTraining(rest, TrainConfig(iterations=1, **plan), rest.read())

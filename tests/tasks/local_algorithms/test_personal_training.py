"""Training of what stays on a board: FedRep, Ditto and APFL against plain loops over the same formulas."""

from dataclasses import replace

import numpy as np
import pytest

from edgefl.core.errors import ConfigError, DataError
from edgefl.core.types import Dataset, TrainConfig
from edgefl.tasks.learners.torch_learner import TorchLearner
from edgefl.tasks.local_algorithms.local_training import train
from edgefl.tasks.local_algorithms.personal_training import MIXTURE, make_personal_model

RATE, DECAY = 0.1, 0.01


class TwoLayers:
    """head · (body · x), with half the squared error; `head` stays on the board."""

    def __init__(self):
        rng = np.random.default_rng(3)
        self.parameters = {"body": rng.standard_normal((2, 3)), "head": rng.standard_normal(2)}
        self.gradients = {name: np.zeros_like(value) for name, value in self.parameters.items()}

    def load(self, tensors):
        for name, value in tensors.items():
            self.parameters[name][...] = value

    def read(self):
        return {name: value.copy() for name, value in self.parameters.items()}

    def gradient(self, batch):
        loss, body, head = compute_gradients(**self.parameters, data=batch)
        self.gradients["body"][...], self.gradients["head"][...] = body, head
        return loss


def compute_gradients(body, head, data):
    features = data.inputs @ body.T
    errors = features @ head - data.targets
    count = len(data)
    return (
        float(errors @ errors) / (2 * count), np.outer(head, errors @ data.inputs) / count, errors @ features / count
    )  # fmt: skip


def some_data(count=12):
    rng = np.random.default_rng(0)
    return Dataset(inputs=rng.standard_normal((count, 3)), targets=rng.standard_normal(count))


def run(plan, *, learner=None, local=("head",), on_iteration=lambda *_: False, personal=None):
    return train(
        learner or TwoLayers(), some_data(), plan, np.random.default_rng(5), clock=lambda: 0.0,
        on_iteration=on_iteration, local_names=local, personal=personal,
    )  # fmt: skip


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_the_head_is_trained_alone_and_then_the_body_alone(momentum):
    plan = TrainConfig(
        epochs=3.0, head_epochs=2.0, batch_size=12, learning_rate=RATE, weight_decay=DECAY, momentum=momentum
    )
    found, start, data = run(plan), TwoLayers().read(), some_data()
    body, head, losses, velocity = start["body"], start["head"], [], 0.0
    for _ in range(2):
        loss, _, gradient = compute_gradients(body, head, data)
        velocity = momentum * velocity + gradient + DECAY * head
        losses, head = [*losses, loss], head - RATE * velocity
    velocity = 0.0
    for _ in range(3):
        loss, gradient, _ = compute_gradients(body, head, data)
        velocity = momentum * velocity + gradient + DECAY * body
        losses, body = [*losses, loss], body - RATE * velocity
    assert (found.iterations, found.loss) == (5, pytest.approx(np.mean(losses), rel=1e-9))
    np.testing.assert_allclose(found.displacement["head"], head - start["head"], rtol=1e-9)
    np.testing.assert_allclose(found.displacement["body"], body - start["body"], rtol=1e-9)


def test_iterations_are_those_of_the_body_and_a_plan_counts_both():
    plan = TrainConfig(iterations=4, head_epochs=1.5, batch_size=5, learning_rate=RATE)
    # 12 examples in batches of 5 are three iterations a pass.
    assert (plan.count_head_iterations(12), plan.count_iterations(12), run(plan).iterations) == (4, 8, 8)
    assert TrainConfig(seconds=1.0).count_iterations(12) is None


def test_a_board_that_is_told_to_finish_in_the_head_still_trains_the_body_once():
    plan = TrainConfig(epochs=9.0, head_epochs=9.0, batch_size=12, learning_rate=RATE)
    found = run(plan, on_iteration=lambda iteration, _: iteration >= 2)
    assert found.iterations == 3
    assert found.displacement["body"].any()


@pytest.mark.parametrize(
    ("settings", "local", "told"),
    [
        ({"epochs": 1.0}, (), "head_epochs = 2.0: nothing of it stays on the device"),
        ({"epochs": 1.0}, ("head", "body"), "the whole model stays on the device"),
        ({"epochs": 1.0, "keeps_state": True}, ("head",), "begins anew, not with keep_optimizer"),
        ({"seconds": 1.0}, ("head",), "begins anew, not with seconds"),
    ],
)
def test_a_board_refuses_what_it_cannot_train_apart(settings, local, told):
    with pytest.raises(ConfigError, match=told):
        run(TrainConfig(head_epochs=2.0, **settings), local=local)


@pytest.mark.parametrize("value", [0.0, -1.0, 1e9, float("nan")])
def test_passes_over_the_head_have_bounds(value):
    with pytest.raises(ConfigError, match=r"plan.head_epochs must be .*at most 1000"):
        run(TrainConfig(epochs=1.0, head_epochs=value))


@pytest.mark.parametrize("strength", [0.0, 0.7])
def test_a_personal_copy_is_trained_from_where_it_was_and_held_to_the_received_model(strength):
    plan = TrainConfig(iterations=3, personal_lambda=strength, batch_size=12, learning_rate=RATE, weight_decay=DECAY)
    received, data = TwoLayers().read(), some_data()
    copy, kept = dict(received), None
    for _ in range(2):  # the copy goes on in the second round, whatever the model is then
        learner = TwoLayers()
        learner.load(received)
        found = run(plan, learner=learner, local=(), personal=kept)
        for _ in range(3):
            _, *gradients = compute_gradients(**copy, data=data)
            for name, gradient in zip(("body", "head"), gradients, strict=True):
                pull = strength * (copy[name] - received[name])
                copy[name] = copy[name] - RATE * (gradient + pull + DECAY * copy[name])
        kept = learner.read()
        for name, value in copy.items():
            np.testing.assert_allclose(kept[name], value, rtol=1e-9)
        received = {name: value + 0.1 for name, value in received.items()}
    assert found.iterations == 6 == plan.count_iterations(12)


def test_with_a_strong_pull_the_copy_is_the_received_model():
    plan = TrainConfig(iterations=1, personal_lambda=10.0, batch_size=12, learning_rate=0.1)
    learner = TwoLayers()
    start, far = learner.read(), {name: value + 5.0 for name, value in TwoLayers().read().items()}
    run(plan, learner=learner, local=(), personal=far)
    _, *gradients = compute_gradients(**far, data=some_data())
    for name, gradient in zip(("body", "head"), gradients, strict=True):
        # With a rate of 1/λ one step leaves nothing of where the copy was: v = w - g(v)/λ.
        np.testing.assert_allclose(learner.read()[name], start[name] - 0.1 * gradient, rtol=1e-9)


@pytest.mark.parametrize("algorithm", ["sgd", "adam", "gradient"])
def test_the_model_that_is_sent_is_what_it_is_without_a_copy(algorithm):
    plan = TrainConfig(algorithm=algorithm, epochs=2.0, batch_size=5, learning_rate=RATE)
    alone, beside = run(plan), run(replace(plan, personal_lambda=0.5))
    assert (alone.loss, 2 * alone.iterations) == (beside.loss, beside.iterations)
    for name, value in alone.displacement.items():
        assert np.array_equal(value, beside.displacement[name])


@pytest.mark.parametrize(("share", "rate"), [(0.25, 0.1), (0.9, 0.3)])
def test_a_copy_is_trained_in_a_mixture_with_the_model_whose_share_adapts(share, rate):
    plan = TrainConfig(iterations=3, personal_mixture=share, batch_size=12, learning_rate=rate, weight_decay=DECAY)
    received, data, kept = TwoLayers().read(), some_data(), None
    copy = dict(received)
    for number in range(3):
        learner = TwoLayers()
        learner.load(received)
        found = run(plan, learner=learner, local=(), personal=kept)
        model = dict(received)
        for step in range(3):
            mixed = {name: share * copy[name] + (1 - share) * model[name] for name in model}
            (_, *slopes), (_, *steps) = (compute_gradients(**each, data=data) for each in (mixed, model))
            slope = sum(((copy[n] - model[n]) * g).sum() for n, g in zip(("body", "head"), slopes, strict=True))
            for name, of_mixture, of_model in zip(("body", "head"), slopes, steps, strict=True):
                copy[name] = copy[name] - rate * (share * of_mixture + DECAY * copy[name])
                model[name] = model[name] - rate * (of_model + DECAY * model[name])
            if step == 0:
                share = min(1.0, max(0.0, share - rate * slope))
        kept = found.personal
        assert kept[MIXTURE] == pytest.approx([share, share], rel=1e-9)
        for name, value in copy.items():
            np.testing.assert_allclose(kept[name], value, rtol=1e-9)
            np.testing.assert_allclose(learner.read()[name], model[name], rtol=1e-9)
            np.testing.assert_allclose(found.displacement[name], model[name] - received[name], rtol=1e-9)
            own = make_personal_model(kept, received)[name]
            np.testing.assert_allclose(own, share * value + (1 - share) * received[name], rtol=1e-9)
        received = {name: value + 0.1 * number for name, value in received.items()}
    assert found.iterations == 6 == plan.count_iterations(12)
    assert share not in {0.25, 0.9}


def test_a_share_of_one_is_training_alone_and_buffers_are_the_copys_own():
    torch = pytest.importorskip("torch", reason="needs torch: pip install '.[train]'")
    layers = torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1)
    learner, data = TorchLearner(torch.nn.Sequential(*layers), loss="mse"), some_data()
    data = Dataset(inputs=data.inputs.astype(np.float32), targets=data.targets.astype(np.float32))
    first = learner.read()
    far = {name: np.asarray(array + 1) for name, array in first.items()} | {MIXTURE: np.ones(len(first))}
    plan = TrainConfig(iterations=2, batch_size=12, learning_rate=0.0)

    def trained(plan, start, personal=None):
        learner.load(start)
        rng = np.random.default_rng(5)
        found = train(learner, data, plan, rng, clock=lambda: 0.0, on_iteration=lambda *_: False, personal=personal)
        return learner.read(), found.personal

    alone = [trained(plan, start)[0] for start in (first, {name: far[name] for name in first})]
    model, copy = trained(replace(plan, personal_mixture=0.5), first, far)
    assert make_personal_model(copy, first).keys() == first.keys()
    for name in first:
        np.testing.assert_allclose(model[name], alone[0][name], rtol=1e-6)
        np.testing.assert_allclose(copy[name], alone[1][name], rtol=1e-6)
    assert not np.allclose(copy["1.running_mean"], model["1.running_mean"])
    with pytest.raises(DataError, match=r"shares of a personal copy must be 9 numbers from 0 to 1, got \[2\."):
        make_personal_model({**copy, MIXTURE: np.full(9, 2.0)}, first)
    half = np.where([name.startswith("1.") for name in sorted(first)], 1.0, 0.5)
    own = make_personal_model({**copy, MIXTURE: half}, first)
    np.testing.assert_array_equal(own["1.num_batches_tracked"], copy["1.num_batches_tracked"])
    np.testing.assert_allclose(own["0.bias"], 0.5 * (copy["0.bias"] + first["0.bias"]), rtol=1e-6)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"epochs": 1.0, "head_epochs": 1.0}, "begins anew, not with head_epochs"),
        ({"seconds": 1.0}, "begins anew, not with seconds"),
        (
            {"epochs": 1.0, "personal_lambda": -1.0},
            "plan.personal_lambda must be a number at least 0 and at most 1000",
        ),
        ({"epochs": 1.0, "personal_lambda": 1e9}, "plan.personal_lambda must be .*at most 1000"),
        ({"epochs": 1.0, "personal_mixture": 0.5}, "personal_mixture = 0.5 goes .*not with personal_lambda"),
        ({"epochs": 1.0, "personal_mixture": 1.5}, "plan.personal_mixture must be a number above 0 and at most 1"),
    ],
)
def test_a_copy_that_cannot_be_trained_is_one_clear_line(settings, told):
    with pytest.raises(ConfigError, match=told):
        run(TrainConfig(**{"personal_lambda": 0.5, **settings}))

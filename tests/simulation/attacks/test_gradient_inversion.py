"""Gradient inversion: exact on plain updates of one example, and not on private or added ones."""

from importlib.util import find_spec

import numpy as np
import pytest

from edgefl.core.config import parse_run
from edgefl.core.errors import ConfigError, DataError
from edgefl.core.types import Dataset
from edgefl.simulation.attacks.gradient_inversion import (
    audit_inversion,
    compute_errors,
    divide_by_bias,
    span_examples,
)
from edgefl.simulation.simulated_run import prepare_simulation
from edgefl.tasks.learners import torch_learner
from edgefl.tasks.learners.gradient_matching import make_matcher
from edgefl.tasks.learners.numpy_learner import DenseModel

PLAIN = {
    "run": {"task": "digits", "rounds": 20, "seed": 3, "evaluate_on": "none"},
    "strategy": {"name": "fedavg", "epochs": 1, "learning_rate": 0.1},
    "guard": {"enabled": False},
}
SECURE = {
    "devices": {"min": 3},
    "guard": {"enabled": False, "max_weight_ratio": 0},
    "secure_aggregation": {"enabled": True},
}


@pytest.fixture
def invert():
    def call(changes=None, *, devices=4, **options):
        config, data = prepare_simulation(parse_run({**PLAIN, **(changes or {})}), devices=devices)
        found = audit_inversion(config, data, **{"num_trials": 2, **options})
        return {(audit.settings, audit.seen_by): audit for audit in found}

    return call


def test_one_example_is_recovered_from_a_plain_update_and_not_from_that_of_private_gradients(invert):
    found = invert({"privacy": {"unit": "example", "epsilon": 8, "delta": 1e-5, "clip": 1.0}})
    plain, private = found["plain", "coordinator"], found["run", "coordinator"]
    assert (plain.recovered, plain.boards, plain.examples, plain.trials) == (1.0, 1, 1, 2)
    assert plain.error < 1e-9
    assert plain.baseline > 0.5
    assert private.recovered == 0.0
    assert private.error > 0.5


def test_one_example_is_recovered_after_several_local_steps_and_from_a_part_of_the_update(invert):
    steps = invert({"strategy": {"name": "fedavg", "epochs": 3, "learning_rate": 0.1}})
    assert steps["plain", "coordinator"].error < 1e-9
    part = invert({"compression": {"up": "topk:0.5"}})["run", "coordinator"]
    assert part.error < 0.1
    assert part.recovered == 1.0


def test_a_sum_of_many_boards_hides_their_examples_and_one_of_few_small_ones_does_not(invert):
    many = invert(SECURE, devices=24, num_trials=1)
    assert many.keys() == {("plain", "coordinator"), ("run", "coordinator")}
    assert many["plain", "coordinator"].recovered == 1.0
    assert many["run", "coordinator"].boards == 17, "the least that a threshold of 0.67 opens of 24"
    assert many["run", "coordinator"].recovered == 0.0
    few = invert(SECURE, devices=4, num_trials=1)["run", "coordinator"]
    assert (few.boards, few.recovered) == (3, 1.0), "a sum of three examples is as an update of three"


def test_two_examples_are_recovered_by_matching_their_gradient(invert):
    plain = invert(num_examples=2)["plain", "coordinator"]
    assert plain.recovered == 1.0
    assert plain.error < 1e-6


@pytest.mark.skipif(
    find_spec("dp_accounting") is None,
    reason="dp-accounting is not installed: pip install -e '.[privacy]' -c constraints.txt",
)
def test_privacy_of_devices_hides_nothing_from_the_coordinator(invert):
    privacy = {"unit": "device", "epsilon": 8, "delta": 1e-5, "clip": 1.0, "boards": 4}
    found = invert({"privacy": privacy}, num_trials=1)
    assert found["run", "coordinator"].recovered == 1.0
    assert found["run", "models"].recovered == 0.0


def make_gradient(sizes, number, *, dtype="float32"):
    rng, model = np.random.default_rng(2), DenseModel(sizes=sizes)
    learner = model.learner()
    learner.load(model.init(0))
    features, targets = rng.random((number, sizes[0])), rng.integers(sizes[-1], size=number)
    learner.gradient(Dataset(inputs=features.astype(dtype), targets=targets))
    return learner, {name: value.copy() for name, value in learner.gradients.items()}, features, targets


def test_an_example_is_the_quotient_of_a_logistic_regressions_gradients():
    _, gradients, features, _ = make_gradient((12, 3), 1)
    found = divide_by_bias(gradients["fc1.weight"], gradients["fc1.bias"])
    assert found == pytest.approx(features[0], abs=1e-5)
    sent = np.where(np.arange(12) % 3, gradients["fc1.weight"], 0.0)
    assert divide_by_bias(sent, gradients["fc1.bias"])[1] == pytest.approx(features[0, 1], abs=1e-5)
    assert divide_by_bias(sent, gradients["fc1.bias"])[0] == 0.0
    gradients["fc1.weight"][0, 5] = 0.0
    assert divide_by_bias(gradients["fc1.weight"], gradients["fc1.bias"])[5] == pytest.approx(
        features[0, 5], abs=1e-5
    )


def test_examples_lie_in_the_span_of_the_first_layers_gradient():
    _, gradients, features, _ = make_gradient((12, 16, 3), 3)
    origin, directions = span_examples(gradients["fc1.weight"], gradients["fc1.bias"], 3)
    assert directions.shape == (2, 12)
    weights = np.linalg.lstsq(directions.T, (features - origin).T, rcond=None)[0].T
    assert origin + weights @ directions == pytest.approx(features, abs=1e-4)


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_the_slope_of_a_distance_is_that_of_differences_and_the_distance_is_0_at_the_batch(kind):
    learner, gradients, features, targets = make_gradient((6, 8, 3), 2)
    if kind == "torch":
        torch = pytest.importorskip("torch", reason="needs torch: pip install '.[train]'")
        module = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
        names = dict(zip(gradients, ("0.weight", "0.bias", "2.weight", "2.bias"), strict=True))
        weights, learner = learner.read(), torch_learner.TorchLearner(module)
        learner.load({names[name]: value for name, value in weights.items()})
        gradients = {names[name]: value for name, value in gradients.items()}
    matcher = make_matcher(learner, gradients, targets)
    assert matcher.compute(features)[0] == pytest.approx(0.0, abs=1e-9)
    elsewhere = features + 0.2 * np.random.default_rng(3).standard_normal(features.shape)
    distance, slope = matcher.compute(elsewhere)
    assert 1e-4 < distance < 2.0
    for place in ((0, 1), (1, 4)):
        step = np.zeros_like(features)
        step[place] = 1e-5
        difference = (matcher.compute(elsewhere + step)[0] - matcher.compute(elsewhere - step)[0]) / 2e-5
        assert slope[place] == pytest.approx(difference, rel=1e-3, abs=1e-8)


def test_errors_are_parts_of_that_of_the_mean():
    pool = np.array([[0.0, 0.0], [2.0, 0.0], [0.0, 2.0], [2.0, 2.0]])
    real = pool[:2]  # each at a squared distance of 2 from the mean (1, 1)
    assert compute_errors(real, np.array([[1.0, 1.0]]), pool) == pytest.approx([1.0, 1.0])
    assert compute_errors(real, np.array([[0.0, 0.0], [2.0, 1.0]]), pool) == pytest.approx([0.0, 0.5])


@pytest.mark.parametrize(
    ("changes", "options", "error", "message"),
    [
        ({}, {"num_examples": 9}, ConfigError, "gradient inversion is of 1 to 8 examples, got 9"),
        ({}, {"num_trials": 0}, ConfigError, "at least 1 board, got 0"),
        (
            {"simulation": {"scheme": "iid"}},
            {"devices": 300, "num_examples": 8},
            DataError,
            "no device holds 8 examples",
        ),
    ],
)
def test_what_cannot_be_inverted_is_said_in_a_line(invert, changes, options, error, message):
    with pytest.raises(error, match=message):
        invert(changes, **options)

"""SGD and its relatives against numbers computed by hand, in NumPy and in torch."""

import importlib.util

import numpy as np
import pytest
from tasks.step_learner import Dictated

from edgefl.decentralised.node import Correction
from edgefl.errors import ConfigError
from edgefl.tasks.descent import CorrectedStep
from edgefl.tasks.local_steps import make_local_step
from edgefl.types import LocalPlan

HAS_TORCH = importlib.util.find_spec("torch") is not None
BACKENDS = ["numpy", pytest.param("torch", marks=pytest.mark.skipif(not HAS_TORCH, reason="torch is missing"))]


def weights_after(backend, gradients, *, start=0.0, **plan):
    learner = Dictated(backend, start=start)
    step = make_local_step(LocalPlan(iterations=1, **plan))
    step.begin(learner)
    found = [float(weights[0]) for weights in learner.follow(step, gradients)]
    step.end(learner)
    return found


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("plan", "expected"),
    [
        ({"algorithm": "sgd", "learning_rate": 0.1}, [-0.2, -0.3]),
        ({"algorithm": "sgd", "learning_rate": 0.1, "momentum": 0.5}, [-0.2, -0.4]),
        ({"algorithm": "decay", "learning_rate": 0.03}, [-0.06, -0.06 - 0.03 / 2**0.5]),
        ({"algorithm": "decay", "learning_rate": 0.03, "momentum": 0.5}, [-0.06, -0.06 - 0.06 / 2**0.5]),
        ({"algorithm": "prox", "learning_rate": 0.1, "options": {"mu": 0.5}}, [-0.2, -0.2 - 0.1 * 0.9]),
        ({"algorithm": "prox", "learning_rate": 0.1}, [-0.2, -0.2 - 0.1 * (1 - 0.01 * 0.2)]),
    ],
    ids=str,
)
def test_two_iterations_with_the_gradients_two_and_one_are_those_of_the_formula(backend, plan, expected):
    assert weights_after(backend, [2.0, 1.0], **plan) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_proximal_term_pulls_towards_the_start_and_not_towards_zero(backend):
    plan = {"algorithm": "prox", "learning_rate": 0.1, "options": {"mu": 0.5}}
    assert weights_after(backend, [0.0, 0.0], start=7.0, **plan) == [7.0, 7.0]
    assert weights_after(backend, [2.0, 0.0], start=7.0, **plan)[1] == pytest.approx(6.8 + 0.1 * 0.5 * 0.2)


def test_without_its_term_prox_is_sgd_to_the_bit():
    gradients = [0.3, -1.7, 0.011, 5.0]
    prox = weights_after("numpy", gradients, algorithm="prox", options={"mu": 0}, momentum=0.9, weight_decay=0.01)
    assert prox == weights_after("numpy", gradients, algorithm="sgd", momentum=0.9, weight_decay=0.01)


def test_a_proximal_term_below_zero_is_one_clear_line():
    with pytest.raises(ConfigError, match="mu of local algorithm prox must be 0 or more, got -1"):
        make_local_step(LocalPlan(algorithm="prox", iterations=1, options={"mu": -1}))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_node_s_step_is_corrected_and_shrunk_and_momentum_is_of_the_gradient_alone(backend):
    # w <- (w - 0.1 (v - 3)) / (1 + 0.1 * 2), v <- 0.5 v + g, by hand
    learner = Dictated(backend, start=1.0)
    step = CorrectedStep(
        LocalPlan(iterations=2, learning_rate=0.1, momentum=0.5),
        Correction(correction={"w": np.array([3.0], np.float32)}, shrinkage=2.0),
    )
    step.begin(learner)
    first, second = (float(weights[0]) for weights in learner.follow(step, [2.0, 1.0]))
    assert first == pytest.approx((1 - 0.1 * (2 - 3)) / 1.2, rel=1e-6)
    assert second == pytest.approx((first - 0.1 * (2 - 3)) / 1.2, rel=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_without_a_correction_a_node_s_step_is_sgd_to_the_bit(backend):
    plan = LocalPlan(iterations=2, learning_rate=0.1, momentum=0.5, weight_decay=0.01)
    plain, node = Dictated(backend, start=1.0), Dictated(backend, start=1.0)
    steps = make_local_step(plan), CorrectedStep(plan, Correction())
    for learner, step in zip((plain, node), steps, strict=True):
        step.begin(learner)
        learner.follow(step, [2.0, 1.0, -3.0])
    assert plain.weights().tobytes() == node.weights().tobytes()

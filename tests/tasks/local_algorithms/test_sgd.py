"""SGD and its relatives against numbers computed by hand, in NumPy and in torch."""

import numpy as np
import pytest
from tasks.step_learner import Dictated, begun, on_each_backend

from edgefl.core.types import TrainConfig
from edgefl.decentralised.algorithm import GradientCorrection
from edgefl.tasks.local_algorithms.registry import make_local_algorithm
from edgefl.tasks.local_algorithms.sgd import DriftCorrectedSgd


def weights_after(backend, gradients, *, start=0.0, **plan):
    learner = Dictated(backend, start=start)
    step = begun(learner, **plan)
    found = [float(weights[0]) for weights in learner.follow(step, gradients)]
    step.finish(learner)
    return found


@on_each_backend
@pytest.mark.parametrize(
    ("algorithm", "learning_rate", "plan", "expected"),
    [
        ("sgd", 0.1, {}, [-0.2, -0.3]),
        ("sgd", 0.1, {"momentum": 0.5}, [-0.2, -0.4]),
        ("decay", 0.03, {}, [-0.06, -0.06 - 0.03 / 2**0.5]),
        ("decay", 0.03, {"momentum": 0.5}, [-0.06, -0.06 - 0.06 / 2**0.5]),
        ("prox", 0.1, {"options": {"mu": 0.5}}, [-0.2, -0.2 - 0.1 * 0.9]),
        ("prox", 0.1, {}, [-0.2, -0.2 - 0.1 * (1 - 0.01 * 0.2)]),
    ],
)
def test_two_iterations_with_the_gradients_two_and_one_are_those_of_the_formula(
    backend, algorithm, learning_rate, plan, expected
):
    found = weights_after(backend, [2.0, 1.0], algorithm=algorithm, learning_rate=learning_rate, **plan)
    assert found == pytest.approx(expected, rel=1e-5)


@on_each_backend
def test_the_proximal_term_pulls_towards_the_start_and_not_towards_zero(backend):
    plan = {"algorithm": "prox", "learning_rate": 0.1, "options": {"mu": 0.5}}
    assert weights_after(backend, [0.0, 0.0], start=7.0, **plan) == [7.0, 7.0]
    assert weights_after(backend, [2.0, 0.0], start=7.0, **plan)[1] == pytest.approx(6.8 + 0.1 * 0.5 * 0.2)


def test_without_its_term_prox_is_sgd_to_the_bit():
    gradients, plan = [0.3, -1.7, 0.011, 5.0], {"momentum": 0.9, "weight_decay": 0.01}
    prox = weights_after("numpy", gradients, algorithm="prox", options={"mu": 0}, **plan)
    assert prox == weights_after("numpy", gradients, algorithm="sgd", **plan)


@on_each_backend
def test_a_node_s_step_is_corrected_and_shrunk_and_momentum_is_of_the_gradient_alone(backend):
    # w <- (w - 0.1 (v - 3)) / (1 + 0.1 * 2), v <- 0.5 v + g, by hand
    learner = Dictated(backend, start=1.0)
    step = DriftCorrectedSgd(
        TrainConfig(iterations=2, learning_rate=0.1, momentum=0.5),
        GradientCorrection(correction={"w": np.array([3.0], np.float32)}, shrinkage=2.0),
    )
    step.start(learner)
    first, second = (float(weights[0]) for weights in learner.follow(step, [2.0, 1.0]))
    assert first == pytest.approx((1 - 0.1 * (2 - 3)) / 1.2, rel=1e-6)
    assert second == pytest.approx((first - 0.1 * (2 - 3)) / 1.2, rel=1e-6)


@on_each_backend
def test_without_a_correction_a_node_s_step_is_sgd_to_the_bit(backend):
    plan = TrainConfig(iterations=2, learning_rate=0.1, momentum=0.5, weight_decay=0.01)
    ends = []
    for step in (make_local_algorithm(plan), DriftCorrectedSgd(plan, GradientCorrection())):
        learner = Dictated(backend, start=1.0)
        step.start(learner)
        learner.follow(step, [2.0, 1.0, -3.0])
        ends.append(learner.weights().tobytes())
    assert ends[0] == ends[1]

"""SGD and its relatives against numbers computed by hand, in NumPy and in torch."""

import logging

import numpy as np
import pytest
from tasks.step_learner import Dictated, begun, needs_torch, on_each_backend

from edgefl.core.errors import ConfigError
from edgefl.core.types import TrainConfig
from edgefl.strategies.peer_algorithms.algorithm import GradientCorrection
from edgefl.tasks.local_algorithms.optimizers import DriftCorrectedSgd, Moments, zeros_like
from edgefl.tasks.local_algorithms.registry import BUILT_IN, StatefulLocalAlgorithm, make_local_algorithm

GRADIENTS = [2.0, -1.0, 0.5, 0.25, 3.0, -0.125]
LASTING = sorted(set(BUILT_IN) - {"gradient", "dp-sgd"})


def a_step(learner, algorithm):
    momentum = 0.9 if algorithm in ("sgd", "decay", "prox") else 0.0
    # The proximal pull is towards each assignment's own start, which two assignments do not share.
    return begun(learner, algorithm=algorithm, momentum=momentum, options={"mu": 0} if algorithm == "prox" else {})


@on_each_backend
@pytest.mark.parametrize("algorithm", LASTING)
def test_two_assignments_with_kept_state_are_one_long_one(algorithm, backend):
    whole, parts = Dictated(backend), Dictated(backend)
    whole.follow(a_step(whole, algorithm), GRADIENTS)
    first = a_step(parts, algorithm)
    parts.follow(first, GRADIENTS[:3])
    state = first.state()
    before = {name: value.copy() for name, value in state.items()}
    second = a_step(parts, algorithm)
    second.restore(state)
    parts.follow(second, GRADIENTS[3:])
    assert parts.weights() == whole.weights()
    assert all(isinstance(value, np.ndarray) for value in state.values())
    first.step(parts, range(1))
    assert all(np.array_equal(state[name], before[name]) for name in before), "the state is a copy"


@needs_torch
def test_a_state_moves_between_the_backends():
    ours, theirs = Dictated("numpy"), Dictated("torch")
    step, other = a_step(ours, "adam"), a_step(theirs, "adam")
    ours.follow(step, GRADIENTS[:3])
    theirs.parameters["w"] += float(ours.weights()[0])
    other.restore(step.state())
    np.testing.assert_allclose(theirs.follow(other, GRADIENTS[3:]), ours.follow(step, GRADIENTS[3:]), rtol=1e-5)


def test_one_long_step_along_the_gradient_has_no_state():
    assert not isinstance(a_step(Dictated("numpy"), "gradient"), StatefulLocalAlgorithm)


@pytest.mark.parametrize(
    "saved",
    [
        {},
        {"iterations": np.array(4)},
        {"iterations": np.array(4), "velocity/w": np.ones(2, np.float32)},
        {"iterations": np.array(4), "velocity/w": np.ones(1), "velocity/v": np.ones(1)},
        {"velocity/w": np.ones(1)},
    ],
    ids=["nothing", "no arrays", "another shape", "one more", "no count"],
)
def test_a_state_of_another_model_is_left_aside_with_a_warning(saved, caplog):
    moments = Moments("velocity")
    moments.reset(Dictated("numpy"))
    with caplog.at_level(logging.WARNING):
        moments.restore(saved)
    assert "begin anew" in caplog.text
    assert (moments.iterations, moments.get("w")[0].tolist()) == (0, [0.0])


@pytest.mark.parametrize("shape", [(), (0,), (2, 3)])
def test_zeros_are_arrays_of_the_same_shape_even_without_dimensions(shape):
    zeros = zeros_like({"w": np.full(shape, np.nan, np.float32)})["w"]
    assert isinstance(zeros, np.ndarray)
    assert (zeros.shape, zeros.dtype, zeros.any()) == (shape, np.float32, False)


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


# Two iterations with the gradients 2 and 1 from 0. By hand, for Adam's second: mean 0.28 / 0.19, square 0.004996 /
# 0.001999, so a step of 0.001 · 1.473684 / 1.580901; for AdaDelta's: √(1e-6 + 1e-6) / √0.240001.
BY_HAND = {
    "adam": (0.001, [-0.001, -0.001932180]),
    "rmsprop": (0.01, [-0.0316228, -0.0463670]),
    "adagrad": (0.01, [-0.01, -0.0144721]),
    "adadelta": (1.0, [-0.00447213, -0.00735887]),
}


@on_each_backend
@pytest.mark.parametrize("algorithm", BY_HAND)
def test_two_iterations_are_those_of_the_formula(algorithm, backend):
    learning_rate, expected = BY_HAND[algorithm]
    learner = Dictated(backend)
    step = begun(learner, algorithm=algorithm, learning_rate=learning_rate)
    assert [weights[0] for weights in learner.follow(step, [2.0, 1.0])] == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("algorithm", BY_HAND)
def test_twenty_iterations_are_those_of_torchs_optimiser(algorithm):
    torch = pytest.importorskip("torch", reason="needs torch: pip install '.[train]'")
    weight = torch.nn.Parameter(torch.full((5,), 0.3))
    theirs = {
        "adam": lambda: torch.optim.Adam([weight], lr=0.01, weight_decay=0.1),
        "rmsprop": lambda: torch.optim.RMSprop([weight], lr=0.01, alpha=0.9, eps=1e-7, weight_decay=0.1),
        "adagrad": lambda: torch.optim.Adagrad([weight], lr=0.01, eps=1e-7, weight_decay=0.1),
        "adadelta": lambda: torch.optim.Adadelta([weight], lr=0.01, rho=0.95, eps=1e-6, weight_decay=0.1),
    }[algorithm]()
    learner = Dictated("numpy", size=5, start=0.3)
    step = begun(learner, algorithm=algorithm, learning_rate=0.01, weight_decay=0.1)
    gradients = np.random.default_rng(0).standard_normal((20, 5)).astype(np.float32)
    learner.follow(step, gradients)
    for gradient in gradients:
        weight.grad = torch.from_numpy(gradient)
        theirs.step()
    np.testing.assert_allclose(learner.weights(), weight.detach().numpy(), rtol=1e-4, atol=1e-6)


def test_an_option_of_the_plan_replaces_its_default():
    learner = Dictated("numpy")
    step = begun(learner, algorithm="rmsprop", learning_rate=1.0, options={"alpha": 0.0, "epsilon": 1.0})
    assert learner.follow(step, [3.0])[0] == pytest.approx([-3.0 / 4.0])
    learner = Dictated("numpy", size=2)
    step = begun(learner, algorithm="adam", learning_rate=0.5, options={"beta1": 0.0, "beta2": 0.0})
    assert learner.follow(step, [[1e-3, -1e3]])[0] == pytest.approx([-0.5, 0.5], rel=1e-4), "without memory"


@pytest.mark.parametrize(
    ("algorithm", "plan", "message"),
    [
        ("adam", {"options": {"beta_1": 0.9}}, "adam has no option 'beta_1', only beta1, beta2, epsilon"),
        ("adam", {"options": {"beta1": 1.0}}, "beta1 of local algorithm adam must be 0 or more and below"),
        ("rmsprop", {"options": {"epsilon": 0}}, "epsilon of local algorithm rmsprop must be above 0"),
        ("adadelta", {"options": {"alpha": "high"}}, "got 'high'"),
        ("adagrad", {"options": {"epsilon": True}}, "got True"),
        ("adagrad", {"options": {"epsilon": float("nan")}}, "got nan"),
        ("adam", {"momentum": 0.9}, "adam takes no momentum, got 0.9; leave it 0"),
        ("prox", {"options": {"mu": -1}}, "mu of local algorithm prox must be 0 or more, got -1"),
        ("sgd", {"options": {"mu": 0.1}}, "sgd has no option 'mu', only none"),
        ("gradient", {"options": {"mu": 0.1}}, "gradient has no option 'mu'"),
    ],
)
def test_an_option_that_the_algorithm_does_not_have_or_that_makes_no_sense_is_one_clear_line(
    algorithm, plan, message
):
    with pytest.raises(ConfigError, match=message):
        make_local_algorithm(TrainConfig(algorithm=algorithm, iterations=1, **plan))

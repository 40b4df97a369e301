"""The adaptive local algorithms against numbers computed by hand and against torch's own optimisers."""

import numpy as np
import pytest
from tasks.step_learner import Dictated, begun, on_each_backend

from edgefl.core.errors import ConfigError
from edgefl.core.types import TrainConfig
from edgefl.tasks.local_algorithms.registry import make_local_algorithm

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

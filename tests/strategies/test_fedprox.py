import pytest

from edgefl.errors import ConfigError
from edgefl.strategies.registry import make_strategy
from edgefl.strategies.rounds import RoundRules


def test_the_plan_has_the_proximal_term_and_everything_else_of_fedavg():
    prox = make_strategy("fedprox", {"mu": 0.1, "epochs": 2.0, "momentum": 0.9}, RoundRules())
    average = make_strategy("fedavg", {"epochs": 2.0, "momentum": 0.9}, RoundRules())
    assert (prox.plan.algorithm, dict(prox.plan.options)) == ("prox", {"mu": 0.1})
    assert (prox.plan.epochs, prox.plan.momentum) == (average.plan.epochs, average.plan.momentum)
    assert prox.weigh is average.weigh


@pytest.mark.parametrize("mu", [-0.1, float("nan"), float("inf")])
def test_a_mu_that_makes_no_sense_is_refused(mu):
    with pytest.raises(ConfigError, match=r"strategy\.mu must be a number of 0 or more, got"):
        make_strategy("fedprox", {"mu": mu}, RoundRules())


def test_another_optimizer_than_its_own_is_refused():
    with pytest.raises(ConfigError, match=r"strategy\.optimizer: fedprox trains with its own, prox, got 'adam'"):
        make_strategy("fedprox", {"optimizer": "adam"}, RoundRules())

"""The settings that strategies share, and the plans they make."""

import pytest

from edgefl.core.errors import ConfigError
from edgefl.strategies.strategy_config import StrategyConfig


def test_epochs_are_the_budget_unless_another_one_is_given():
    assert StrategyConfig(epochs=2.0).plan().epochs == 2.0
    by_steps, by_time = StrategyConfig(iterations=3).plan(), StrategyConfig(seconds=1.5).plan()
    assert (by_steps.iterations, by_steps.epochs, by_steps.seconds) == (3, None, None)
    assert (by_time.iterations, by_time.epochs, by_time.seconds) == (None, None, 1.5)


def test_every_setting_of_the_device_is_in_its_plan():
    plan = StrategyConfig(
        learning_rate=0.3, batch_size=7, optimizer="adam", momentum=0.1, weight_decay=0.2, keep_optimizer=True
    ).plan()
    assert (plan.learning_rate, plan.batch_size, plan.algorithm) == (0.3, 7, "adam")
    assert (plan.momentum, plan.weight_decay, plan.keeps_state) == (0.1, 0.2, True)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("epochs", 0.0),
        ("iterations", 0),
        ("seconds", -1.0),
        ("batch_size", 0),
        ("learning_rate", float("nan")),
        ("learning_rate", -0.1),
        ("momentum", float("inf")),
        ("weight_decay", -1.0),
    ],
)
def test_a_setting_that_no_device_could_follow_is_refused_by_name(name, value):
    with pytest.raises(ConfigError, match=rf"strategy\.{name} must be"):
        StrategyConfig(**{name: value}).plan()


def test_two_budgets_are_refused():
    with pytest.raises(ConfigError, match="two budgets"):
        StrategyConfig(iterations=1, seconds=1.0).plan()

"""The settings that strategies share, the plans they make, and learning rates by round worked out by hand."""

import pytest

from edgefl.core.errors import ConfigError, StrategyError
from edgefl.strategies.strategy_config import SCHEDULES, StrategyConfig, parse_schedule


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


def test_the_threshold_of_consistency_is_in_a_plan_with_consistency_alone():
    assert StrategyConfig().plan().consistency_threshold is None, "a board of an older release does not know it"
    assert StrategyConfig(consistency_weight=1.0).plan().consistency_threshold == 0.95
    assert StrategyConfig(consistency_weight=1.0, consistency_threshold=0.5).plan().consistency_threshold == 0.5


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


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("constant", [1, 1, 1, 1, 1]),
        ("step:2:0.5", [1, 1, 0.5, 0.5, 0.25]),
        ("exponential:0.5", [1, 0.5, 0.25, 0.125, 0.0625]),
        ("inverse-sqrt", [1, 2**-0.5, 3**-0.5, 0.5, 5**-0.5]),
        ("cosine:4", [1, 0.5 + 2**-1.5, 0.5, 0.5 - 2**-1.5, 0]),
        ("linear:4", [1, 0.75, 0.5, 0.25, 0]),
        ("linear:4:0.5", [1, 1, 1, 0.5, 0]),
    ],
)
def test_the_factor_follows_the_closed_rounds(spec, expected):
    schedule = parse_schedule(spec)
    assert [schedule(done) for done in range(5)] == pytest.approx(expected, abs=1e-12)


def test_a_schedule_that_ends_stays_at_its_end_and_each_that_is_listed_begins_at_one():
    for ends in ("linear:4", "linear:4:0.5", "cosine:4"):
        assert parse_schedule(ends)(100) == 0.0
    for listed in SCHEDULES:
        assert parse_schedule(listed.replace("N", "5").replace("F", "0.9"))(0) == 1.0


@pytest.mark.parametrize(
    "spec",
    [
        "",
        "steps:2:0.5",
        "step:2",
        "linear",
        "linear:x",
        "linear:0",
        "linear:4:1.5",
        "linear:4:0",
        "linear:4:0.1:0.1",
        "step:2:-1",
        "cosine:inf",
    ],
)
def test_a_schedule_that_makes_no_sense_is_refused_with_its_text(spec):
    with pytest.raises(ConfigError, match=r"strategy\.schedule") as caught:
        parse_schedule(spec)
    assert repr(spec) in str(caught.value)


@pytest.mark.parametrize("spec", ["exponential:2", "step:1:1e300", "step:1e-300:2", "step:1e-320:2"])
def test_a_schedule_that_outgrows_all_numbers_says_so_by_its_text(spec):
    schedule = parse_schedule(spec)
    assert schedule(0) == 1.0
    with pytest.raises(StrategyError, match=r"strategy\.schedule .* after 2000 closed rounds") as caught:
        schedule(2000)
    assert repr(spec) in str(caught.value)

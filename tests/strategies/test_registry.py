import re
import sys

import pytest

from edgefl.errors import ConfigError, StrategyError
from edgefl.strategies.registry import BUILT_IN, find_strategy, make_strategy, settings_of, strategy_names
from edgefl.strategies.rounds import RoundRules

OWN = """
from dataclasses import dataclass
from typing import Optional
from edgefl.types import Strategy

@dataclass(frozen=True, kw_only=True)
class Mine:
    pace: float
    limit: int | None = None
    note: Optional[str] = None
    def build(self, rules):
        return self, rules

class Plain:
    def __init__(self, *, speed=1):
        self.speed = speed

class OfTheProtocol(Strategy):
    pass

not_a_class = 3
"""


@pytest.fixture
def own_module(tmp_path, monkeypatch):
    (tmp_path / "my_strategies.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    yield "my_strategies"
    sys.modules.pop("my_strategies", None)


def test_every_built_in_strategy_is_listed_and_can_be_made():
    assert {"fedavg", "ssgd"} <= set(BUILT_IN) <= set(strategy_names())
    for name in BUILT_IN:
        assert make_strategy(name, {}, RoundRules()).init({}) is not None


def test_an_unknown_name_is_answered_with_the_known_ones():
    with pytest.raises(StrategyError, match=r"unknown strategy 'fedavgg'; known: .*fedavg, .*ssgd"):
        find_strategy("fedavgg")


@pytest.mark.parametrize("name", ["no_such_module_anywhere:Class", "edgefl.loop:NoSuchClass", ":Class", ".loop:Goal"])
def test_a_path_that_leads_nowhere_is_one_clear_error(name):
    with pytest.raises(StrategyError, match=re.escape(f"strategy {name!r} cannot be imported")):
        find_strategy(name)


def test_something_that_is_no_class_is_refused(own_module):
    with pytest.raises(StrategyError, match="must be a class, got int"):
        find_strategy(f"{own_module}:not_a_class")


def test_an_unknown_option_is_answered_with_the_known_ones():
    with pytest.raises(ConfigError, match=r"strategy.epoch: fedavg has no such setting; known: .*epochs"):
        make_strategy("fedavg", {"epoch": 2}, RoundRules())


@pytest.mark.parametrize(
    ("option", "value", "wanted"),
    [
        ("learning_rate", "fast", "a number"),
        ("learning_rate", True, "a number"),
        ("iterations", 2.5, "a whole number"),
        ("iterations", True, "a whole number"),
        ("batch_size", "32", "a whole number"),
    ],
)
def test_a_value_of_the_wrong_type_is_refused(option, value, wanted):
    with pytest.raises(ConfigError, match=re.escape(f"strategy.{option} must be {wanted}, got {value!r}")):
        make_strategy("fedavg", {option: value}, RoundRules())


def test_a_whole_number_will_do_for_a_float():
    assert make_strategy("fedavg", {"learning_rate": 1}, RoundRules()).plan.learning_rate == 1


def test_a_users_own_class_is_found_and_gets_its_options_and_the_rules(own_module):
    rules = RoundRules(min_devices=3)
    made, given = make_strategy(f"{own_module}:Mine", {"pace": 2, "limit": 5}, rules)
    assert (made.pace, made.limit, given) == (2, 5, rules)
    assert make_strategy(f"{own_module}:Plain", {"speed": 4}, rules).speed == 4


def test_types_are_checked_also_in_a_module_without_postponed_annotations(own_module):
    for options in ({"pace": "slow"}, {"pace": 1.0, "limit": 1.5}):
        with pytest.raises(ConfigError, match="must be"):
            make_strategy(f"{own_module}:Mine", options, RoundRules())


def test_an_option_without_default_must_be_given(own_module):
    with pytest.raises(ConfigError, match=r"strategy\.pace is missing"):
        make_strategy(f"{own_module}:Mine", {}, RoundRules())


def test_settings_are_those_of_the_class_with_their_defaults():
    known = settings_of("ssgd")
    assert (known["learning_rate"], known["batch_size"], known["iterations"]) == (0.05, 32, 1)
    assert known.keys() >= {"schedule", "optimizer", "momentum", "double_buffering"}


def test_a_class_that_names_the_protocol_as_its_base_needs_no_settings(own_module):
    assert settings_of(f"{own_module}:OfTheProtocol") == {}
    made = make_strategy(f"{own_module}:OfTheProtocol", {}, RoundRules())
    assert type(made).__name__ == "OfTheProtocol"


@pytest.mark.parametrize("text", ["import sys; sys.exit(9)", "raise RuntimeError('boom')", "def ("])
def test_a_module_that_cannot_even_be_imported_is_one_line(text, tmp_path, monkeypatch):
    (tmp_path / "no_good_strategy.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(StrategyError, match=r"'no_good_strategy:X' cannot be imported: \w+: "):
        make_strategy("no_good_strategy:X", {}, RoundRules())

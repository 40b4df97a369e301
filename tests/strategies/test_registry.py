import math
import re
import sys

import pytest

from edgefl.core.errors import ConfigError, StrategyError
from edgefl.core.settings import format_setting
from edgefl.strategies.registry import (
    BUILT_IN_STRATEGIES,
    find_strategy,
    get_settings,
    list_strategy_names,
    make_strategy,
)
from edgefl.strategies.strategy_config import RoundRules

OWN = """
from dataclasses import dataclass
from typing import Optional
from edgefl.core.types import Strategy

@dataclass(frozen=True, kw_only=True)
class Mine(Strategy):
    pace: float
    limit: int | None = None
    note: Optional[str] = None
    def build(self, rules):
        return self, rules

class Plain(Strategy):
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
    monkeypatch.setenv("EDGEFL_ALLOW_MODULES", "my_strategies,no_good_strategy,no_such_module_anywhere")
    yield "my_strategies"
    sys.modules.pop("my_strategies", None)


def test_every_built_in_strategy_is_listed_and_can_be_made():
    assert {"fedavg", "ssgd"} <= set(BUILT_IN_STRATEGIES) <= set(list_strategy_names())
    for name in BUILT_IN_STRATEGIES:
        assert make_strategy(name, {}, RoundRules()).init({}) is not None


def test_an_unknown_name_is_answered_with_the_known_ones():
    with pytest.raises(
        StrategyError, match=r"unknown strategy 'fedavgg' \(did you mean fedavg\?\); known: .*fedavg, .*ssgd"
    ):
        find_strategy("fedavgg")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_such_module_anywhere:Class", "cannot be imported"),
        ("my_strategies:NoSuchClass", "cannot be imported"),
        ("edgefl.engine.round_loop:Goal", "is refused: the module edgefl.engine.round_loop is not allowed here"),
        ("subprocess:Popen", "is refused: subprocess is of Python's own library"),
        (":Class", "cannot be loaded: it must be module:Class"),
        (".loop:Goal", "cannot be loaded: it must be module:Class"),
        ("my_strategies:Mine.build", "cannot be loaded: it must be module:Class"),
    ],
)
def test_a_path_that_leads_nowhere_is_one_clear_error(own_module, name, message):
    with pytest.raises(StrategyError, match=re.escape(f"strategy {name!r} {message}")):
        find_strategy(name)


def test_something_that_is_no_class_is_refused(own_module):
    with pytest.raises(StrategyError, match="is a int; it must be a class that inherits from"):
        find_strategy(f"{own_module}:not_a_class")


def test_an_unknown_option_is_answered_with_the_known_ones():
    with pytest.raises(
        ConfigError, match=r"strategy.epoch: fedavg has no such setting \(did you mean epochs\?\); known: .*epochs"
    ):
        make_strategy("fedavg", {"epoch": 2}, RoundRules())


@pytest.mark.parametrize(
    ("option", "value", "wanted"),
    [
        ("learning_rate", "fast", "a number at least 0"),
        ("learning_rate", True, "a number at least 0"),
        ("iterations", 2.5, "a whole number at least 1"),
        ("iterations", True, "a whole number at least 1"),
    ],
)
def test_a_value_of_the_wrong_type_is_refused(option, value, wanted):
    with pytest.raises(
        ConfigError, match=re.escape(f"strategy.{option} must be {wanted}, got {format_setting(value)}")
    ):
        make_strategy("fedavg", {option: value}, RoundRules())


def test_a_users_own_class_is_found_and_gets_its_options_and_the_rules(own_module):
    rules = RoundRules(min_devices=3)
    made, given = make_strategy(f"{own_module}:Mine", {"pace": 2, "limit": 5}, rules)
    assert (made.pace, made.limit, given) == (2, 5, rules)
    assert make_strategy(f"{own_module}:Plain", {"speed": 4}, rules).speed == 4


def test_an_option_without_default_must_be_given_and_of_its_type(own_module):
    with pytest.raises(ConfigError, match=r"strategy\.pace is missing"):
        make_strategy(f"{own_module}:Mine", {}, RoundRules())
    for options in ({"pace": "slow"}, {"pace": 1.0, "limit": 1.5}):
        with pytest.raises(ConfigError, match="must be"):
            make_strategy(f"{own_module}:Mine", options, RoundRules())


def test_settings_are_those_of_the_class_with_their_defaults():
    known = get_settings("ssgd")
    assert (known["learning_rate"], known["batch_size"], known["iterations"]) == (0.05, 32, 1)
    assert known.keys() >= {"schedule", "optimizer", "momentum", "double_buffering"}
    assert (get_settings("fedavg")["epochs"], get_settings("fedprox")["mu"]) == (1.0, 0.01)


def test_a_class_that_names_the_protocol_as_its_base_needs_no_settings(own_module):
    assert get_settings(f"{own_module}:OfTheProtocol") == {}
    made = make_strategy(f"{own_module}:OfTheProtocol", {}, RoundRules())
    assert type(made).__name__ == "OfTheProtocol"


@pytest.mark.parametrize("text", ["import sys; sys.exit(9)", "raise RuntimeError('boom')", "def ("])
def test_a_module_that_cannot_even_be_imported_is_one_line(text, tmp_path, monkeypatch):
    (tmp_path / "no_good_strategy.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("EDGEFL_ALLOW_MODULES", "no_good_strategy")
    with pytest.raises(StrategyError, match=r"'no_good_strategy:X' cannot be imported: \w+: "):
        make_strategy("no_good_strategy:X", {}, RoundRules())


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("adacomp", {"compression": 1e-300}, "compression must be a fraction from 1e-12 to 1, got 1e-300"),
        ("adacomp", {"compression": 3.0}, "compression must be a fraction from 1e-12 to 1, got 3.0"),
        ("adacomp", {"staleness": "all"}, "staleness must be one of 'parameter', 'update', 'none', got 'all'"),
        ("bounded", {"staleness": -2}, "staleness must be 0 or more steps, or -1 for no bound, got -2"),
        ("dc-asgd", {"variant": "exact"}, "variant must be one of 'constant', 'adaptive', 'mxnet', got 'exact'"),
        ("dc-asgd", {"compensation": -1.0}, "compensation must be a number at least 0, got -1.0"),
        ("dc-asgd", {"mean_square_decay": 1.0}, r"mean_square_decay must be in \[0, 1\), got 1.0"),
        ("dc-asgd", {"mean_square_decay": 1.5}, r"mean_square_decay must be in \[0, 1\), got 1.5"),
        ("d2", {"iterations": 8}, "iterations of d2 must be 1, got 8"),
        ("dsgd", {"carrier": "pigeon"}, "carrier must be one of 'relay', 'peer', 'direct', got 'pigeon'"),
        ("dsgd", {"hosts": "hosts.json"}, "hosts is for strategy.carrier = 'direct', got 'relay'"),
        ("dsgd", {"exchange": "daily"}, "exchange must be one of 'sync', 'slots', 'poisson', 'pair', got 'daily'"),
        ("dsgd", {"exchanges_per_round": 0}, "exchanges_per_round must be a whole number at least 1, got 0"),
        ("dsgd", {"iterations": 0}, "iterations"),
        ("dsgd", {"seconds": 2.0}, "iterations"),
        ("dsgd", {"optimizer": "adam"}, "optimizer of a decentralised run must be sgd"),
        ("dsgd", {"learning_rate": 0}, "learning_rate"),
        ("esync", {"mode": "ask"}, "mode must be one of 'budget', 'live', 'query', got 'ask'"),
        ("esync", {"aggregation": "mean"}, "aggregation must be one of 'uniform', 'samples', 'nova', got 'mean'"),
        ("esync", {"smoothing": "mean"}, "smoothing must be one of 'median', 'ewma', 'last', got 'mean'"),
        ("esync", {"iterations": 5}, "iterations: esync finds out itself"),
        ("esync", {"seconds": 5.0}, "seconds: esync finds out itself"),
        ("esync", {"epsilon": -1.5}, "epsilon must be a number at least -1, got -1.5"),
        ("esync", {"patience": 0.5}, "patience must be a number at least 1, got 0.5"),
        ("esync", {"min_iterations": 0}, "min_iterations must be at least 1"),
        ("esync", {"min_iterations": 9, "max_iterations": 3}, "at most max_iterations, got 9 and 3"),
        ("esync", {"global_learning_rate": 0.0}, "global_learning_rate must be a number above 0, got 0"),
        ("esync", {"aggregation": "nova", "optimizer": "adam"}, "optimizer: esync with aggregation nova can"),
        ("fedasync", {"alpha": 0.0}, r"alpha must be a number above 0 and at most 1, got 0.0"),
        ("fedasync", {"alpha": 1.5}, r"alpha must be a number above 0 and at most 1, got 1.5"),
        (
            "fedasync",
            {"staleness": "linear"},
            "staleness must be one of 'constant', 'polynomial', 'hinge', got 'linear'",
        ),
        ("fedasync", {"staleness_a": -1.0}, "staleness_a must be a number at least 0, got -1.0"),
        ("fedasync", {"staleness_b": -1.0}, "staleness_b must be a number at least 0, got -1.0"),
        ("fedasync", {"mu": -1.0}, "mu must be a number at least 0, got -1.0"),
        ("fedasync", {"mu": 0.01, "optimizer": "adam"}, "mu needs strategy.optimizer = 'sgd', got 'adam'"),
        ("fedbuff", {"buffer_size": 0}, "buffer_size must be a whole number at least 1, got 0"),
        ("fedbuff", {"staleness_exponent": -1.0}, "staleness_exponent must be a number at least 0, got -1.0"),
        ("fednova", {"optimizer": "adam"}, "optimizer: fednova can normalise sgd, prox, .* got 'adam'"),
        ("fednova", {"momentum": 0.9, "keep_optimizer": True}, "keep_optimizer: fednova cannot normalise"),
        ("fednova", {"momentum": 1.0}, "momentum must be below 1 for fednova, got 1"),
        ("fednova", {"mu": 40.0, "learning_rate": 0.05}, "mu times strategy.learning_rate must be below 2"),
        ("fedprox", {"mu": -0.1}, "mu must be a number at least 0, got"),
        ("fedprox", {"mu": math.inf}, "mu must be a number at least 0, got inf"),
        ("fedprox", {"optimizer": "adam"}, "optimizer: fedprox trains with its own, prox, got 'adam'"),
        ("k-gt", {"exchange": "poisson"}, "exchange of k-gt must be sync, got 'poisson'"),
        ("redundant", {"weights": "mean"}, "weights must be one of 'uniform', 'samples', got 'mean'"),
        ("scaffold", {"momentum": 0.9}, "must be sgd without momentum"),
        ("scaffold", {"optimizer": "adam"}, "must be sgd without momentum"),
        ("signsgd", {"step": 0.0}, "step must be a number above 0"),
        ("signsgd", {"step": math.inf}, "step must be a number above 0, got inf"),
        ("ssgd", {"iterations": -1}, "iterations must be a whole number at least 0, got -1"),
    ],
)
def test_a_setting_that_makes_no_sense_is_named(name, options, message):
    with pytest.raises(ConfigError, match=rf"strategy\..*{message}"):
        make_strategy(name, options, RoundRules())

"""Finds a strategy by name: built in, installed by a package (`edgefl.strategies`), or `module:Class`.

What is found is a class whose keyword arguments are the settings of the run file. Either it is a Strategy itself,
or it has `build(rules)` and gives one.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from edgefl.errors import ConfigError, StrategyError
from edgefl.strategies.rounds import RoundRules
from edgefl.types import Scalar, Strategy

BUILT_IN = {
    "ad-psgd": "edgefl.strategies.gossip:AdPsgd",
    "adacomp": "edgefl.strategies.adacomp:AdaComp",
    "admm-isvr": "edgefl.strategies.gossip:AdmmIsvr",
    "asgd": "edgefl.strategies.asgd:ASGD",
    "bounded": "edgefl.strategies.bounded:BoundedStaleness",
    "d2": "edgefl.strategies.gossip:D2",
    "dc-asgd": "edgefl.strategies.dc_asgd:DCASGD",
    "dsgd": "edgefl.strategies.gossip:Dsgd",
    "esync": "edgefl.strategies.esync:ESync",
    "fedasync": "edgefl.strategies.fedasync:FedAsync",
    "fedavg": "edgefl.strategies.fedavg:FedAvg",
    "fedbuff": "edgefl.strategies.fedbuff:FedBuff",
    "fednova": "edgefl.strategies.fednova:FedNova",
    "fedprox": "edgefl.strategies.fedprox:FedProx",
    "gradient-tracking": "edgefl.strategies.gossip:GradientTracking",
    "k-gt": "edgefl.strategies.gossip:KGradientTracking",
    "local": "edgefl.strategies.local:Local",
    "pdmm-isvr": "edgefl.strategies.gossip:PdmmIsvr",
    "redundant": "edgefl.strategies.redundancy:Redundant",
    "scaffold": "edgefl.strategies.scaffold:Scaffold",
    "signsgd": "edgefl.strategies.signsgd:SignSGD",
    "ssgd": "edgefl.strategies.ssgd:SSGD",
}
ENTRY_POINTS = "edgefl.strategies"
REQUIRED = inspect.Parameter.empty


def strategy_names() -> list[str]:
    """Returns every name that a run file may use, sorted."""
    return sorted(BUILT_IN) + sorted(point.name for point in importlib.metadata.entry_points(group=ENTRY_POINTS))


def find_strategy(name: str) -> type[Any]:
    """Returns the class behind a name.

    Raises:
        StrategyError: there is no such strategy, or it cannot be imported.
    """
    path = BUILT_IN.get(name)
    if path is None:
        points = importlib.metadata.entry_points(group=ENTRY_POINTS, name=name)
        path = next((point.value for point in points), name)
    module_name, _, class_name = path.partition(":")
    if not class_name:
        raise StrategyError(f"unknown strategy {name!r}; known: {', '.join(strategy_names())}, or module:Class")
    try:
        found = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError, TypeError, ValueError) as error:  # the last two: no name of a module
        raise StrategyError(f"strategy {name!r} cannot be imported: {error}") from error
    except (Exception, SystemExit) as error:  # importing what somebody else wrote may raise anything
        raise StrategyError(f"strategy {name!r} cannot be imported: {type(error).__name__}: {error}") from error
    if not inspect.isclass(found):
        raise StrategyError(f"strategy {name!r} must be a class, got {type(found).__name__}")
    return found


def settings_of(name: str) -> dict[str, Any]:
    """Returns the settings of a strategy with their defaults, `REQUIRED` for those that have none."""
    parameters = inspect.signature(find_strategy(name)).parameters.values()
    # A class that names `Strategy` as its base has the signature of a Protocol, which is (*args, **kwargs).
    return {p.name: p.default for p in parameters if p.kind not in {p.VAR_POSITIONAL, p.VAR_KEYWORD}}


def make_strategy(name: str, options: Mapping[str, Scalar], rules: RoundRules) -> Strategy[Any]:
    """Returns a strategy ready to run.

    Args:
        name: as in `[strategy] name`.
        options: the other keys of `[strategy]`.
        rules: what the run file says about every round.

    Raises:
        StrategyError: there is no such strategy.
        ConfigError: an option is unknown or missing, or its value has the wrong type or makes no sense.
    """
    found, known = find_strategy(name), settings_of(name)
    for option, value in options.items():
        if option not in known:
            raise ConfigError(f"strategy.{option}: {name} has no such setting; known: {', '.join(known) or 'none'}")
        _check_type(found, option, value)
    missing = [name for name, default in known.items() if default is REQUIRED and name not in options]
    if missing:
        raise ConfigError(f"strategy.{missing[0]} is missing: {name} cannot do without")
    made: Any = found(**options)
    strategy: Strategy[Any] = made.build(rules) if hasattr(made, "build") else made
    return strategy


def _check_type(found: type[Any], option: str, value: Scalar) -> None:
    """Refuses a value of the wrong kind; numbers may be written without a point."""
    if not is_dataclass(found):
        return
    # A type where the module has no postponed annotations, else its text.
    annotation: Any = {field.name: field.type for field in fields(found)}.get(option, "Any")
    kind = annotation.__name__ if isinstance(annotation, type) else str(annotation).removesuffix(" | None")
    allowed = {"float": (int, float), "int": (int,), "str": (str,), "bool": (bool,)}.get(kind)
    wrong = allowed is not None and not isinstance(value, allowed)
    if wrong or (isinstance(value, bool) and kind != "bool"):
        words = {"float": "a number", "int": "a whole number", "str": "a text", "bool": "true or false"}
        raise ConfigError(f"strategy.{option} must be {words.get(kind, kind)}, got {value!r}")

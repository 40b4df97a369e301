"""Finds strategies by name: built in, installed by a package (`edgefl.strategies`), or `module:Class`.

The result is a class whose keyword arguments are the settings of the run file. Either it is a Strategy itself,
or its `build(rules)` returns one.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from edgefl.core.errors import ConfigError, StrategyError
from edgefl.core.types import Scalar, Strategy
from edgefl.strategies.strategy_config import RoundRules

BUILT_IN_STRATEGIES = {
    "ad-psgd": "edgefl.strategies.decentralised.config:AdPsgdConfig",
    "adacomp": "edgefl.strategies.asynchronous.adacomp:AdaCompConfig",
    "admm-isvr": "edgefl.strategies.decentralised.config:AdmmIsvrConfig",
    "asgd": "edgefl.strategies.asynchronous.asgd:ASGDConfig",
    "bounded": "edgefl.strategies.asynchronous.asgd:SSPConfig",
    "d2": "edgefl.strategies.decentralised.config:D2Config",
    "dc-asgd": "edgefl.strategies.asynchronous.asgd:DCASGDConfig",
    "dsgd": "edgefl.strategies.decentralised.config:DsgdConfig",
    "esync": "edgefl.strategies.synchronous.esync:ESyncConfig",
    "fedasync": "edgefl.strategies.asynchronous.fedasync:FedAsyncConfig",
    "fedavg": "edgefl.strategies.synchronous.fedavg:FedAvgConfig",
    "fedbuff": "edgefl.strategies.asynchronous.fedasync:FedBuffConfig",
    "fednova": "edgefl.strategies.synchronous.fednova:FedNovaConfig",
    "fedprox": "edgefl.strategies.synchronous.fedavg:FedProxConfig",
    "gradient-tracking": "edgefl.strategies.decentralised.config:GradientTrackingConfig",
    "k-gt": "edgefl.strategies.decentralised.config:KGradientTrackingConfig",
    "local": "edgefl.strategies.synchronous.fedavg:SingleDeviceConfig",
    "pdmm-isvr": "edgefl.strategies.decentralised.config:PdmmIsvrConfig",
    "redundant": "edgefl.strategies.synchronous.redundant_shards:RedundantShardsConfig",
    "scaffold": "edgefl.strategies.synchronous.scaffold:ScaffoldConfig",
    "signsgd": "edgefl.strategies.synchronous.signsgd:SignSGDConfig",
    "ssgd": "edgefl.strategies.synchronous.fedavg:SSGDConfig",
}
ENTRY_POINT_GROUP = "edgefl.strategies"
REQUIRED = inspect.Parameter.empty


def list_strategy_names() -> list[str]:
    """Returns every strategy name for a run file, sorted."""
    return sorted(BUILT_IN_STRATEGIES) + sorted(
        point.name for point in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)
    )


def find_strategy(name: str) -> type[Any]:
    """Returns the class of a strategy name.

    Raises:
        StrategyError: no such strategy, or it cannot be imported.
    """
    path = BUILT_IN_STRATEGIES.get(name)
    if path is None:
        points = importlib.metadata.entry_points(group=ENTRY_POINT_GROUP, name=name)
        path = next((point.value for point in points), name)
    module_name, _, class_name = path.partition(":")
    if not class_name:
        raise StrategyError(f"unknown strategy {name!r}; known: {', '.join(list_strategy_names())}, or module:Class")
    try:
        strategy_class = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError, TypeError, ValueError) as error:  # the last two: not a module name
        raise StrategyError(f"strategy {name!r} cannot be imported: {error}") from error
    except (Exception, SystemExit) as error:  # importing user code may raise anything
        raise StrategyError(f"strategy {name!r} cannot be imported: {type(error).__name__}: {error}") from error
    if not inspect.isclass(strategy_class):
        raise StrategyError(f"strategy {name!r} must be a class, got {type(strategy_class).__name__}")
    return strategy_class


def get_settings(name: str) -> dict[str, Any]:
    """Returns the settings of a strategy with their defaults, `REQUIRED` for those without one."""
    parameters = inspect.signature(find_strategy(name)).parameters.values()
    # A subclass of the Protocol `Strategy` has the signature (*args, **kwargs).
    return {p.name: p.default for p in parameters if p.kind not in {p.VAR_POSITIONAL, p.VAR_KEYWORD}}


def make_strategy(name: str, options: Mapping[str, Scalar], rules: RoundRules) -> Strategy[Any]:
    """Returns a strategy ready to run.

    Args:
        name: as in `[strategy] name`.
        options: the other keys of `[strategy]`.
        rules: of every round, from the run file.

    Raises:
        StrategyError: no such strategy.
        ConfigError: an option is unknown or missing, or its value has the wrong type or is invalid.
    """
    strategy_class, settings = find_strategy(name), get_settings(name)
    for option, value in options.items():
        if option not in settings:
            raise ConfigError(
                f"strategy.{option}: {name} has no such setting; known: {', '.join(settings) or 'none'}"
            )
        _check_type(strategy_class, option, value)
    missing = [name for name, default in settings.items() if default is REQUIRED and name not in options]
    if missing:
        raise ConfigError(f"strategy.{missing[0]} is missing: {name} cannot do without")
    instance: Any = strategy_class(**options)
    strategy: Strategy[Any] = instance.build(rules) if hasattr(instance, "build") else instance
    return strategy


def _check_type(strategy_class: type[Any], option: str, value: Scalar) -> None:
    """Checks the type of a value; a float may be written without a point."""
    if not is_dataclass(strategy_class):
        return
    # A type, or its text where the module postpones annotations.
    annotation: Any = {field.name: field.type for field in fields(strategy_class)}.get(option, "Any")
    kind = annotation.__name__ if isinstance(annotation, type) else str(annotation).removesuffix(" | None")
    types = {"float": (int, float), "int": (int,), "str": (str,), "bool": (bool,)}.get(kind)
    is_wrong_type = types is not None and not isinstance(value, types)
    if is_wrong_type or (isinstance(value, bool) and kind != "bool"):
        descriptions = {"float": "a number", "int": "a whole number", "str": "a text", "bool": "true or false"}
        raise ConfigError(f"strategy.{option} must be {descriptions.get(kind, kind)}, got {value!r}")

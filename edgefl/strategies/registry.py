"""Finds strategies by name: built in, installed by a package (`edgefl.strategies`), or an allowed `module:Class`.

The result is a class whose keyword arguments are the settings of the run file. Either it is a Strategy itself,
or its `build(rules)` returns one.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from typing import Any

from edgefl.core.analyses import ANALYSES
from edgefl.core.config import AUTO_STRATEGY
from edgefl.core.errors import StrategyError
from edgefl.core.extensions import ExtensionKind, find_extension, inherits_from, list_entry_points
from edgefl.core.settings import check_options, list_options
from edgefl.core.types import Scalar, Strategy
from edgefl.strategies.strategy_config import RoundRules, StrategyConfig

BUILT_IN_STRATEGIES = {
    "ad-psgd": "edgefl.strategies.decentralised.strategy:AdPsgdConfig",
    "adacomp": "edgefl.strategies.asynchronous.adacomp:AdaCompConfig",
    "admm-isvr": "edgefl.strategies.decentralised.strategy:AdmmIsvrConfig",
    "asgd": "edgefl.strategies.asynchronous.asgd:ASGDConfig",
    "bounded": "edgefl.strategies.asynchronous.asgd:SSPConfig",
    "bulyan": "edgefl.strategies.synchronous.robust:BulyanConfig",
    "centred-clipping": "edgefl.strategies.synchronous.robust:CentredClippingConfig",
    "coordinate-median": "edgefl.strategies.synchronous.robust:CoordinateMedianConfig",
    "d2": "edgefl.strategies.decentralised.strategy:D2Config",
    "dc-asgd": "edgefl.strategies.asynchronous.asgd:DCASGDConfig",
    "dsgd": "edgefl.strategies.decentralised.strategy:DsgdConfig",
    "esync": "edgefl.strategies.synchronous.esync:ESyncConfig",
    "fedasync": "edgefl.strategies.asynchronous.fedasync:FedAsyncConfig",
    "fedavg": "edgefl.strategies.synchronous.fedavg:FedAvgConfig",
    "fedbuff": "edgefl.strategies.asynchronous.fedasync:FedBuffConfig",
    "fednova": "edgefl.strategies.synchronous.fedavg:FedNovaConfig",
    "fedprox": "edgefl.strategies.synchronous.fedavg:FedProxConfig",
    "fltrust": "edgefl.strategies.synchronous.fltrust:FLTrustConfig",
    "geometric-median": "edgefl.strategies.synchronous.robust:GeometricMedianConfig",
    "gradient-tracking": "edgefl.strategies.decentralised.strategy:GradientTrackingConfig",
    "ifca": "edgefl.strategies.synchronous.ifca:IfcaConfig",
    "k-gt": "edgefl.strategies.decentralised.strategy:KGradientTrackingConfig",
    "krum": "edgefl.strategies.synchronous.robust:KrumConfig",
    "local": "edgefl.strategies.synchronous.fedavg:SingleDeviceConfig",
    "multi-krum": "edgefl.strategies.synchronous.robust:MultiKrumConfig",
    "pdmm-isvr": "edgefl.strategies.decentralised.strategy:PdmmIsvrConfig",
    "redundant": "edgefl.strategies.synchronous.redundant_shards:RedundantShardsConfig",
    "scaffold": "edgefl.strategies.synchronous.scaffold:ScaffoldConfig",
    "signsgd": "edgefl.strategies.synchronous.signsgd:SignSGDConfig",
    "ssgd": "edgefl.strategies.synchronous.fedavg:SSGDConfig",
    "trimmed-mean": "edgefl.strategies.synchronous.robust:TrimmedMeanConfig",
}
_FLOWER_MODULE = "flwr.serverapp.strategy"


def is_flower_class(found: type[Any]) -> bool:
    """Returns whether a class inherits from Flower's `Strategy`; one that does has imported it."""
    base = getattr(sys.modules.get(_FLOWER_MODULE), "Strategy", None)
    return base is not None and inherits_from(base)(found)


KIND = ExtensionKind(
    noun="strategy",
    group="edgefl.strategies",
    is_declared=lambda found: inherits_from(Strategy, StrategyConfig)(found) or is_flower_class(found),
    declaration="inherits from edgefl.Strategy, RoundStrategy, StrategyConfig, or Flower's Strategy",
    error=StrategyError,
)


def list_strategy_names() -> list[str]:
    """Returns every strategy name for a run file: built in, then analyses, then those of packages, each sorted."""
    return [*sorted(BUILT_IN_STRATEGIES), *sorted(ANALYSES), *list_entry_points(KIND)]


def find_strategy(name: str) -> type[Any]:
    """Returns the class of a strategy name, of an analysis that of its settings; nothing of it was called.

    Raises:
        StrategyError: no such strategy, its module is not allowed, or it cannot be imported.
    """
    if name in BUILT_IN_STRATEGIES:
        module_name, _, class_name = BUILT_IN_STRATEGIES[name].partition(":")
        built_in: type[Any] = getattr(importlib.import_module(module_name), class_name)
        return built_in
    if name in ANALYSES:
        return ANALYSES[name]
    if name == AUTO_STRATEGY:
        raise StrategyError(
            'strategy.name = "auto" is replaced before a run is submitted, by edgefl run submit, edgefl simulate, '
            "fleet.submit and fleet.simulate; here it must be a strategy, such as one that edgefl advise run names"
        )
    return find_extension(KIND, name, list_strategy_names())


def get_settings(name: str) -> dict[str, Any]:
    """Returns the settings of a strategy with their defaults, `REQUIRED` for those without one."""
    return {option: kind.default for option, kind in list_options(find_strategy(name)).items()}


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
    strategy_class = find_strategy(name)
    check_options(name, options, list_options(strategy_class), table="strategy")
    instance: Any = strategy_class(**options)
    strategy: Strategy[Any] = instance.build(rules) if hasattr(instance, "build") else instance
    return strategy

"""Finds Flower strategies by name and builds them from the options of a run file; Flower is imported on use."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from edgefl.core.errors import ConfigError, EdgeflError, StrategyError
from edgefl.core.extensions import format_name
from edgefl.core.settings import OptionType, check_options, list_options
from edgefl.core.types import Scalar
from edgefl.strategies.registry import BUILT_IN_STRATEGIES, find_strategy, is_flower_class
from edgefl.strategies.strategy_config import StrategyConfig

if TYPE_CHECKING:
    from flwr.serverapp.strategy import Strategy as FlowerBase

PREFIX = "flwr:"
MIN_NODE_OPTIONS = ("min_train_nodes", "min_evaluate_nodes", "min_available_nodes")
"""Flower's default is 2 each; here the run file's `devices.min` gates the start, unless an option does."""
UNSUPPORTED_PREFIXES = ("FedXgbBagging", "FedXgbCyclic", "DifferentialPrivacy")
"""Prefixes of unsupported strategies: those that grow trees, and those that wrap another strategy."""
_FLOWER_MODULE = "flwr.serverapp.strategy"


def is_flower_strategy(name: str) -> bool:
    """Returns whether `name` is `flwr:Class`, or an own or installed subclass of Flower's `Strategy`."""
    if name.startswith(PREFIX):
        return True
    if name in BUILT_IN_STRATEGIES:
        return False
    try:
        return is_flower_class(find_strategy(name))
    except EdgeflError:  # whoever makes the strategy meets the same error, and says it
        return False


def list_flower_strategies() -> list[str]:
    """Returns the names of Flower's own strategies that are supported."""
    return [PREFIX + name for name in sorted(_load_flower_classes()) if _is_strategy(name)]


def find_flower_strategy(name: str) -> type[FlowerBase]:
    """Returns the class of `flwr:Class`, or of a name as `find_strategy` takes it.

    Raises:
        StrategyError: there is no such class, it is not allowed, or it does not aggregate tensors.
    """
    if not name.startswith(PREFIX):
        return find_strategy(name)
    class_name = name.removeprefix(PREFIX)
    if not _is_strategy(class_name):
        raise StrategyError(
            f"Flower has no strategy {format_name(class_name)} for us; known: {', '.join(list_flower_strategies())}"
        )
    strategy_class: type[FlowerBase] = _load_flower_classes()[class_name]
    return strategy_class


def get_flower_settings(name: str) -> dict[str, Any]:
    """Returns the `[strategy]` settings of a run file with their defaults, `REQUIRED` for those without one."""
    return {option: kind.default for option, kind in _list_settings(find_flower_strategy(name)).items()}


def make_flower_object(name: str, strategy_class: type[FlowerBase], options: Mapping[str, Scalar]) -> FlowerBase:
    """Returns Flower's object, constructed with the options that it has.

    Raises:
        ConfigError: an option is unknown, missing, or of the wrong type.
    """
    check_options(name, options, _list_settings(strategy_class), table="strategy")
    fraction = options.get("fraction_train")
    if isinstance(fraction, int | float) and not fraction > 0:
        raise ConfigError(f"strategy.fraction_train must be above 0, or nobody ever trains, got {fraction!r}")
    parameters = _list_parameters(strategy_class)
    arguments = {**{option: 1 for option in MIN_NODE_OPTIONS if option in parameters}, **options}
    return strategy_class(**{option: value for option, value in arguments.items() if option in parameters})


def check_min_nodes(strategy: FlowerBase, max_devices: int | None) -> None:
    """Checks that a strategy does not wait for more devices than are ever asked.

    Raises:
        ConfigError: one of its minima is above `max_devices`.
    """
    for option in ("min_train_nodes", "min_available_nodes"):
        minimum = getattr(strategy, option, 1)
        if max_devices is not None and isinstance(minimum, int) and minimum > max_devices:
            raise ConfigError(f"strategy.{option} must be at most devices.count = {max_devices}, got {minimum}")


def _load_flower_classes() -> dict[str, Any]:
    return vars(importlib.import_module(_FLOWER_MODULE))


def _is_strategy(name: str) -> bool:
    classes = _load_flower_classes()
    candidate = classes.get(name)
    if not inspect.isclass(candidate) or inspect.isabstract(candidate):
        return False
    return issubclass(candidate, classes["Strategy"]) and not name.startswith(UNSUPPORTED_PREFIXES)


def _list_settings(strategy_class: type[FlowerBase]) -> dict[str, OptionType]:
    return {**list_options(StrategyConfig), **_list_parameters(strategy_class)}


def _list_parameters(strategy_class: type[FlowerBase]) -> dict[str, OptionType]:
    """Returns the class's parameters, with those it passes to its parents by `**kwargs`, without functions."""
    parameters: dict[str, OptionType] = {}
    for cls in strategy_class.__mro__:
        if "__init__" not in vars(cls) or cls is object:
            continue
        for option, kind in list_options(cls).items():
            if "Callable" not in str(kind.annotation):
                parameters.setdefault(option, kind)
        if not any(p.kind == p.VAR_KEYWORD for p in inspect.signature(cls).parameters.values()):
            break
    return parameters

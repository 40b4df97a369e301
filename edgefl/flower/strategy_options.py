"""Finds Flower strategies by name and builds them from the options of a run file; Flower is imported on use."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from edgefl.core.errors import ConfigError, StrategyError
from edgefl.core.types import Scalar
from edgefl.strategies.registry import REQUIRED
from edgefl.strategies.strategy_config import StrategyConfig

if TYPE_CHECKING:
    from flwr.serverapp.strategy import Strategy as FlowerBase

PREFIX = "flwr:"
MIN_NODE_OPTIONS = ("min_train_nodes", "min_evaluate_nodes", "min_available_nodes")
"""Flower's default is 2 each; here the run file's `devices.min` gates the start, unless an option does."""
UNSUPPORTED_PREFIXES = ("FedXgbBagging", "FedXgbCyclic", "DifferentialPrivacy")
"""Prefixes of unsupported strategies: those that grow trees, and those that wrap another strategy."""
_FLOWER_MODULE = "flwr.serverapp.strategy"
_TRAINING_KINDS: Mapping[str, type[Any]] = MappingProxyType(
    {"iterations": int, "batch_size": int, "seconds": float, "epochs": float, "optimizer": str}
)
"""Types of settings whose default does not show it."""


def is_flower_strategy(name: str) -> bool:
    """Returns whether `name` is `flwr:Class`, or the `module:Class` of a subclass of Flower's `Strategy`."""
    if name.startswith(PREFIX):
        return True
    module_name, _, class_name = name.partition(":")
    if not class_name:
        return False
    try:
        candidate = getattr(importlib.import_module(module_name), class_name)
    except (Exception, SystemExit):  # noqa: BLE001 whoever makes the strategy meets the same error, and says it
        return False
    return any(base.__module__.startswith(_FLOWER_MODULE) for base in getattr(candidate, "__mro__", ()))


def list_flower_strategies() -> list[str]:
    """Returns the names of Flower's own strategies that are supported."""
    return [PREFIX + name for name in sorted(_load_flower_classes()) if _is_strategy(name)]


def find_flower_strategy(name: str) -> type[FlowerBase]:
    """Returns the class of `flwr:Class` or `module:Class`.

    Raises:
        StrategyError: there is no such class, or it does not aggregate tensors.
    """
    module_name, _, class_name = name.partition(":")
    if name.startswith(PREFIX) and not _is_strategy(class_name):
        raise StrategyError(
            f"Flower has no strategy {class_name!r} for us; known: {', '.join(list_flower_strategies())}"
        )
    module = importlib.import_module(_FLOWER_MODULE if name.startswith(PREFIX) else module_name)
    strategy_class: type[FlowerBase] = getattr(module, class_name)
    return strategy_class


def get_flower_settings(name: str) -> dict[str, Any]:
    """Returns the `[strategy]` settings of a run file with their defaults, `REQUIRED` for those without one."""
    training = {item.name: item.default for item in dataclasses.fields(StrategyConfig)}
    return {**training, **_list_parameters(find_flower_strategy(name))}


def make_flower_object(name: str, strategy_class: type[FlowerBase], options: Mapping[str, Scalar]) -> FlowerBase:
    """Returns Flower's object, constructed with the options that it has.

    Raises:
        ConfigError: an option is unknown, missing, or of the wrong type.
    """
    settings, parameters = get_flower_settings(name), _list_parameters(strategy_class)
    for option, value in options.items():
        if option not in settings:
            raise ConfigError(f"strategy.{option}: {name} has no such setting; known: {', '.join(settings)}")
        _check_type(option, value, settings[option])
    missing = [option for option, default in parameters.items() if default is REQUIRED and option not in options]
    if missing:
        raise ConfigError(f"strategy.{missing[0]} is missing: {name} cannot do without")
    fraction = options.get("fraction_train")
    if isinstance(fraction, int | float) and not fraction > 0:
        raise ConfigError(f"strategy.fraction_train must be above 0, or nobody ever trains, got {fraction!r}")
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


def _list_parameters(strategy_class: type[FlowerBase]) -> dict[str, Any]:
    """Returns the class's parameters, with those it passes to its parents by `**kwargs`, without functions."""
    parameters: dict[str, Any] = {}
    for cls in strategy_class.__mro__:
        if "__init__" not in vars(cls) or cls is object:
            continue
        signature_parameters = list(inspect.signature(cls).parameters.values())
        for parameter in signature_parameters:
            if parameter.kind in {parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY} and "Callable" not in str(
                parameter.annotation
            ):
                parameters.setdefault(parameter.name, parameter.default)
        if not any(parameter.kind == parameter.VAR_KEYWORD for parameter in signature_parameters):
            break
    return parameters


def _check_type(option: str, value: Scalar, default: object) -> None:
    """Checks an option's type: Flower's classes accept anything, and fail in the middle of a run."""
    kind = _TRAINING_KINDS.get(option) or type(default)
    types = {bool: (bool,), str: (str,), int: (int,), float: (int, float)}.get(kind)
    if types and (not isinstance(value, types) or (isinstance(value, bool) and kind is not bool)):
        description = {bool: "true or false", str: "a text", int: "a whole number", float: "a number"}[kind]
        raise ConfigError(f"strategy.{option} must be {description}, got {value!r}")

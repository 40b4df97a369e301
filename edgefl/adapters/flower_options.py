"""Finds Flower's strategies by name, and makes them from the options of a run file."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import flwr.serverapp.strategy as flower_strategies
from flwr.serverapp.strategy import Strategy as FlowerBase

from edgefl.adapters.flower_names import PREFIX
from edgefl.errors import ConfigError, StrategyError
from edgefl.strategies.registry import REQUIRED
from edgefl.strategies.settings import TrainingSettings
from edgefl.types import Scalar

MINIMA = ("min_train_nodes", "min_evaluate_nodes", "min_available_nodes")
"""Flower's own is 2 each; here the run file's `devices.min` says when a run may begin, unless an option does."""
NOT_FOR_US = ("FedXgbBagging", "FedXgbCyclic", "DifferentialPrivacy")
"""Beginnings of names: those that grow trees, and those that wrap another strategy, which a run file cannot give."""


def flower_names() -> list[str]:
    """Returns the names of Flower's own strategies that can run here."""
    return [PREFIX + name for name in sorted(vars(flower_strategies)) if _is_strategy(name)]


def find_flower_strategy(name: str) -> type[FlowerBase]:
    """Returns the class behind `flwr:Class` or `module:Class`.

    Raises:
        StrategyError: there is no such class, or it is no strategy for tensors.
    """
    module_name, _, class_name = name.partition(":")
    if name.startswith(PREFIX) and not _is_strategy(class_name):
        raise StrategyError(f"Flower has no strategy {class_name!r} for us; known: {', '.join(flower_names())}")
    module = flower_strategies if name.startswith(PREFIX) else importlib.import_module(module_name)
    found: type[FlowerBase] = getattr(module, class_name)
    return found


def flower_settings(name: str) -> dict[str, Any]:
    """Returns every setting of a run file's `[strategy]` with its default, `REQUIRED` for those that have none."""
    training = {item.name: item.default for item in dataclasses.fields(TrainingSettings)}
    return {**training, **_parameters(find_flower_strategy(name))}


def make_flower_object(name: str, found: type[FlowerBase], options: Mapping[str, Scalar]) -> FlowerBase:
    """Returns Flower's object, made with the options that it knows.

    Raises:
        ConfigError: an option is unknown, missing, or of the wrong type.
    """
    known, parameters = flower_settings(name), _parameters(found)
    for option, value in options.items():
        if option not in known:
            raise ConfigError(f"strategy.{option}: {name} has no such setting; known: {', '.join(known)}")
        _check_type(option, value, known[option])
    missing = [option for option, default in parameters.items() if default is REQUIRED and option not in options]
    if missing:
        raise ConfigError(f"strategy.{missing[0]} is missing: {name} cannot do without")
    fraction = options.get("fraction_train")
    if isinstance(fraction, int | float) and not fraction > 0:
        raise ConfigError(f"strategy.fraction_train must be above 0, or nobody ever trains, got {fraction!r}")
    given = {**{option: 1 for option in MINIMA if option in parameters}, **options}
    return found(**{option: value for option, value in given.items() if option in parameters})


def check_minima(strategy: FlowerBase, max_devices: int | None) -> None:
    """Refuses a strategy that would wait for more devices than are ever asked.

    Raises:
        ConfigError: one of its minima is above `max_devices`.
    """
    for option in ("min_train_nodes", "min_available_nodes"):
        minimum = getattr(strategy, option, 1)
        if max_devices is not None and isinstance(minimum, int) and minimum > max_devices:
            raise ConfigError(f"strategy.{option} must be at most devices.count = {max_devices}, got {minimum}")


def _is_strategy(name: str) -> bool:
    found = vars(flower_strategies).get(name)
    is_one = inspect.isclass(found) and issubclass(found, FlowerBase) and not inspect.isabstract(found)
    return is_one and not name.startswith(NOT_FOR_US)


def _parameters(found: type[FlowerBase]) -> dict[str, Any]:
    """Returns what the class takes, also what it hands to its parents by `**kwargs`; functions cannot be options."""
    parameters: dict[str, Any] = {}
    for cls in found.__mro__:
        if "__init__" not in vars(cls) or cls is object:
            continue
        own = list(inspect.signature(cls).parameters.values())
        for each in own:
            if each.kind in {each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY} and "Callable" not in str(
                each.annotation
            ):
                parameters.setdefault(each.name, each.default)
        if not any(each.kind == each.VAR_KEYWORD for each in own):
            break
    return parameters


def _check_type(option: str, value: Scalar, default: object) -> None:
    """Refuses what cannot be meant: Flower's classes take anything, and fail in the middle of a run."""
    kind = _TRAINING_KINDS.get(option) or type(default)
    allowed = {bool: (bool,), str: (str,), int: (int,), float: (int, float)}.get(kind)
    if allowed and (not isinstance(value, allowed) or (isinstance(value, bool) and kind is not bool)):
        wanted = {bool: "true or false", str: "a text", int: "a whole number", float: "a number"}[kind]
        raise ConfigError(f"strategy.{option} must be {wanted}, got {value!r}")


_TRAINING_KINDS: Mapping[str, type[Any]] = MappingProxyType(
    {"iterations": int, "batch_size": int, "seconds": float, "epochs": float, "optimizer": str}
)
"""Of settings whose default does not tell it."""

"""What does not go with `[aggregation] collective`: all that needs single updates at the coordinator."""

from __future__ import annotations

from typing import Any

from edgefl.core.config import RunConfig
from edgefl.core.errors import ConfigError
from edgefl.core.settings import Faults, format_setting
from edgefl.core.types import Strategy
from edgefl.strategies.synchronous.esync import ESync
from edgefl.strategies.synchronous.strategy import SynchronousStrategy, weight_uniformly

WEIGHTED_MEANS = ("esync", "fedavg", "fedprox", "ssgd")
"""Strategies that need no update but the weighted mean of all."""


def check_collective(config: RunConfig) -> None:
    """Checks that the configuration needs no single update where devices add them up themselves.

    Raises:
        ConfigError: a setting does.
    """
    how, compression, guard = (
        f"aggregation.collective = {config.aggregation.collective!r}",
        config.compression,
        config.guard,
    )
    needs = {
        "compression.up": (compression.up, "dense", "its bodies do not add up"),
        "compression.layers": (dict(compression.layers), {}, "their bodies do not add up"),
        "compression.down": (compression.down, "dense", "devices keep the model that they have added up"),
        "server.optimizer": (config.server.optimizer, "none", "devices move the model by the mean itself"),
        "server.learning_rate": (config.server.learning_rate, 1.0, "devices move the model by the mean itself"),
        "run.min_updates": (config.run.min_updates, None, "all members of a collective are waited for"),
        "run.on_timeout": (
            "reassign" if config.run.on_timeout == "reassign" else "aggregate",
            "aggregate",
            "another device is no member",
        ),
        "guard.enabled": (guard.enabled, False, "no update is there to be compared; a device can send anything"),
        "guard.max_norm": (guard.max_norm, None, "no update is there to be measured"),
        "guard.max_weight_ratio": (guard.max_weight_ratio, 0.0, "devices weigh their updates themselves"),
    }
    faults = Faults()
    for name, (found, needed, reason) in needs.items():
        if found != needed:
            right = "left out" if needed is None or needed == {} else format_setting(needed)
            faults.messages.append(f"{name} must be {right} with {how}, got {format_setting(found)}: {reason}")
    faults.check()


def check_weighted_mean(strategy: Strategy[Any], config: RunConfig) -> None:
    """Checks that a strategy moves the model by the weighted mean of updates, and by nothing else of them.

    Raises:
        ConfigError: it does not, or not with these settings.
    """
    name, how = config.strategy.name, f"aggregation.collective = {config.aggregation.collective!r}"
    if name not in WEIGHTED_MEANS or not isinstance(strategy, SynchronousStrategy):
        raise ConfigError(
            f"strategy.name must be one of {', '.join(WEIGHTED_MEANS)} with {how}, got {name!r}: it needs each update"
        )
    if strategy.compute_norm is not weight_uniformly:
        raise ConfigError(f"strategy.aggregation must be 'uniform' or 'samples' with {how}, got 'nova'")
    if strategy.double_buffering:
        raise ConfigError(
            f"strategy.double_buffering must be false with {how}: the next model is where it was added up"
        )
    if strategy.rules.server.learning_rate != 1.0:
        raise ConfigError(
            f"strategy.global_learning_rate must be 1 with {how}, got {strategy.rules.server.learning_rate:g}"
        )
    if isinstance(strategy, ESync) and strategy.config.mode != "budget" and config.aggregation.reductions > 1:
        raise ConfigError(
            f"strategy.mode must be 'budget' with aggregation.reductions above 1, got {strategy.config.mode!r}"
        )

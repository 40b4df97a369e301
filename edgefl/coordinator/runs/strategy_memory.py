"""Checks of the memory and message size that a strategy needs, before its run is accepted."""

from __future__ import annotations

from typing import Any

from edgefl.coordinator.execution.eligibility import is_selected
from edgefl.coordinator.fleet.registry import DeviceRegistry
from edgefl.coordinator.runs.admission_requirements import count_model_bytes
from edgefl.core.config import RunConfig
from edgefl.core.errors import ConfigError
from edgefl.core.protocol import MAX_PEER_BYTES
from edgefl.core.types import DeviceInfo, Json, Role, Tensors


def check_strategy_memory(config: RunConfig, strategy: Any, model: Tensors, roster: DeviceRegistry) -> Json:
    """Returns `state_bytes` and the number of devices that it is for, `state_devices`.

    Counts the trainers that the run file selects, present or not, and at least the minimum of the run.

    Raises:
        ConfigError: the state exceeds the run's limit.
    """
    return check_memory_for(
        max(config.devices.min, sum(_is_selected(info, config) for info in roster.list_devices())),
        config,
        strategy,
        model,
    )


def check_memory_for(num_devices: int, config: RunConfig, strategy: Any, model: Tensors) -> Json:
    """Returns the same as `check_strategy_memory`, for `num_devices`.

    Raises:
        ConfigError: the state exceeds the run's limit.
    """
    needed = num_devices * compute_bytes_per_device(strategy, model)
    limit = config.run.max_state_bytes
    if needed > limit:
        raise ConfigError(
            f"{config.strategy.name} keeps {_format_bytes(needed)} for {num_devices} devices, the run may have "
            f"{_format_bytes(limit)}: raise run.max_state_bytes, or name fewer devices"
        )
    return {"state_bytes": needed, "state_devices": num_devices}


def check_message_size(strategy: Any, model: Tensors) -> None:
    """Checks that devices can send each other a full model.

    Raises:
        ConfigError: it exceeds the maximum message size.
    """
    declared = getattr(strategy, "bytes_per_message", None)
    needed = 0 if declared is None else int(declared(count_model_bytes(model)))
    if needed > MAX_PEER_BYTES:
        raise ConfigError(
            f"devices send each other messages of at most {_format_bytes(MAX_PEER_BYTES)}, this run's have "
            f"{_format_bytes(needed)}: use strategy.carrier = 'relay', or a smaller model"
        )


def compute_bytes_per_device(strategy: Any, model: Tensors) -> int:
    """Returns the bytes of state per device that the strategy declares."""
    declared = getattr(strategy, "bytes_per_device", None)
    return 0 if declared is None else int(declared(count_model_bytes(model)))


def _is_selected(info: DeviceInfo, config: RunConfig) -> bool:
    devices = config.devices
    chosen = is_selected(info, task=config.run.task, groups=devices.groups, names=devices.names)
    return info.role == Role.TRAINER and chosen


def _format_bytes(num_bytes: int) -> str:
    for unit, size in (("GiB", 1024**3), ("MiB", 1024**2)):
        if num_bytes >= size:
            return f"{num_bytes} bytes ({num_bytes / size:.1f} {unit})"
    return f"{num_bytes} bytes"

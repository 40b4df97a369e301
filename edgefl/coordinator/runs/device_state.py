"""What a strategy needs for each device and each message, looked at before its run is let in."""

from __future__ import annotations

from typing import Any

from edgefl.config import RunConfig
from edgefl.coordinator.dispatch.participants import is_meant
from edgefl.coordinator.fleet.roster import Roster
from edgefl.coordinator.runs.admission import model_size
from edgefl.errors import ConfigError
from edgefl.protocol import MAX_PEER_BYTES
from edgefl.types import DeviceInfo, Json, Role, Tensors


def check_device_state(config: RunConfig, strategy: Any, model: Tensors, roster: Roster) -> Json:
    """Returns `state_bytes`, for how many devices (`state_devices`), as an answer to who submits the run.

    Counted are the trainers that the run file means, present or not, and at least as many as the run begins with.

    Raises:
        ConfigError: it is more than the run may have.
    """
    return check_state_of(
        max(config.devices.min, sum(_is_meant(info, config) for info in roster.known())), config, strategy, model
    )


def check_state_of(num_devices: int, config: RunConfig, strategy: Any, model: Tensors) -> Json:
    """Returns what `check_device_state` does, for so many devices.

    Raises:
        ConfigError: it is more than the run may have.
    """
    needed = num_devices * bytes_per_device(strategy, model)
    limit = config.run.max_state_bytes
    if needed > limit:
        raise ConfigError(
            f"{config.strategy.name} keeps {_readable(needed)} for {num_devices} devices, the run may have "
            f"{_readable(limit)}: raise run.max_state_bytes, or name fewer devices"
        )
    return {"state_bytes": needed, "state_devices": num_devices}


def check_messages(strategy: Any, model: Tensors) -> None:
    """Lets those runs through whose devices can send each other a whole model.

    Raises:
        ConfigError: it is more than a message may have.
    """
    declared = getattr(strategy, "bytes_per_message", None)
    needed = 0 if declared is None else int(declared(model_size(model)))
    if needed > MAX_PEER_BYTES:
        raise ConfigError(
            f"devices send each other messages of at most {_readable(MAX_PEER_BYTES)}, this run's have "
            f"{_readable(needed)}: use strategy.carrier = 'relay', or a smaller model"
        )


def bytes_per_device(strategy: Any, model: Tensors) -> int:
    """Returns how many bytes the strategy declares to keep for each device."""
    declared = getattr(strategy, "bytes_per_device", None)
    return 0 if declared is None else int(declared(model_size(model)))


def _is_meant(info: DeviceInfo, config: RunConfig) -> bool:
    devices = config.devices
    chosen = is_meant(info, task=config.run.task, groups=devices.groups, names=devices.names)
    return info.role == Role.TRAINER and chosen


def _readable(num_bytes: int) -> str:
    for unit, size in (("GiB", 1024**3), ("MiB", 1024**2)):
        if num_bytes >= size:
            return f"{num_bytes} bytes ({num_bytes / size:.1f} {unit})"
    return f"{num_bytes} bytes"

"""Requirements of a run: of its devices at admission, of memory and message size, and that some device can train."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from edgefl import DISTRIBUTION
from edgefl.coordinator.execution.admission import AdmissionRequirements
from edgefl.coordinator.execution.eligibility import NO_TORCH, find_training_blocker, is_selected
from edgefl.coordinator.fleet.registry import DeviceRegistry
from edgefl.core.config import RunConfig
from edgefl.core.errors import ConfigError, TaskError
from edgefl.core.protocol import MAX_PEER_BYTES
from edgefl.core.types import DeviceInfo, Json, Role, Tensors

if TYPE_CHECKING:
    from edgefl.engine.build import RunComponents

MODEL_COPIES_IN_MEMORY = 4
"""Weights, gradients, the encoded update, and the state of a local algorithm."""
MODEL_COPIES_ON_DISK = 2
"""The codec's residual, and moments or local tensors of the device."""


def create_admission_requirements(
    run: RunComponents, previous_devices: tuple[str, ...] = (), *, is_resumed: bool = False
) -> AdmissionRequirements:
    """Returns the admission requirements of a run.

    `previous_devices` took part before it was resumed; with `is_resumed` it goes on where it was.

    The first model is prefetched only where every device will use it: nodes of a graph may have their own, and
    where a sample is drawn for each round the other devices would fetch it for nothing.
    """
    devices, model_bytes = run.config.devices, count_model_bytes(run.model)
    has_nodes = run.strategy.has_nodes
    return AdmissionRequirements(
        require=devices.require,
        ready_s=devices.ready_s,
        model_fingerprint=run.layout,
        memory_bytes=MODEL_COPIES_IN_MEMORY * model_bytes,
        disk_bytes=MODEL_COPIES_ON_DISK * model_bytes,
        previous_devices=previous_devices,
        is_resumed=is_resumed,
        should_prefetch_model=not has_nodes and devices.count is None and devices.fraction is None,
    )


def count_model_bytes(model: Tensors) -> int:
    """Returns the bytes of a model in memory."""
    return sum(getattr(tensor, "nbytes", 0) for tensor in model.values())


def check_strategy_memory(config: RunConfig, strategy: Any, model: Tensors, registry: DeviceRegistry) -> Json:
    """Returns `state_bytes` and the number of devices that it is for, `state_devices`.

    Counts the trainers that the run file selects, present or not, and at least the minimum of the run.

    Raises:
        ConfigError: the state exceeds the run's limit.
    """
    return check_memory_for(
        max(config.devices.min, sum(_is_selected(info, config) for info in registry.list_devices())),
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
    needed = int(strategy.bytes_per_message(count_model_bytes(model)))
    if needed > MAX_PEER_BYTES:
        raise ConfigError(
            f"devices send each other messages of at most {_format_bytes(MAX_PEER_BYTES)}, this run's have "
            f"{_format_bytes(needed)}: use strategy.carrier = 'relay', or a smaller model"
        )


def compute_bytes_per_device(strategy: Any, model: Tensors) -> int:
    """Returns the bytes of state per device that the strategy declares."""
    return int(strategy.bytes_per_device(count_model_bytes(model)))


def _is_selected(info: DeviceInfo, config: RunConfig) -> bool:
    devices = config.devices
    chosen = is_selected(info, task=config.run.task, groups=devices.groups, names=devices.names)
    return info.role == Role.TRAINER and chosen


def _format_bytes(num_bytes: int) -> str:
    for unit, size in (("GiB", 1024**3), ("MiB", 1024**2)):
        if num_bytes >= size:
            return f"{num_bytes} bytes ({num_bytes / size:.1f} {unit})"
    return f"{num_bytes} bytes"


MAX_NAMES = 5


def check_trainers(config: RunConfig, registry: DeviceRegistry, *, needs_torch: bool) -> None:
    """Checks that at least one trainer that the run file selects can train its task.

    A run that selects no device yet passes: devices may join later.

    Raises:
        TaskError: none of them can.
    """
    devices = config.devices
    selected = [
        info
        for info in registry.list_devices()
        if info.role == Role.TRAINER
        and is_selected(info, task=config.run.task, groups=devices.groups, names=devices.names)
    ]
    reasons = {info.device_id: find_training_blocker(info, needs_torch=needs_torch) for info in selected}
    if not all(reasons.values()) or not selected:
        return
    names = sorted(reasons)
    listed = ", ".join(names[:MAX_NAMES]) + (f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else "")
    if any(reason != NO_TORCH for reason in reasons.values()):
        details = "; ".join(f"{name}: {reasons[name]}" for name in names[:MAX_NAMES])
        raise TaskError(f"no device can train task {config.run.task}: {details}")
    raise TaskError(
        f"no device can train task {config.run.task}: {listed} have no torch and can only use finished models; "
        f"install {DISTRIBUTION}[train] on them, or let a board join that has it"
    )

"""Deployment requests: the model, and the devices that can use it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from edgefl.coordinator.fleet.registry import DeviceRegistry
from edgefl.coordinator.rollouts.state_machine import check_canaries
from edgefl.core.errors import ConfigError, NotFoundError, UsageError
from edgefl.core.protocol import EVALUATOR_NAME
from edgefl.core.types import DeviceInfo

DEFAULT_CANARY_S = 600.0
DEFAULT_TOLERANCE = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class DeploymentRequest:
    """An operator's request for a deployment.

    Attributes:
        model: a saved model, as `saved_models.find_model` takes it.
        devices: by name; None for every device with a shard for the model's task.
        canary: number of devices that get it first; 0 for all at once.
        canary_s: how long these have to report that they run it.
        tolerance: how much lower than the previous model's its accuracy on a device's own data may be, 0 to 1.
        min_accuracy: minimum accuracy there in any case, 0 to 1.
    """

    model: str
    devices: tuple[str, ...] | None = None
    canary: int = 0
    canary_s: float = DEFAULT_CANARY_S
    tolerance: float = DEFAULT_TOLERANCE
    min_accuracy: float = 0.0

    def __post_init__(self) -> None:
        check_canaries(self.canary, self.canary_s)
        for name, value in (("tolerance", self.tolerance), ("min_accuracy", self.min_accuracy)):
            if not 0 <= value <= 1:
                raise ConfigError(f"{name} must be an accuracy in 0 to 1, got {value}")


def select_devices(registry: DeviceRegistry, task: str, names: Sequence[str] | None) -> list[str]:
    """Returns the devices to deploy a model of this task to.

    Raises:
        NotFoundError: a named device is not in the fleet.
        UsageError: a named device, or every device, has no data to check the model on.
    """
    capable = {info.device_id for info in registry.list_devices() if can_use(info, task)}
    if names is None:
        if not capable:
            raise UsageError(f"no device has a shard for task {task}; edgefl device shard add {task} PATH")
        return sorted(capable)
    for name in names:
        if registry.get_device(name) is None:
            raise NotFoundError(f"no device {name!r}; `edgefl devices list` shows them")
        if name not in capable:
            raise UsageError(f"{name} has no shard for task {task}, so it cannot check the model")
    return sorted(set(names))


def can_use(info: DeviceInfo, task: str) -> bool:
    """Returns whether a device can check a model of this task; not the coordinator's own evaluator."""
    return info.device_id != EVALUATOR_NAME and task in info.tasks

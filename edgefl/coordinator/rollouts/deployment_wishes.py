"""What an operator asks to be deployed: which model it is, and which devices can take it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from edgefl.coordinator.fleet.roster import Roster
from edgefl.coordinator.rollouts.rollout import check_canaries
from edgefl.errors import ConfigError, NotFoundError, UsageError
from edgefl.protocol import EVALUATOR_NAME
from edgefl.types import DeviceInfo

CANARY_S = 600.0
TOLERANCE = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class DeploymentWish:
    """What an operator asks for.

    Attributes:
        model: a kept model, as `storage.model_rows.find_model` understands it.
        devices: by name; None for every device with a shard for the model's task.
        canary: how many get it first; 0 for all at once.
        canary_s: how long these have to report that they run it.
        tolerance: how much lower than the model before it may be, in accuracy on a device's own data.
        min_accuracy: what it must reach there in any case.
    """

    model: str
    devices: tuple[str, ...] | None = None
    canary: int = 0
    canary_s: float = CANARY_S
    tolerance: float = TOLERANCE
    min_accuracy: float = 0.0

    def __post_init__(self) -> None:
        check_canaries(self.canary, self.canary_s)
        for name, value in (("tolerance", self.tolerance), ("min_accuracy", self.min_accuracy)):
            if not 0 <= value <= 1:
                raise ConfigError(f"{name} must be an accuracy in 0 to 1, got {value}")


def targets(roster: Roster, task: str, names: Sequence[str] | None) -> list[str]:
    """Returns the devices that are to get a model of this task.

    Raises:
        NotFoundError: a named device is not in the fleet.
        UsageError: one has no data to check the model on, or none at all has.
    """
    able = {info.device_id for info in roster.known() if can_use(info, task)}
    if names is None:
        if not able:
            raise UsageError(f"no device has a shard for task {task}; edgefl device shard add {task} PATH")
        return sorted(able)
    for name in names:
        if roster.info(name) is None:
            raise NotFoundError(f"no device {name!r}; `edgefl devices list` shows them")
        if name not in able:
            raise UsageError(f"{name} has no shard for task {task}, so it cannot check the model")
    return sorted(set(names))


def can_use(info: DeviceInfo, task: str) -> bool:
    """Returns whether a device can check a model of this task; the coordinator's own evaluator is no board."""
    return info.device_id != EVALUATOR_NAME and task in info.tasks

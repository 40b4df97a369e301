"""Check that some selected device can train; without torch it can only use finished models."""

from __future__ import annotations

from edgefl import DISTRIBUTION
from edgefl.coordinator.execution.eligibility import NO_TORCH, find_training_blocker, is_selected
from edgefl.coordinator.fleet.registry import DeviceRegistry
from edgefl.core.config import RunConfig
from edgefl.core.errors import TaskError
from edgefl.core.types import Role

MAX_NAMES = 5


def check_trainers(config: RunConfig, roster: DeviceRegistry, *, needs_torch: bool) -> None:
    """Checks that at least one trainer that the run file selects can train its task.

    A run that selects no device yet passes: devices may join later.

    Raises:
        TaskError: none of them can.
    """
    devices = config.devices
    selected = [
        info
        for info in roster.list_devices()
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

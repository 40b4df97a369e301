"""Whether anybody is left who can train: boards without torch only use finished models of torch tasks."""

from __future__ import annotations

from edgefl import DISTRIBUTION
from edgefl.config import RunConfig
from edgefl.coordinator.dispatch.participants import NO_TORCH, is_meant, why_untrained
from edgefl.coordinator.fleet.roster import Roster
from edgefl.errors import TaskError
from edgefl.types import Role

NAMED = 5


def check_trainers(config: RunConfig, roster: Roster, *, needs_torch: bool) -> None:
    """Checks that not all trainers that a run file means are boards that cannot train its task.

    A run that means nobody yet is let in: boards may join later.

    Raises:
        TaskError: all of them are.
    """
    devices = config.devices
    meant = [
        info
        for info in roster.known()
        if info.role == Role.TRAINER
        and is_meant(info, task=config.run.task, groups=devices.groups, names=devices.names)
    ]
    reasons = {info.device_id: why_untrained(info, needs_torch=needs_torch) for info in meant}
    if not all(reasons.values()) or not meant:
        return
    names = sorted(reasons)
    some = ", ".join(names[:NAMED]) + (f" and {len(names) - NAMED} more" if len(names) > NAMED else "")
    if any(reason != NO_TORCH for reason in reasons.values()):
        told = "; ".join(f"{name}: {reasons[name]}" for name in names[:NAMED])
        raise TaskError(f"no device can train task {config.run.task}: {told}")
    raise TaskError(
        f"no device can train task {config.run.task}: {some} have no torch and can only use finished models; "
        f"install {DISTRIBUTION}[train] on them, or let a board join that has it"
    )

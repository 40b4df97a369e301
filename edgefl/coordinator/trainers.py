"""Whether anybody is left who can train: boards without torch only use finished models of torch tasks."""

from __future__ import annotations

from edgefl.config import RunConfig
from edgefl.coordinator.participants import has_torch, is_meant
from edgefl.coordinator.roster import Roster
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
    if not needs_torch or not meant or any(has_torch(info) for info in meant):
        return
    names = sorted(info.device_id for info in meant)
    some = ", ".join(names[:NAMED]) + (f" and {len(names) - NAMED} more" if len(names) > NAMED else "")
    raise TaskError(
        f"no device can train task {config.run.task}: {some} have no torch and can only use finished models; "
        "install edgefl[train] on them, or let a board join that has it"
    )

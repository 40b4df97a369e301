"""State machine of deployments and installations: canaries first, the rest when they all run it.

When a canary fails, no other device is notified; a deployment's model is rolled back everywhere.

Pure: rows in, changes out. The caller stores them before it acts on them, so that a restarted coordinator goes on
from there.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from edgefl.core.errors import ConfigError, UsageError
from edgefl.core.types import DeviceInfo
from edgefl.storage.repositories.rollouts import (
    CANARY_PART,
    DeploymentDeviceRecord,
    DeploymentRecord,
    RolloutDeviceRecord,
    RolloutRecord,
    RolloutStage,
    RolloutStatus,
)

MAX_CANARY_S = 7 * 24 * 3600.0
MIN_JUDGES = 3
"""Canaries whose accuracies pass a model on: of three, one that lies does not decide."""

RolloutDeviceRecords = Sequence[RolloutDeviceRecord]

_UNANSWERED_STAGES = frozenset({RolloutStage.PENDING, RolloutStage.NOTIFIED})
_AWAITED_STAGES = frozenset({*_UNANSWERED_STAGES, RolloutStage.REVERTING})
_FAILED_STAGES = frozenset({RolloutStage.REJECTED, RolloutStage.FAILED, RolloutStage.ROLLED_BACK})
_POSSIBLY_RUNNING_STAGES = frozenset({RolloutStage.NOTIFIED, RolloutStage.RUNNING})


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutTransition:
    """Changes of a rollout: columns of its row, and of its devices by name."""

    values: Mapping[str, Any] = field(default_factory=dict)
    devices: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


def check_canaries(canary: int, canary_s: float) -> None:
    """Raises `ConfigError` for an invalid number of canaries, or an invalid time for them."""
    if canary < 0:
        raise ConfigError(f"canary must be 0 or more devices, got {canary}")
    if not 0 < canary_s <= MAX_CANARY_S:
        raise ConfigError(f"the canaries' time must be above 0 and at most a week, got {canary_s} s")


def check_judges(canary: int, num_devices: int) -> int:
    """Returns the number of canaries of a model.

    Raises:
        UsageError: there are too few devices for canaries whose word counts for the others.
    """
    if num_devices < MIN_JUDGES:
        raise UsageError(
            f"canaries pass a model on by accuracy when there are {MIN_JUDGES} or more, there are {num_devices} "
            "devices: leave canary out, and each device decides for itself, or set run.trust_single_evaluation "
            "in the run file"
        )
    return canary


def select_canaries(present: Sequence[DeviceInfo], number: int) -> list[str]:
    """Returns up to `number` devices, of as many board types as possible."""
    by_board: dict[str, list[str]] = {}
    for info in sorted(present, key=lambda info: info.device_id):
        board = str(info.capabilities.get("model") or info.capabilities.get("family") or "")
        by_board.setdefault(board, []).append(info.device_id)
    num_turns = max((len(names) for names in by_board.values()), default=0)
    ordered = [names[turn] for turn in range(num_turns) for names in by_board.values() if turn < len(names)]
    return ordered[:number]


def start_rollout(
    rollout: RolloutRecord, rows: RolloutDeviceRecords, present: Sequence[DeviceInfo], now: float
) -> RolloutTransition:
    """Returns the first step, once the file for the devices is ready."""
    if not rollout.canary:
        return _notify_pending(rows)
    pending = {row.device_id for row in rows if row.state is RolloutStage.PENDING}
    canaries = select_canaries([info for info in present if info.device_id in pending], rollout.canary)
    if not canaries:
        return fail_rollout(rollout, rows, "no device is online that could be a canary", now)
    if rollout.ROLLS_BACK and len(canaries) < min(MIN_JUDGES, rollout.canary):
        reason = f"{MIN_JUDGES} canaries are needed to pass a model on, only {', '.join(canaries)} online"
        return fail_rollout(rollout, rows, reason, now)
    return RolloutTransition(
        values={"status": RolloutStatus.CANARY, "canary_until": now + rollout.canary_s},
        devices={name: {"state": RolloutStage.NOTIFIED, "part": CANARY_PART} for name in canaries},
    )


def advance_rollout(rollout: RolloutRecord, rows: RolloutDeviceRecords, now: float) -> RolloutTransition | None:
    """Returns the next step, or None while it has to wait."""
    if rollout.status is RolloutStatus.CANARY:
        return _evaluate_canaries(rollout, [row for row in rows if row.part == CANARY_PART], rows, now)
    if rollout.status is RolloutStatus.ROLLING and not any(row.state in _UNANSWERED_STAGES for row in rows):
        return _complete(rows, now)
    return None


def update_canary_deadline(
    rollout: RolloutRecord, rows: RolloutDeviceRecords, is_queued: Callable[[str], bool], now: float
) -> RolloutTransition | None:
    """Returns the change of the canary deadline, which starts once no canary is busy with another rollout."""
    if rollout.status is not RolloutStatus.CANARY:
        return None
    if any(
        row.part == CANARY_PART and row.state is RolloutStage.NOTIFIED and is_queued(row.device_id) for row in rows
    ):
        return None if rollout.canary_until is None else RolloutTransition(values={"canary_until": None})
    return (
        RolloutTransition(values={"canary_until": now + rollout.canary_s}) if rollout.canary_until is None else None
    )


def fail_removed_devices(rows: RolloutDeviceRecords, is_known: Callable[[str], bool]) -> RolloutTransition | None:
    """Returns the failure of devices removed from the fleet before they answered; None if there are none."""
    failure = {"state": RolloutStage.FAILED, "reason": "it was taken out of the fleet"}
    awaited = (row.device_id for row in rows if row.state in _AWAITED_STAGES)
    changes = {name: failure for name in awaited if not is_known(name)}
    return RolloutTransition(devices=changes) if changes else None


def fail_rollout(rollout: RolloutRecord, rows: RolloutDeviceRecords, reason: str, now: float) -> RolloutTransition:
    """Returns the failure of a rollout; devices that may run its model are reverted to the previous one."""
    changes: dict[str, Mapping[str, Any]] = {}
    for row in rows:
        if row.state in _POSSIBLY_RUNNING_STAGES and rollout.ROLLS_BACK:
            changes[row.device_id] = {"state": RolloutStage.REVERTING, "reason": reason}
        elif row.state is RolloutStage.PENDING:
            changes[row.device_id] = {"state": RolloutStage.SUPERSEDED, "reason": "never told: it failed elsewhere"}
        elif row.state is RolloutStage.NOTIFIED:
            changes[row.device_id] = {"state": RolloutStage.SUPERSEDED, "reason": reason}
    return RolloutTransition(
        values={"status": RolloutStatus.FAILED, "reason": reason, "finished_at": now}, devices=changes
    )


def supersede_rollout(rows: RolloutDeviceRecords, now: float) -> RolloutTransition:
    """Returns the end of a rollout that a newer one replaces."""
    superseded = {
        row.device_id: {"state": RolloutStage.SUPERSEDED} for row in rows if row.state in _UNANSWERED_STAGES
    }
    values = {"status": RolloutStatus.SUPERSEDED, "reason": "a newer deployment came", "finished_at": now}
    return RolloutTransition(values=values, devices=superseded)


def _notify_pending(rows: RolloutDeviceRecords) -> RolloutTransition:
    notified = {row.device_id: {"state": RolloutStage.NOTIFIED} for row in rows if row.state is RolloutStage.PENDING}
    return RolloutTransition(values={"status": RolloutStatus.ROLLING}, devices=notified)


def _evaluate_canaries(
    rollout: RolloutRecord, canaries: RolloutDeviceRecords, rows: RolloutDeviceRecords, now: float
) -> RolloutTransition | None:
    failed = next((row for row in canaries if row.state in _FAILED_STAGES), None)
    if failed is not None:
        return fail_rollout(rollout, rows, f"canary {failed.device_id}: {failed.reason or failed.state}", now)
    if any(row.state is RolloutStage.SUPERSEDED for row in canaries):
        return supersede_rollout(rows, now)
    unconfirmed = [row.device_id for row in canaries if row.state is not RolloutStage.RUNNING]
    if not unconfirmed:
        shortfall = _find_shortfall(rollout, canaries)
        return _notify_pending(rows) if shortfall is None else fail_rollout(rollout, rows, shortfall, now)
    if rollout.canary_until is not None and now >= rollout.canary_until:
        reason = f"canary {', '.join(unconfirmed)} did not report within {rollout.canary_s:g} s"
        return fail_rollout(rollout, rows, reason, now)
    return None


def _find_shortfall(rollout: RolloutRecord, canaries: RolloutDeviceRecords) -> str | None:
    """Returns why the canaries' accuracies do not pass a model on; None if they do, or it is no model.

    Each canary has decided by its own; the medians are what the coordinator decides by.
    """
    if not isinstance(rollout, DeploymentRecord) or rollout.canary < MIN_JUDGES:  # the run file trusts fewer
        return None
    reports = [row for row in canaries if isinstance(row, DeploymentDeviceRecord)]
    accuracies = [row.accuracy for row in reports if row.accuracy is not None]
    former = [row.former_accuracy for row in reports if row.former_accuracy is not None]
    if not accuracies and not rollout.min_accuracy:
        return None  # targets are no classes: each canary has compared losses
    if len(accuracies) < MIN_JUDGES:
        return f"{len(accuracies)} of {len(reports)} canaries reported an accuracy, {MIN_JUDGES} are needed"
    median = statistics.median(accuracies)
    if median < rollout.min_accuracy:
        return f"the canaries' median accuracy is {median:.3f}, at least {rollout.min_accuracy:g} is needed"
    if former and median < statistics.median(former) - rollout.tolerance:
        return f"the canaries' median accuracy is {median:.3f}, with the model before {statistics.median(former):.3f}"
    return None


def _complete(rows: RolloutDeviceRecords, now: float) -> RolloutTransition:
    answered = [row for row in rows if row.state is not RolloutStage.SUPERSEDED]
    if not answered:
        return supersede_rollout(rows, now)
    if not any(row.state is RolloutStage.RUNNING for row in answered):
        first = answered[0]
        reason = f"no device took it; {first.device_id}: {first.reason or first.state}"
        return RolloutTransition(values={"status": RolloutStatus.FAILED, "reason": reason, "finished_at": now})
    return RolloutTransition(values={"status": RolloutStatus.DONE, "finished_at": now})

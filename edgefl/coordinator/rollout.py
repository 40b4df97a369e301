"""What comes next in a deployment: canaries first, the rest when they all run it, back again when one does not.

Pure: rows in, changes out. Who carries them out keeps them in the store first, so a coordinator that dies at any
point goes on from there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from edgefl.storage.deployment_records import (
    CANARY,
    DeploymentDeviceRecord,
    DeploymentRecord,
    DeploymentStatus,
    DeviceStage,
)
from edgefl.types import DeviceInfo

Rows = Sequence[DeploymentDeviceRecord]

_UNANSWERED = frozenset({DeviceStage.HELD, DeviceStage.TOLD})
_UNUSABLE = frozenset({DeviceStage.REFUSED, DeviceStage.FAILED})
_MAY_RUN = frozenset({DeviceStage.TOLD, DeviceStage.RUNNING})
REPORTED = dict.fromkeys((DeviceStage.RUNNING, DeviceStage.REFUSED, DeviceStage.FAILED), DeviceStage.TOLD) | {
    DeviceStage.REVERTED: DeviceStage.REVERTING
}
"""What a device may report, and where it must stand for that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What changes: columns of the deployment, and columns of its devices by name."""

    values: Mapping[str, Any] = field(default_factory=dict)
    devices: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


def choose_canaries(present: Sequence[DeviceInfo], number: int) -> list[str]:
    """Returns the names of so many devices, of as many kinds of board as possible; fewer where there are fewer."""
    by_board: dict[str, list[str]] = {}
    for info in sorted(present, key=lambda info: info.device_id):
        board = str(info.capabilities.get("model") or info.capabilities.get("family") or "")
        by_board.setdefault(board, []).append(info.device_id)
    turns = max((len(names) for names in by_board.values()), default=0)
    ordered = [names[turn] for turn in range(turns) for names in by_board.values() if turn < len(names)]
    return ordered[:number]


def begin(deployment: DeploymentRecord, rows: Rows, present: Sequence[DeviceInfo], now: float) -> Step:
    """Returns the first step of a deployment whose file is ready."""
    held = [row.device_id for row in rows if row.state is DeviceStage.HELD]
    if not deployment.canary:
        told = {name: {"state": DeviceStage.TOLD} for name in held}
        return Step(values={"status": DeploymentStatus.ROLLING}, devices=told)
    canaries = choose_canaries([info for info in present if info.device_id in set(held)], deployment.canary)
    if not canaries:
        return failed(rows, "no device is online that could be a canary", now)
    return Step(
        values={"status": DeploymentStatus.CANARY, "canary_until": now + deployment.canary_s},
        devices={name: {"state": DeviceStage.TOLD, "part": CANARY} for name in canaries},
    )


def advance(deployment: DeploymentRecord, rows: Rows, now: float) -> Step | None:
    """Returns the next step, or None while there is nothing to do but to wait."""
    if deployment.status is DeploymentStatus.CANARY:
        return _judge_canaries(deployment, [row for row in rows if row.part == CANARY], rows, now)
    if deployment.status is DeploymentStatus.ROLLING and not any(row.state in _UNANSWERED for row in rows):
        return _finished(rows, now)
    return None


def failed(rows: Rows, reason: str, now: float) -> Step:
    """Returns the end of a deployment that must not go on: those that have the model, or may have, go back."""
    changes: dict[str, Mapping[str, Any]] = {}
    for row in rows:
        if row.state in _MAY_RUN:
            changes[row.device_id] = {"state": DeviceStage.REVERTING, "reason": reason}
        elif row.state is DeviceStage.HELD:
            changes[row.device_id] = {"state": DeviceStage.SUPERSEDED, "reason": "never told: the deployment failed"}
    return Step(values={"status": DeploymentStatus.FAILED, "reason": reason, "finished_at": now}, devices=changes)


def _judge_canaries(deployment: DeploymentRecord, canaries: Rows, rows: Rows, now: float) -> Step | None:
    bad = next((row for row in canaries if row.state in _UNUSABLE), None)
    if bad is not None:
        return failed(rows, f"canary {bad.device_id}: {bad.reason or bad.state}", now)
    if any(row.state is DeviceStage.SUPERSEDED for row in canaries):
        return _superseded(rows, now)
    waiting = [row.device_id for row in canaries if row.state is not DeviceStage.RUNNING]
    if not waiting:
        told = {row.device_id: {"state": DeviceStage.TOLD} for row in rows if row.state is DeviceStage.HELD}
        return Step(values={"status": DeploymentStatus.ROLLING}, devices=told)
    if now >= (deployment.canary_until or now):
        reason = f"canary {', '.join(waiting)} did not report within {deployment.canary_s:g} s"
        return failed(rows, reason, now)
    return None


def _superseded(rows: Rows, now: float) -> Step:
    held = {row.device_id: {"state": DeviceStage.SUPERSEDED} for row in rows if row.state in _UNANSWERED}
    values = {"status": DeploymentStatus.SUPERSEDED, "reason": "a newer deployment came", "finished_at": now}
    return Step(values=values, devices=held)


def _finished(rows: Rows, now: float) -> Step:
    answered = [row for row in rows if row.state is not DeviceStage.SUPERSEDED]
    if not answered:
        return _superseded(rows, now)
    if not any(row.state is DeviceStage.RUNNING for row in answered):
        first = answered[0]
        reason = f"no device took it; {first.device_id}: {first.reason or first.state}"
        return Step(values={"status": DeploymentStatus.FAILED, "reason": reason, "finished_at": now})
    return Step(values={"status": DeploymentStatus.DONE, "finished_at": now})

"""What comes next in a deployment or an installation: canaries first, the rest when they all run it.

When a canary does not, nobody else is told; the model of a deployment is taken back everywhere.

Pure: rows in, changes out. Who carries them out keeps them in the store first, so a coordinator that dies at any
point goes on from there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from edgefl.errors import ConfigError
from edgefl.storage.deployment_records import CANARY, DeploymentStatus, DeviceStage
from edgefl.types import DeviceInfo


class Rollout(Protocol):
    """What is brought to devices: a deployment or an installation."""

    @property
    def canary(self) -> int: ...
    @property
    def canary_s(self) -> float: ...
    @property
    def canary_until(self) -> float | None: ...
    @property
    def status(self) -> DeploymentStatus: ...
    @property
    def is_taken_back(self) -> bool: ...


class RolloutDevice(Protocol):
    """Where one device of it stands."""

    @property
    def device_id(self) -> str: ...
    @property
    def part(self) -> str: ...
    @property
    def state(self) -> DeviceStage: ...
    @property
    def reason(self) -> str | None: ...


MAX_CANARY_S = 7 * 24 * 3600.0

Rows = Sequence[RolloutDevice]

_UNANSWERED = frozenset({DeviceStage.HELD, DeviceStage.TOLD})
_WAITED_FOR = frozenset({*_UNANSWERED, DeviceStage.REVERTING})
_UNUSABLE = frozenset({DeviceStage.REFUSED, DeviceStage.FAILED, DeviceStage.ROLLED_BACK})
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


def check_canaries(canary: int, canary_s: float) -> None:
    """Raises `ConfigError` unless so many canaries, and so many seconds for them, make sense."""
    if canary < 0:
        raise ConfigError(f"canary must be 0 or more devices, got {canary}")
    if not 0 < canary_s <= MAX_CANARY_S:
        raise ConfigError(f"the canaries' time must be above 0 and at most a week, got {canary_s} s")


def choose_canaries(present: Sequence[DeviceInfo], number: int) -> list[str]:
    """Returns the names of so many devices, of as many kinds of board as possible; fewer where there are fewer."""
    by_board: dict[str, list[str]] = {}
    for info in sorted(present, key=lambda info: info.device_id):
        board = str(info.capabilities.get("model") or info.capabilities.get("family") or "")
        by_board.setdefault(board, []).append(info.device_id)
    turns = max((len(names) for names in by_board.values()), default=0)
    ordered = [names[turn] for turn in range(turns) for names in by_board.values() if turn < len(names)]
    return ordered[:number]


def begin(rollout: Rollout, rows: Rows, present: Sequence[DeviceInfo], now: float) -> Step:
    """Returns the first step, when the file for the devices is ready."""
    held = [row.device_id for row in rows if row.state is DeviceStage.HELD]
    if not rollout.canary:
        told = {name: {"state": DeviceStage.TOLD} for name in held}
        return Step(values={"status": DeploymentStatus.ROLLING}, devices=told)
    canaries = choose_canaries([info for info in present if info.device_id in set(held)], rollout.canary)
    if not canaries:
        return failed(rollout, rows, "no device is online that could be a canary", now)
    return Step(
        values={"status": DeploymentStatus.CANARY, "canary_until": now + rollout.canary_s},
        devices={name: {"state": DeviceStage.TOLD, "part": CANARY} for name in canaries},
    )


def advance(rollout: Rollout, rows: Rows, now: float) -> Step | None:
    """Returns the next step, or None while there is nothing to do but to wait."""
    if rollout.status is DeploymentStatus.CANARY:
        return _judge_canaries(rollout, [row for row in rows if row.part == CANARY], rows, now)
    if rollout.status is DeploymentStatus.ROLLING and not any(row.state in _UNANSWERED for row in rows):
        return _finished(rows, now)
    return None


def canary_clock(rollout: Rollout, rows: Rows, is_queued: Callable[[str], bool], now: float) -> Step | None:
    """Returns what changes in the canaries' time: it begins when none of them is at something else any more."""
    if rollout.status is not DeploymentStatus.CANARY:
        return None
    if any(row.part == CANARY and row.state is DeviceStage.TOLD and is_queued(row.device_id) for row in rows):
        return None if rollout.canary_until is None else Step(values={"canary_until": None})
    return Step(values={"canary_until": now + rollout.canary_s}) if rollout.canary_until is None else None


def removed(rows: Rows, is_known: Callable[[str], bool]) -> Step | None:
    """Returns what becomes of devices that left the fleet before they answered; nobody waits for those."""
    gone = {"state": DeviceStage.FAILED, "reason": "it was taken out of the fleet"}
    waited_for = (row.device_id for row in rows if row.state in _WAITED_FOR)
    changes = {name: gone for name in waited_for if not is_known(name)}
    return Step(devices=changes) if changes else None


def failed(rollout: Rollout, rows: Rows, reason: str, now: float) -> Step:
    """Returns the end of what must not go on; those that have a model, or may have, go back to the one before."""
    changes: dict[str, Mapping[str, Any]] = {}
    for row in rows:
        if row.state in _MAY_RUN and rollout.is_taken_back:
            changes[row.device_id] = {"state": DeviceStage.REVERTING, "reason": reason}
        elif row.state is DeviceStage.HELD:
            changes[row.device_id] = {"state": DeviceStage.SUPERSEDED, "reason": "never told: it failed elsewhere"}
        elif row.state is DeviceStage.TOLD:
            changes[row.device_id] = {"state": DeviceStage.SUPERSEDED, "reason": reason}
    return Step(values={"status": DeploymentStatus.FAILED, "reason": reason, "finished_at": now}, devices=changes)


def _judge_canaries(rollout: Rollout, canaries: Rows, rows: Rows, now: float) -> Step | None:
    bad = next((row for row in canaries if row.state in _UNUSABLE), None)
    if bad is not None:
        return failed(rollout, rows, f"canary {bad.device_id}: {bad.reason or bad.state}", now)
    if any(row.state is DeviceStage.SUPERSEDED for row in canaries):
        return _superseded(rows, now)
    waiting = [row.device_id for row in canaries if row.state is not DeviceStage.RUNNING]
    if not waiting:
        told = {row.device_id: {"state": DeviceStage.TOLD} for row in rows if row.state is DeviceStage.HELD}
        return Step(values={"status": DeploymentStatus.ROLLING}, devices=told)
    if rollout.canary_until is not None and now >= rollout.canary_until:
        reason = f"canary {', '.join(waiting)} did not report within {rollout.canary_s:g} s"
        return failed(rollout, rows, reason, now)
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

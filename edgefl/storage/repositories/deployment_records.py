"""Records of deployments, apart from SQL: a model and its state on each device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class RolloutStatus(StrEnum):
    """Status of a deployment. PREPARING: its file is being made; DONE: every device has answered."""

    PREPARING = "preparing"
    CANARY = "canary"
    ROLLING = "rolling"
    DONE = "done"
    FAILED = "failed"
    SUPERSEDED = "superseded"

    @property
    def is_final(self) -> bool:
        return self in {RolloutStatus.DONE, RolloutStatus.FAILED, RolloutStatus.SUPERSEDED}


class RolloutStage(StrEnum):
    """State of one device of a deployment.

    PENDING waits for the canaries, NOTIFIED is to fetch and check the model, RUNNING has switched to it. REJECTED
    found it worse than the model before, FAILED could not use it: both retained that one. ROLLED_BACK, of releases
    and packs alone, tried it and rolled back by itself. REVERTING is to return to the model before, and REVERTED has.
    SUPERSEDED got a newer deployment before it answered.
    """

    PENDING = "held"
    NOTIFIED = "told"
    RUNNING = "running"
    REJECTED = "refused"
    FAILED = "failed"
    REVERTING = "reverting"
    REVERTED = "reverted"
    ROLLED_BACK = "rolled-back"
    SUPERSEDED = "superseded"


CANARY_PART, REMAINING_PART = "canary", "rest"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeploymentRecord:
    """One deployment; `devices` None means every device with a shard for the task, future ones too."""

    deployment_id: str
    run_id: str | None
    model: str
    task: str
    options: Mapping[str, Any]
    devices: tuple[str, ...] | None
    canary: int
    canary_s: float
    tolerance: float
    min_accuracy: float
    test_fraction: float
    status: RolloutStatus
    created_at: float
    reason: str | None = None
    onnx_sha256: str | None = None
    bytes_file: int | None = None
    canary_until: float | None = None
    finished_at: float | None = None

    @property
    def should_roll_back(self) -> bool:
        """Whether devices that run it roll back when it fails elsewhere."""
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class DeploymentDeviceRecord:
    """One device of a deployment; `part` is `canary` or `rest`."""

    deployment_id: str
    device_id: str
    state: RolloutStage
    part: str = REMAINING_PART
    reason: str | None = None
    accuracy: float | None = None
    former_accuracy: float | None = None
    num_examples: int | None = None
    reported_at: float | None = None

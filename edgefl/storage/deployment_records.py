"""Rows of deployments apart from SQL: a model on its way to devices, and where each of them stands."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class DeploymentStatus(StrEnum):
    """Where a deployment stands. PREPARING: its file is being made; DONE: every device has answered."""

    PREPARING = "preparing"
    CANARY = "canary"
    ROLLING = "rolling"
    DONE = "done"
    FAILED = "failed"
    SUPERSEDED = "superseded"

    @property
    def is_final(self) -> bool:
        return self in {DeploymentStatus.DONE, DeploymentStatus.FAILED, DeploymentStatus.SUPERSEDED}


class DeviceStage(StrEnum):
    """Where one device of a deployment stands.

    HELD waits for the canaries, TOLD is to fetch and check the model, RUNNING has switched to it. REFUSED found it
    worse than what it had, FAILED could not use it: both kept the model before. ROLLED_BACK, of releases and packs
    alone, tried it and went back by itself. REVERTING is to go back to that, and
    REVERTED has. SUPERSEDED got a newer deployment before it answered.
    """

    HELD = "held"
    TOLD = "told"
    RUNNING = "running"
    REFUSED = "refused"
    FAILED = "failed"
    REVERTING = "reverting"
    REVERTED = "reverted"
    ROLLED_BACK = "rolled-back"
    SUPERSEDED = "superseded"


CANARY, REST = "canary", "rest"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeploymentRecord:
    """One deployment; `devices` None means every device with a shard for the task, those that join later too."""

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
    status: DeploymentStatus
    created_at: float
    reason: str | None = None
    onnx_sha256: str | None = None
    bytes_file: int | None = None
    canary_until: float | None = None
    finished_at: float | None = None

    @property
    def is_taken_back(self) -> bool:
        """Whether devices that run it go back when it fails elsewhere."""
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class DeploymentDeviceRecord:
    """One device of a deployment; `part` is `canary` or `rest`."""

    deployment_id: str
    device_id: str
    state: DeviceStage
    part: str = REST
    reason: str | None = None
    accuracy: float | None = None
    former_accuracy: float | None = None
    num_examples: int | None = None
    reported_at: float | None = None

"""Deployments and installations as JSON values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict

from edgefl.protocol import PROTOCOL_VERSION
from edgefl.storage.deployment_records import DeploymentDeviceRecord, DeploymentRecord
from edgefl.storage.installation_records import InstallationDeviceRecord, InstallationRecord
from edgefl.types import Json


def rollout_json(record: DeploymentRecord | InstallationRecord, counts: Mapping[str, int]) -> Json:
    """Returns a rollout with how many of its devices are in which state."""
    return {**asdict(record), "status": str(record.status), "counts": dict(counts)}


def rollout_with_devices(
    record: DeploymentRecord | InstallationRecord,
    rows: Sequence[DeploymentDeviceRecord] | Sequence[InstallationDeviceRecord],
    counts: Mapping[str, int],
) -> Json:
    """Returns a rollout with where each of its devices stands."""
    each = [{**asdict(row), "state": str(row.state)} for row in rows]
    return {"v": PROTOCOL_VERSION, **rollout_json(record, counts), "each": each}

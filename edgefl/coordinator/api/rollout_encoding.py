"""Deployments and installations as JSON values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict

from edgefl.core.protocol import PROTOCOL_VERSION
from edgefl.core.types import Json
from edgefl.storage.repositories.deployment_records import DeploymentDeviceRecord, DeploymentRecord
from edgefl.storage.repositories.installation_records import InstallationDeviceRecord, InstallationRecord


def encode_rollout(record: DeploymentRecord | InstallationRecord, counts: Mapping[str, int]) -> Json:
    """Returns a rollout with the number of its devices by state."""
    return {**asdict(record), "status": str(record.status), "counts": dict(counts)}


def encode_rollout_with_devices(
    record: DeploymentRecord | InstallationRecord,
    rows: Sequence[DeploymentDeviceRecord] | Sequence[InstallationDeviceRecord],
    counts: Mapping[str, int],
) -> Json:
    """Returns a rollout with the state of each of its devices."""
    device_rows = [{**asdict(row), "state": str(row.state)} for row in rows]
    return {"v": PROTOCOL_VERSION, **encode_rollout(record, counts), "each": device_rows}

"""Rows of installations apart from SQL: a release or task pack on its way to devices, and where each of them stands.

They go the way of deployments: the same statuses and stages, canaries first. What differs is who decides: a device
rolls back by itself, and one that runs a release is not brought back because another one could not.
"""

from __future__ import annotations

from dataclasses import dataclass

from edgefl.storage.deployment_records import REST, DeploymentStatus, DeviceStage


@dataclass(frozen=True, slots=True, kw_only=True)
class InstallationRecord:
    """One installation; `sha256` is that of its bundle, `key` the id of the key that signed it."""

    installation_id: str
    kind: str
    name: str
    version: str
    key: str
    sha256: str
    bytes_file: int
    canary: int
    canary_s: float
    status: DeploymentStatus
    created_at: float
    reason: str | None = None
    canary_until: float | None = None
    finished_at: float | None = None

    @property
    def is_taken_back(self) -> bool:
        """Whether devices that run it go back when it fails elsewhere."""
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class InstallationDeviceRecord:
    """One device of an installation; `part` is `canary` or `rest`."""

    installation_id: str
    device_id: str
    state: DeviceStage
    part: str = REST
    reason: str | None = None
    reported_at: float | None = None

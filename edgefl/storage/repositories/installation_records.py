"""Records of installations, apart from SQL: a release or task pack and its state on each device.

They follow deployments: the same statuses and stages, canaries first. But a device rolls back by itself, and one that
runs a release is not rolled back because another device failed.
"""

from __future__ import annotations

from dataclasses import dataclass

from edgefl.storage.repositories.deployment_records import REMAINING_PART, RolloutStage, RolloutStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class InstallationRecord:
    """One installation; `sha256` is that of its bundle, `key` the id of the signing key."""

    installation_id: str
    kind: str
    name: str
    version: str
    key: str
    sha256: str
    bytes_file: int
    canary: int
    canary_s: float
    status: RolloutStatus
    created_at: float
    reason: str | None = None
    canary_until: float | None = None
    finished_at: float | None = None

    @property
    def should_roll_back(self) -> bool:
        """Whether devices that run it roll back when it fails elsewhere."""
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class InstallationDeviceRecord:
    """One device of an installation; `part` is `canary` or `rest`."""

    installation_id: str
    device_id: str
    state: RolloutStage
    part: str = REMAINING_PART
    reason: str | None = None
    reported_at: float | None = None

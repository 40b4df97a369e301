"""Records of the store, apart from SQL: frozen values, times in unix seconds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypedDict

from edgefl.core.protocol import Heartbeat
from edgefl.core.types import EvaluateResult, UpdateStatus


class RunStatus(StrEnum):
    """Status of a run. INTERRUPTED: its coordinator died or stopped; it can be resumed."""

    QUEUED = "queued"
    RUNNING = "running"
    STOPPING = "stopping"
    FINISHED = "finished"
    STOPPED = "stopped"
    FAILED = "failed"
    INTERRUPTED = "interrupted"

    @property
    def is_final(self) -> bool:
        return self in {RunStatus.FINISHED, RunStatus.STOPPED, RunStatus.FAILED}


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRecord:
    """A join token without its secret."""

    token_id: str
    expires_at: float
    uses_left: int
    groups: tuple[str, ...]
    role: str | None
    created_at: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class UserRecord:
    """A person who may use the coordinator, without the hash of the token."""

    name: str
    role: str
    created_at: float
    expires_at: float | None = None
    revoked_at: float | None = None

    def get_state(self, now: float) -> str:
        """Returns `active`, `expired` or `revoked`."""
        if self.revoked_at is not None:
            return "revoked"
        return "active" if self.expires_at is None or now < self.expires_at else "expired"

    def is_active(self, now: float) -> bool:
        """Returns whether this person may do anything at this time."""
        return self.get_state(now) == "active"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredDevice:
    """A device in the store; `examples` counts its examples by task."""

    device_id: str
    public_key: bytes
    node_id: int | None
    role: str
    groups: tuple[str, ...]
    joined_at: float
    removed_at: float | None
    last_seen_at: float | None
    presence: str | None
    certificate_serial: str | None
    version: str | None
    examples: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedDeviceRow:
    """A device of a simulation; `facts` are the capabilities in its profile."""

    device_id: str
    role: str
    groups: tuple[str, ...]
    examples: Mapping[str, int]
    facts: Mapping[str, Any]


class DevicePatch(TypedDict, total=False):
    """Changes for `update_device`; absent names stay."""

    role: str
    groups: tuple[str, ...]
    last_seen_at: float
    presence: str
    certificate_serial: str
    version: str
    examples: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class CapabilitiesRecord:
    """The newest capabilities of a device and the time since when they hold."""

    device_id: str
    at: float
    facts: Mapping[str, Any]
    shards: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeartbeatRow:
    """One heartbeat; `at` is when the coordinator received it."""

    device_id: str
    at: float
    heartbeat: Heartbeat


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """One run; `rounds`, `version` and `accuracy` are its progress, `sequence` its place among all runs."""

    run_id: str
    sequence: int = 0
    name: str
    task: str
    strategy: str
    config: Mapping[str, Any]
    status: RunStatus
    reason: str | None
    submitted_at: float
    started_at: float | None
    finished_at: float | None
    rounds: int
    version: int
    accuracy: float | None
    seed: int
    priority: int = 0
    resumes: int = 0


class RoundMetrics(TypedDict, total=False):
    """Metrics for `set_round_metrics`; absent names stay."""

    node_accuracy: float
    worst_node_accuracy: float
    facts: Mapping[str, float]
    metrics: Mapping[str, float]
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AssignmentRow:
    """A dispatched assignment."""

    assignment_id: str
    device_id: str
    round: int
    base_version: int
    dispatched_at: float
    codec: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateRow:
    """Outcome of an assignment: an update, or the reason why there is none.

    `outcome` is None for an update that was received and is not applied yet.
    """

    assignment_id: str
    device_id: str
    round: int
    base_version: int
    outcome: UpdateStatus | None = None
    reason: str | None = None
    applied_version: int | None = None
    staleness: int | None = None
    iterations: int | None = None
    num_examples: int | None = None
    bytes_up: int | None = None
    bytes_down: int | None = None
    compute_s: float | None = None
    send_s: float | None = None
    wait_s: float | None = None
    loss: float | None = None
    received_at: float | None = None
    ended_at: float | None = None
    max_temperature_c: float | None = None
    throttled: str | None = None
    signal_dbm: float | None = None
    link_bits_per_s: float | None = None
    energy_j: float | None = None
    paced_s: float | None = None
    metrics: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationRow(EvaluateResult):
    """One evaluation of the history, at a Unix time."""

    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedModelRow:
    """A saved state of a run in the history.

    `quality` is the first metric that the task declares, negative where less is better; None where it declares none.
    """

    version: int
    round: int
    last_record: int
    sha256: str
    bytes_file: int
    at: float
    accuracy: float | None = None
    quality: float | None = None

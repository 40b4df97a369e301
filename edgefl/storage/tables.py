"""The tables of the store, as SQLAlchemy 2 typed models.

The schema is public. Times are unix seconds (`at`, `*_at`), durations end in `_s`, sizes start with `bytes_`;
lists and free-form facts are JSON. Rows of runs can be rebuilt from the journal; `devices`, `tokens` and `runs`
cannot, so they are written durably. History outlives the fleet: it names devices without a foreign key, so
that removed and simulated devices keep theirs. Views for the common questions start with `v_` (see the migrations).
"""

from __future__ import annotations

from typing import Any, ClassVar

from sqlalchemy import JSON, BigInteger, Float, ForeignKey, Index, Integer, LargeBinary, Text, UniqueConstraint
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

# SQLite autoincrements only a key of type INTEGER.
RowId = BigInteger().with_variant(Integer, "sqlite")
NEVER_REUSED_IDS = {"sqlite_autoincrement": True}
"""Options of a table whose ids say what was written later, also after its newest rows were deleted."""


class Base(DeclarativeBase):
    type_annotation_map: ClassVar[dict[Any, Any]] = {
        str: Text(),
        int: BigInteger(),
        float: Float(),
        bytes: LargeBinary(),
        dict[str, Any]: JSON(),
        list[str]: JSON(),
    }


class LineageTable(Base):
    """Identity of the store, one row; `num_commits` counts its durable transactions. See `storage.lineage`."""

    __tablename__ = "lineage"

    id: Mapped[int] = mapped_column(RowId, primary_key=True)
    lineage_id: Mapped[str]
    num_commits: Mapped[int]


class TokenTable(Base):
    """A join token: `uses_left` joins before `expires_at`; only the hash of the secret is stored."""

    __tablename__ = "tokens"

    token_id: Mapped[str] = mapped_column(primary_key=True)
    secret_sha256: Mapped[str]
    expires_at: Mapped[float]
    uses_left: Mapped[int]
    groups: Mapped[list[str]]
    role: Mapped[str | None]
    created_at: Mapped[float | None]


class UserTable(Base):
    """A person: `token_sha256` is NULL for one who only signs in at an OpenID provider; rows are never deleted."""

    __tablename__ = "users"
    __table_args__ = (UniqueConstraint("token_sha256", name="uq_users"),)

    name: Mapped[str] = mapped_column(primary_key=True)
    role: Mapped[str]
    token_sha256: Mapped[str | None]
    created_at: Mapped[float]
    expires_at: Mapped[float | None]
    revoked_at: Mapped[float | None]


class DeviceTable(Base):
    """A joined device; `removed_at` is set when it was removed, and its name is then free again."""

    __tablename__ = "devices"

    device_id: Mapped[str] = mapped_column(primary_key=True)
    public_key: Mapped[bytes] = mapped_column(index=True)
    # Flower's node ids are unsigned 64-bit numbers, which no SQL integer holds.
    node_id: Mapped[str | None]
    role: Mapped[str]
    groups: Mapped[list[str]]
    joined_at: Mapped[float]
    removed_at: Mapped[float | None]
    last_seen_at: Mapped[float | None]
    presence: Mapped[str | None]
    certificate_serial: Mapped[str | None]
    version: Mapped[str | None]
    examples: Mapped[dict[str, Any]]


class CapabilitiesTable(Base):
    """Capabilities reported by a device; one row per change, the newest is current."""

    __tablename__ = "capabilities"
    __table_args__ = (Index("ix_capabilities_device", "device_id", "at"),)

    id: Mapped[int] = mapped_column(RowId, primary_key=True)
    device_id: Mapped[str] = mapped_column(ForeignKey("devices.device_id"))
    at: Mapped[float]
    facts: Mapped[dict[str, Any]]
    shards: Mapped[dict[str, Any]]


class RunTable(Base):
    """One training job; `config` is the whole run file, `rounds`, `version` and `accuracy` its progress.

    `sequence` grows with each run, whatever the clock says. The queued run of the highest `priority` begins first.
    `resumes` counts the manual resumes.
    """

    __tablename__ = "runs"
    __table_args__ = (Index("ix_runs_status", "status", "sequence"), Index("ix_runs_sequence", "sequence"))

    run_id: Mapped[str] = mapped_column(primary_key=True)
    sequence: Mapped[int]
    name: Mapped[str]
    task: Mapped[str]
    strategy: Mapped[str]
    config: Mapped[dict[str, Any]]
    status: Mapped[str]
    reason: Mapped[str | None]
    submitted_at: Mapped[float]
    started_at: Mapped[float | None]
    finished_at: Mapped[float | None]
    rounds: Mapped[int]
    version: Mapped[int]
    accuracy: Mapped[float | None]
    seed: Mapped[int]
    priority: Mapped[int] = mapped_column(server_default="0")
    resumes: Mapped[int] = mapped_column(server_default="0")


class RoundTable(Base):
    """One round; `version` is the model's after it, `loss` the mean training loss by examples.

    Where devices have models of their own, `node_accuracy` is the mean over them, each counting alike. `facts` are
    figures of the strategy, `metrics` those of the task. `waited_for` is the device that a synchronous round waited
    for, and `waited_s` for how long; see `find_straggler`.
    """

    __tablename__ = "rounds"
    __table_args__ = (
        UniqueConstraint("run_id", "round", name="uq_rounds"),
        Index("ix_rounds_started", "started_at"),
        Index("ix_rounds_run", "run_id", "id"),
        Index("ix_rounds_seconds", "seconds"),
        Index("ix_rounds_run_seconds", "run_id", "seconds"),
        Index("ix_rounds_waited", "waited_for", "seconds"),
    )

    id: Mapped[int] = mapped_column(RowId, primary_key=True)
    run_id: Mapped[str] = mapped_column(ForeignKey("runs.run_id"))
    round: Mapped[int]
    version: Mapped[int | None]
    started_at: Mapped[float]
    closed_at: Mapped[float | None]
    num_devices: Mapped[int]
    num_updates: Mapped[int]
    loss: Mapped[float | None]
    bytes_up: Mapped[int]
    bytes_down: Mapped[int]
    node_accuracy: Mapped[float | None]
    worst_node_accuracy: Mapped[float | None]
    facts: Mapped[dict[str, Any] | None]
    metrics: Mapped[dict[str, Any] | None]
    seconds: Mapped[float | None]
    waited_for: Mapped[str | None]
    waited_s: Mapped[float | None]
    waited_update_id: Mapped[int | None]


class UpdateTable(Base):
    """One assignment of one device and its outcome.

    `outcome` is NULL while it is outstanding, else used, late, rejected, failed or lost. `applied_version` is the
    version that the update was applied to, `staleness` its distance from `base_version`. `codec` is the one that the
    assignment asked for. `ended_at` is when it was received, or given up. Hardware telemetry meanwhile is in the row
    itself, because heartbeats are retained briefly.
    """

    __tablename__ = "updates"
    __table_args__ = (
        UniqueConstraint("run_id", "assignment_id", name="uq_updates"),
        Index("ix_updates_round", "run_id", "round", "device_id"),
        Index("ix_updates_device", "device_id", "id"),
        Index("ix_updates_run", "run_id", "id"),
        Index("ix_updates_dispatched", "dispatched_at"),
        Index("ix_updates_outcome", "outcome", "id"),
        NEVER_REUSED_IDS,
    )

    id: Mapped[int] = mapped_column(RowId, primary_key=True)
    run_id: Mapped[str] = mapped_column(ForeignKey("runs.run_id"))
    round: Mapped[int]
    assignment_id: Mapped[str]
    device_id: Mapped[str]
    base_version: Mapped[int]
    applied_version: Mapped[int | None]
    staleness: Mapped[int | None]
    iterations: Mapped[int | None]
    num_examples: Mapped[int | None]
    bytes_up: Mapped[int | None]
    bytes_down: Mapped[int | None]
    codec: Mapped[str | None]
    compute_s: Mapped[float | None]
    send_s: Mapped[float | None]
    wait_s: Mapped[float | None]
    loss: Mapped[float | None]
    outcome: Mapped[str | None]
    reason: Mapped[str | None]
    dispatched_at: Mapped[float | None]
    received_at: Mapped[float | None]
    metrics: Mapped[dict[str, Any]]
    ended_at: Mapped[float | None]
    max_temperature_c: Mapped[float | None]
    throttled: Mapped[str | None]
    signal_dbm: Mapped[float | None]
    link_bits_per_s: Mapped[float | None]
    energy_j: Mapped[float | None]
    paced_s: Mapped[float | None]


class EvaluationTable(Base):
    """One evaluation of a model after a round; `source` is coordinator, evaluator or device.

    `subject` is the device whose own model it is, empty for the global one.
    """

    __tablename__ = "evaluations"
    __table_args__ = (
        UniqueConstraint("run_id", "assignment_id", name="uq_evaluations"),
        Index("ix_evaluations_round", "run_id", "round", "source"),
        Index("ix_evaluations_at", "at"),
        Index("ix_evaluations_run", "run_id", "id"),
        Index("ix_evaluations_device", "device_id", "id"),
        NEVER_REUSED_IDS,
    )

    id: Mapped[int] = mapped_column(RowId, primary_key=True)
    run_id: Mapped[str] = mapped_column(ForeignKey("runs.run_id"))
    assignment_id: Mapped[str]
    round: Mapped[int]
    version: Mapped[int]
    device_id: Mapped[str]
    source: Mapped[str]
    loss: Mapped[float | None]
    accuracy: Mapped[float | None]
    num_examples: Mapped[int]
    bytes_up: Mapped[int]
    bytes_down: Mapped[int]
    at: Mapped[float]
    metrics: Mapped[dict[str, Any]]
    subject: Mapped[str] = mapped_column(server_default="")


class HeartbeatColumns:
    """Hardware telemetry of a heartbeat, or of several."""

    uptime_s: Mapped[float | None]
    clock_skew_s: Mapped[float | None]
    temperature_c: Mapped[float | None]
    throttled: Mapped[str | None]
    cpu_fraction: Mapped[float | None]
    memory_fraction: Mapped[float | None]
    memory_bytes: Mapped[int | None]
    disk_free_bytes: Mapped[int | None]
    battery_fraction: Mapped[float | None]
    power_w: Mapped[float | None]
    run: Mapped[str | None]
    iteration: Mapped[int | None]


class HeartbeatTable(HeartbeatColumns, Base):
    """Hardware telemetry of a heartbeat received `at` (the coordinator's clock); retained for a day."""

    __tablename__ = "heartbeats"
    __table_args__ = (
        Index("ix_heartbeats_device", "device_id", "at"),
        Index("ix_heartbeats_at", "at", "device_id"),
        Index("ix_heartbeats_run", "run", "at", "device_id"),
    )

    id: Mapped[int] = mapped_column(RowId, primary_key=True)
    device_id: Mapped[str]
    at: Mapped[float]
    seq: Mapped[int | None]
    session_no: Mapped[int | None]


class HeartbeatRollupTable(HeartbeatColumns, Base):
    """Rollup of five minutes of heartbeats from `at` on.

    Means, but the highest uptime, temperature, memory use and iteration, and the lowest battery and free disk;
    any throttling is reported.
    """

    __tablename__ = "heartbeats_5min"
    __table_args__ = (
        Index("ix_heartbeats_5min_at", "at", "device_id"),
        Index("ix_heartbeats_5min_run", "run", "at", "device_id"),
    )

    device_id: Mapped[str] = mapped_column(primary_key=True)
    at: Mapped[float] = mapped_column(primary_key=True)
    num_heartbeats: Mapped[int]


class EventTable(Base):
    """An event: a join, a loss, a rejection, a restart."""

    __tablename__ = "events"
    __table_args__ = (
        Index("ix_events_at", "at"),
        Index("ix_events_run", "run_id", "id"),
        Index("ix_events_device", "device_id", "id"),
        NEVER_REUSED_IDS,
    )

    id: Mapped[int] = mapped_column(RowId, primary_key=True)
    at: Mapped[float]
    kind: Mapped[str]
    message: Mapped[str]
    run_id: Mapped[str | None]
    device_id: Mapped[str | None]
    data: Mapped[dict[str, Any]]


class AuditTable(Base):
    """One action of a person: a state-changing API call or command; rows are only ever added."""

    __tablename__ = "audit"
    __table_args__ = (Index("ix_audit_at", "at"),)

    id: Mapped[int] = mapped_column(RowId, primary_key=True)
    at: Mapped[float]
    actor: Mapped[str]
    source: Mapped[str]
    action: Mapped[str]
    outcome: Mapped[str]


class SavedModelTable(Base):
    """A saved model: `sha256` names its file in `models/`; it contains the journal up to `last_record`."""

    __tablename__ = "checkpoints"
    __table_args__ = (UniqueConstraint("run_id", "version", name="uq_checkpoints"),)

    id: Mapped[int] = mapped_column(RowId, primary_key=True)
    run_id: Mapped[str] = mapped_column(ForeignKey("runs.run_id"))
    version: Mapped[int]
    round: Mapped[int]
    last_record: Mapped[int]
    sha256: Mapped[str]
    bytes_file: Mapped[int]
    accuracy: Mapped[float | None]
    quality: Mapped[float | None]
    at: Mapped[float]


class TotalColumns:
    """Sums over assignments, maintained incrementally by `totals`, so that queries need not read a million rows.

    `num_stale` counts updates with a staleness above 0; `energy_j` is NULL where no board reported any.
    """

    num_assignments: Mapped[int]
    num_used: Mapped[int]
    num_late: Mapped[int]
    num_lost: Mapped[int]
    num_rejected: Mapped[int]
    num_failed: Mapped[int]
    num_stale: Mapped[int]
    sum_staleness: Mapped[int]
    max_staleness: Mapped[int | None]
    iterations: Mapped[int]
    num_examples: Mapped[int]
    compute_s: Mapped[float]
    send_s: Mapped[float]
    wait_s: Mapped[float]
    bytes_up: Mapped[int]
    bytes_down: Mapped[int]
    max_temperature_c: Mapped[float | None]
    energy_j: Mapped[float | None]


class TotalTable(TotalColumns, Base):
    """Sums by run, device and day (`2026-01-31`, UTC, of the dispatch; empty where that is not known)."""

    __tablename__ = "totals"
    __table_args__ = (Index("ix_totals_device", "device_id", "day"), Index("ix_totals_day", "day", "device_id"))

    run_id: Mapped[str] = mapped_column(primary_key=True)
    device_id: Mapped[str] = mapped_column(primary_key=True)
    day: Mapped[str] = mapped_column(primary_key=True)


class RunTotalTable(TotalColumns, Base):
    """Sums by run."""

    __tablename__ = "run_totals"

    run_id: Mapped[str] = mapped_column(primary_key=True)


class DeviceTotalTable(TotalColumns, Base):
    """Sums by device."""

    __tablename__ = "device_totals"

    device_id: Mapped[str] = mapped_column(primary_key=True)


class DayTotalTable(TotalColumns, Base):
    """Sums by day."""

    __tablename__ = "day_totals"

    day: Mapped[str] = mapped_column(primary_key=True)


class RolloutColumns:
    """Columns of every rollout, of a model or of software: canaries first, then the outcome.

    `sequence` grows with each rollout of its kind, whatever the clock says.
    """

    sequence: Mapped[int]
    canary: Mapped[int]
    canary_s: Mapped[float]
    canary_until: Mapped[float | None]
    status: Mapped[str]
    reason: Mapped[str | None]
    created_at: Mapped[float]
    finished_at: Mapped[float | None]


class RolloutDeviceColumns:
    """State of one device of a rollout."""

    id: Mapped[int] = mapped_column(RowId, primary_key=True)
    device_id: Mapped[str]
    part: Mapped[str]
    state: Mapped[str]
    reason: Mapped[str | None]
    reported_at: Mapped[float | None]


class DeploymentTable(RolloutColumns, Base):
    """Deployment of a model; `devices` NULL means every device with a shard for the task.

    `model` is the SHA-256 of its safetensors file, `onnx_sha256` that of the file that devices fetch.
    """

    __tablename__ = "deployments"
    __table_args__ = (Index("ix_deployments_status", "status", "sequence"),)

    deployment_id: Mapped[str] = mapped_column(primary_key=True)
    run_id: Mapped[str | None]
    model: Mapped[str]
    task: Mapped[str]
    options: Mapped[dict[str, Any]]
    devices: Mapped[list[str] | None]
    tolerance: Mapped[float]
    min_accuracy: Mapped[float]
    test_fraction: Mapped[float]
    onnx_sha256: Mapped[str | None]
    bytes_file: Mapped[int | None]


class DeploymentDeviceTable(RolloutDeviceColumns, Base):
    """One device of a deployment; accuracies, of the new model and of the one before, are on its own data."""

    __tablename__ = "deployment_devices"
    __table_args__ = (
        UniqueConstraint("deployment_id", "device_id", name="uq_deployment_devices"),
        Index("ix_deployment_devices_device", "device_id", "state"),
        Index("ix_deployment_devices_state", "state"),
    )

    deployment_id: Mapped[str] = mapped_column(ForeignKey("deployments.deployment_id"))
    accuracy: Mapped[float | None]
    former_accuracy: Mapped[float | None]
    num_examples: Mapped[int | None]


class InstallationTable(RolloutColumns, Base):
    """Installation of a release or task pack; `sha256` names its bundle, `key` its signer."""

    __tablename__ = "installations"
    __table_args__ = (Index("ix_installations_status", "status", "sequence"),)

    installation_id: Mapped[str] = mapped_column(primary_key=True)
    kind: Mapped[str]
    name: Mapped[str]
    version: Mapped[str]
    key: Mapped[str]
    sha256: Mapped[str]
    bytes_file: Mapped[int]


class InstallationDeviceTable(RolloutDeviceColumns, Base):
    """One device of an installation."""

    __tablename__ = "installation_devices"
    __table_args__ = (
        UniqueConstraint("installation_id", "device_id", name="uq_installation_devices"),
        Index("ix_installation_devices_device", "device_id", "state"),
    )

    installation_id: Mapped[str] = mapped_column(ForeignKey("installations.installation_id"))

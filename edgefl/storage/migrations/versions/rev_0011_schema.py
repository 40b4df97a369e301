"""The whole schema: tables, indexes and views."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = None
branch_labels = None
depends_on = None

TYPES: dict[str, Any] = {
    "text": sa.Text(),
    "int": sa.BigInteger(),
    "float": sa.Float(),
    "json": sa.JSON(),
    "bytes": sa.LargeBinary(),
    # SQLite autoincrements only a key of type INTEGER.
    "key": sa.BigInteger().with_variant(sa.Integer(), "sqlite"),
}
REFERENCES = {
    "run_id": "runs.run_id",
    "device_id": "devices.device_id",
    "deployment_id": "deployments.deployment_id",
    "installation_id": "installations.installation_id",
}
VIEWS = {
    # A round with its evaluation: the coordinator's, else the evaluators', else the devices' mean by examples.
    # Evaluations are those of the global model alone.
    "v_rounds": """
        SELECT s.run_id, s.round, s.version, s.started_at, s.closed_at, s.seconds,
            s.num_devices, s.num_updates, s.train_loss, s.bytes_up, s.bytes_down, s.source,
            (SELECT sum(e.loss * e.num_examples) / NULLIF(sum(e.num_examples), 0) FROM evaluations e
                WHERE e.run_id = s.run_id AND e.round = s.round AND e.source = s.source AND e.subject = '') AS loss,
            (SELECT sum(e.accuracy * e.num_examples) / NULLIF(sum(e.num_examples), 0) FROM evaluations e
                WHERE e.run_id = s.run_id AND e.round = s.round AND e.source = s.source AND e.subject = '')
                AS accuracy,
            s.node_accuracy, s.worst_node_accuracy, s.facts, s.waited_for, s.waited_s
        FROM (
            SELECT r.run_id, r.round, r.version, r.started_at, r.closed_at, r.seconds, r.num_devices, r.num_updates,
                r.loss AS train_loss, r.bytes_up, r.bytes_down, r.node_accuracy, r.worst_node_accuracy, r.facts,
                r.waited_for, r.waited_s,
                (SELECT CASE min(CASE e.source WHEN 'coordinator' THEN 1 WHEN 'evaluator' THEN 2 ELSE 3 END)
                    WHEN 1 THEN 'coordinator' WHEN 2 THEN 'evaluator' WHEN 3 THEN 'device' END
                    FROM evaluations e WHERE e.run_id = r.run_id AND e.round = r.round AND e.subject = '') AS source
            FROM rounds r
        ) AS s
        """,
    # An update with the name of its run and the seconds from dispatch to receipt.
    "v_updates": """
        SELECT u.run_id, r.name AS run_name, u.round, u.assignment_id, u.device_id, u.outcome, u.base_version,
            u.applied_version, u.staleness, u.iterations, u.num_examples, u.loss, u.compute_s, u.paced_s, u.send_s,
            u.wait_s, u.received_at - u.dispatched_at AS total_s, u.bytes_up, u.bytes_down, u.codec, u.dispatched_at,
            u.received_at, u.ended_at, u.reason, u.max_temperature_c, u.throttled, u.signal_dbm, u.link_bits_per_s,
            u.energy_j, u.metrics
        FROM updates u JOIN runs r ON r.run_id = u.run_id
        """,
    # A device with sums over all its runs.
    "v_devices": """
        SELECT d.device_id, d.role, d.groups, d.presence, d.joined_at, d.last_seen_at, d.removed_at, d.version,
            d.examples, coalesce(t.num_assignments, 0) AS num_assignments, coalesce(t.num_used, 0) AS num_used,
            coalesce(t.compute_s, 0) AS compute_s, coalesce(t.send_s, 0) AS send_s, coalesce(t.wait_s, 0) AS wait_s,
            coalesce(t.bytes_up, 0) AS bytes_up, coalesce(t.bytes_down, 0) AS bytes_down
        FROM devices d LEFT JOIN device_totals t ON t.device_id = d.device_id
        """,
    # A run with its costs.
    "v_runs": """
        SELECT r.run_id, r.name, r.task, r.strategy, r.status, r.reason, r.submitted_at, r.started_at, r.finished_at,
            r.finished_at - r.started_at AS seconds, r.rounds, r.version, r.accuracy,
            coalesce(t.num_assignments, 0) AS num_assignments, coalesce(t.num_used, 0) AS num_used,
            coalesce(t.num_late, 0) AS num_late, coalesce(t.num_lost, 0) AS num_lost,
            coalesce(t.num_rejected, 0) AS num_rejected, coalesce(t.num_failed, 0) AS num_failed,
            coalesce(t.compute_s, 0) AS compute_s, coalesce(t.send_s, 0) AS send_s, coalesce(t.wait_s, 0) AS wait_s,
            coalesce(t.bytes_up, 0) AS bytes_up, coalesce(t.bytes_down, 0) AS bytes_down, t.max_staleness,
            t.max_temperature_c, t.energy_j
        FROM runs r LEFT JOIN run_totals t ON t.run_id = r.run_id
        """,
    # A round with the assignment that it waited for.
    "v_slow": """
        SELECT r.run_id, r.round, r.started_at, r.seconds, r.waited_for, r.waited_s, u.outcome, u.iterations,
            u.compute_s, u.paced_s, u.send_s, u.bytes_up, u.bytes_down, u.max_temperature_c, u.throttled,
            u.signal_dbm, u.link_bits_per_s, u.reason
        FROM rounds r
        LEFT JOIN updates u ON u.id = r.waited_update_id AND u.run_id = r.run_id
        WHERE r.seconds IS NOT NULL
        """,
    # Raw heartbeats, then the five-minute rollups of older ones.
    "v_heartbeats": """
        SELECT device_id, at, 1 AS num_heartbeats,
            uptime_s, clock_skew_s, temperature_c, throttled, cpu_fraction, memory_fraction,
            memory_bytes, disk_free_bytes, battery_fraction, power_w, run, iteration
        FROM heartbeats
        UNION ALL SELECT device_id, at, num_heartbeats,
            uptime_s, clock_skew_s, temperature_c, throttled, cpu_fraction, memory_fraction,
            memory_bytes, disk_free_bytes, battery_fraction, power_w, run, iteration
        FROM heartbeats_5min
        """,
}


def upgrade() -> None:
    _create_fleet()
    _create_history()
    _create_heartbeats()
    _create_totals()
    _create_rollouts()
    for name, query in VIEWS.items():
        op.execute(f"CREATE VIEW {name} AS {query}")


def _create_table(
    name: str,
    columns: str,
    *constraints: Any,
    primary_key: str = "id",
    references: str = "",
    sqlite_autoincrement: bool = False,
    **indexes: str,
) -> None:
    """Creates a table of `name:type` columns, where `?` marks those that may be NULL, and its indexes."""
    parts: list[sa.Column[Any]] = []
    for column in columns.split():
        label, _, kind = column.partition(":")
        key = [sa.ForeignKey(REFERENCES[label])] if label == references else []
        parts.append(sa.Column(label, TYPES[kind.rstrip("?")], *key, nullable=kind.endswith("?")))
    key_constraint = sa.PrimaryKeyConstraint(*primary_key.split())
    op.create_table(name, *parts, *constraints, key_constraint, sqlite_autoincrement=sqlite_autoincrement)
    for index, keys in indexes.items():
        op.create_index(f"ix_{name}_{index}", name, keys.split(), unique=False)


def _create_fleet() -> None:
    _create_table("lineage", "id:key lineage_id:text num_commits:int")
    _create_table(
        "tokens",
        "token_id:text secret_sha256:text expires_at:float uses_left:int groups:json role:text? created_at:float?",
        primary_key="token_id",
    )
    _create_table(
        "devices",
        "device_id:text public_key:bytes node_id:text? role:text groups:json joined_at:float removed_at:float?"
        " last_seen_at:float? presence:text? certificate_serial:text? version:text? examples:json",
        primary_key="device_id",
        public_key="public_key",
    )
    _create_table(
        "capabilities",
        "id:key device_id:text at:float facts:json shards:json",
        references="device_id",
        device="device_id at",
    )
    _create_table(
        "events",
        "id:key at:float kind:text message:text run_id:text? device_id:text? data:json",
        at="at",
        run="run_id id",
        device="device_id id",
        sqlite_autoincrement=True,
    )
    _create_table(
        "users",
        "name:text role:text token_sha256:text? created_at:float expires_at:float? revoked_at:float?",
        sa.UniqueConstraint("token_sha256", name="uq_users"),
        primary_key="name",
    )
    _create_table("audit", "id:key at:float actor:text source:text action:text outcome:text", at="at")


def _create_history() -> None:
    _create_table(
        "runs",
        "run_id:text sequence:int name:text task:text strategy:text config:json status:text reason:text?"
        " submitted_at:float started_at:float? finished_at:float? rounds:int version:int accuracy:float? seed:int",
        *(sa.Column(name, sa.BigInteger(), nullable=False, server_default="0") for name in ("priority", "resumes")),
        primary_key="run_id",
        status="status sequence",
        sequence="sequence",
    )
    _create_table(
        "rounds",
        "id:key run_id:text round:int version:int? started_at:float closed_at:float? num_devices:int num_updates:int"
        " loss:float? bytes_up:int bytes_down:int node_accuracy:float? worst_node_accuracy:float? facts:json?"
        " seconds:float? waited_for:text? waited_s:float? waited_update_id:int?",
        sa.UniqueConstraint("run_id", "round", name="uq_rounds"),
        references="run_id",
        started="started_at",
        run="run_id id",
        seconds="seconds",
        run_seconds="run_id seconds",
        waited="waited_for seconds",
    )
    _create_table(
        "updates",
        "id:key run_id:text round:int assignment_id:text device_id:text base_version:int applied_version:int?"
        " staleness:int? iterations:int? num_examples:int? bytes_up:int? bytes_down:int? codec:text? compute_s:float?"
        " send_s:float? wait_s:float? loss:float? outcome:text? reason:text? dispatched_at:float? received_at:float?"
        " metrics:json ended_at:float? max_temperature_c:float? throttled:text? signal_dbm:float?"
        " link_bits_per_s:float? energy_j:float? paced_s:float?",
        sa.UniqueConstraint("run_id", "assignment_id", name="uq_updates"),
        references="run_id",
        round="run_id round device_id",
        device="device_id id",
        run="run_id id",
        dispatched="dispatched_at",
        outcome="outcome id",
        sqlite_autoincrement=True,
    )
    _create_table(
        "evaluations",
        "id:key run_id:text assignment_id:text round:int version:int device_id:text source:text loss:float?"
        " accuracy:float? num_examples:int bytes_up:int bytes_down:int at:float metrics:json",
        sa.Column("subject", sa.Text(), nullable=False, server_default=""),
        sa.UniqueConstraint("run_id", "assignment_id", name="uq_evaluations"),
        references="run_id",
        round="run_id round source",
        at="at",
        run="run_id id",
        device="device_id id",
        sqlite_autoincrement=True,
    )
    _create_table(
        "checkpoints",
        "id:key run_id:text version:int round:int last_record:int sha256:text bytes_file:int accuracy:float?"
        " at:float",
        sa.UniqueConstraint("run_id", "last_record", name="uq_checkpoints"),
        references="run_id",
    )


def _create_heartbeats() -> None:
    telemetry = (
        " uptime_s:float? clock_skew_s:float? temperature_c:float? throttled:text? cpu_fraction:float?"
        " memory_fraction:float? memory_bytes:int? disk_free_bytes:int? battery_fraction:float? power_w:float?"
        " run:text? iteration:int?"
    )
    _create_table(
        "heartbeats",
        f"id:key device_id:text at:float seq:int? session_no:int?{telemetry}",
        device="device_id at",
        at="at device_id",
        run="run at device_id",
    )
    _create_table(
        "heartbeats_5min",
        f"device_id:text at:float num_heartbeats:int{telemetry}",
        primary_key="device_id at",
        at="at device_id",
        run="run at device_id",
    )


def _create_totals() -> None:
    sums = (
        " num_assignments:int num_used:int num_late:int num_lost:int num_rejected:int num_failed:int num_stale:int"
        " sum_staleness:int max_staleness:int? iterations:int num_examples:int compute_s:float send_s:float"
        " wait_s:float bytes_up:int bytes_down:int max_temperature_c:float? energy_j:float?"
    )
    _create_table(
        "totals",
        f"run_id:text device_id:text day:text{sums}",
        primary_key="run_id device_id day",
        device="device_id day",
        day="day device_id",
    )
    for name, key in (("run_totals", "run_id"), ("device_totals", "device_id"), ("day_totals", "day")):
        _create_table(name, f"{key}:text{sums}", primary_key=key)


def _create_rollouts() -> None:
    rollout = (
        " sequence:int canary:int canary_s:float canary_until:float? status:text reason:text? created_at:float"
        " finished_at:float?"
    )
    device = "id:key device_id:text part:text state:text reason:text? reported_at:float?"
    _create_table(
        "deployments",
        "deployment_id:text run_id:text? model:text task:text options:json devices:json? tolerance:float"
        f" min_accuracy:float test_fraction:float onnx_sha256:text? bytes_file:int?{rollout}",
        primary_key="deployment_id",
        status="status sequence",
    )
    _create_table(
        "deployment_devices",
        f"{device} deployment_id:text accuracy:float? former_accuracy:float? num_examples:int?",
        sa.UniqueConstraint("deployment_id", "device_id", name="uq_deployment_devices"),
        references="deployment_id",
        device="device_id state",
        state="state",
    )
    _create_table(
        "installations",
        f"installation_id:text kind:text name:text version:text key:text sha256:text bytes_file:int{rollout}",
        primary_key="installation_id",
        status="status sequence",
    )
    _create_table(
        "installation_devices",
        f"{device} installation_id:text",
        sa.UniqueConstraint("installation_id", "device_id", name="uq_installation_devices"),
        references="installation_id",
        device="device_id state",
    )

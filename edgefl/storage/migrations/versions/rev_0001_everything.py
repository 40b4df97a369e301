"""Everything: tables and views of the first schema."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

Counter = sa.BigInteger().with_variant(sa.Integer(), "sqlite")

VIEWS = {
    # A round with its evaluation: the coordinator's, else the evaluators', else the devices' mean by examples.
    "v_rounds": """
        SELECT s.run_id, s.round, s.version, s.started_at, s.closed_at, s.closed_at - s.started_at AS seconds,
            s.num_devices, s.num_updates, s.train_loss, s.bytes_up, s.bytes_down, s.source,
            (SELECT sum(e.loss * e.num_examples) / NULLIF(sum(e.num_examples), 0) FROM evaluations e
                WHERE e.run_id = s.run_id AND e.round = s.round AND e.source = s.source) AS loss,
            (SELECT sum(e.accuracy * e.num_examples) / NULLIF(sum(e.num_examples), 0) FROM evaluations e
                WHERE e.run_id = s.run_id AND e.round = s.round AND e.source = s.source) AS accuracy
        FROM (
            SELECT r.run_id, r.round, r.version, r.started_at, r.closed_at, r.num_devices, r.num_updates,
                r.loss AS train_loss, r.bytes_up, r.bytes_down,
                (SELECT CASE min(CASE e.source WHEN 'coordinator' THEN 1 WHEN 'evaluator' THEN 2 ELSE 3 END)
                    WHEN 1 THEN 'coordinator' WHEN 2 THEN 'evaluator' WHEN 3 THEN 'device' END
                    FROM evaluations e WHERE e.run_id = r.run_id AND e.round = r.round) AS source
            FROM rounds r
        ) AS s
        """,
    # An update with the name of its run and the seconds from dispatch to receipt.
    "v_updates": """
        SELECT u.run_id, r.name AS run_name, u.round, u.assignment_id, u.device_id, u.outcome, u.base_version,
            u.applied_version, u.staleness, u.iterations, u.num_examples, u.loss, u.compute_s, u.send_s, u.wait_s,
            u.received_at - u.dispatched_at AS total_s, u.bytes_up, u.bytes_down, u.dispatched_at, u.received_at,
            u.reason, u.metrics
        FROM updates u JOIN runs r ON r.run_id = u.run_id
        """,
    # A device with sums over all its runs.
    "v_devices": """
        SELECT d.device_id, d.role, d.groups, d.presence, d.joined_at, d.last_seen_at, d.removed_at, d.version,
            d.examples, coalesce(t.num_assignments, 0) AS num_assignments, coalesce(t.num_used, 0) AS num_used,
            coalesce(t.compute_s, 0) AS compute_s, coalesce(t.send_s, 0) AS send_s, coalesce(t.wait_s, 0) AS wait_s,
            coalesce(t.bytes_up, 0) AS bytes_up, coalesce(t.bytes_down, 0) AS bytes_down
        FROM devices d LEFT JOIN (
            SELECT device_id, count(*) AS num_assignments,
                sum(CASE outcome WHEN 'used' THEN 1 ELSE 0 END) AS num_used,
                sum(compute_s) AS compute_s, sum(send_s) AS send_s, sum(wait_s) AS wait_s,
                sum(bytes_up) AS bytes_up, sum(bytes_down) AS bytes_down
            FROM updates GROUP BY device_id
        ) AS t ON t.device_id = d.device_id
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
    _create_runs()
    _create_ledger()
    _create_heartbeats()
    for name, query in VIEWS.items():
        op.execute(f"CREATE VIEW {name} AS {query}")


def _create_fleet() -> None:
    op.create_table(
        "tokens",
        sa.Column("token_id", sa.Text(), nullable=False),
        sa.Column("secret_sha256", sa.Text(), nullable=False),
        sa.Column("expires_at", sa.Float(), nullable=False),
        sa.Column("uses_left", sa.BigInteger(), nullable=False),
        sa.Column("groups", sa.JSON(), nullable=False),
        sa.Column("role", sa.Text(), nullable=True),
        sa.Column("created_at", sa.Float(), nullable=True),
        sa.PrimaryKeyConstraint("token_id"),
    )
    op.create_table(
        "devices",
        sa.Column("device_id", sa.Text(), nullable=False),
        sa.Column("public_key", sa.LargeBinary(), nullable=False),
        sa.Column("node_id", sa.Text(), nullable=True),
        sa.Column("role", sa.Text(), nullable=False),
        sa.Column("groups", sa.JSON(), nullable=False),
        sa.Column("joined_at", sa.Float(), nullable=False),
        sa.Column("removed_at", sa.Float(), nullable=True),
        sa.Column("last_seen_at", sa.Float(), nullable=True),
        sa.Column("presence", sa.Text(), nullable=True),
        sa.Column("certificate_serial", sa.Text(), nullable=True),
        sa.Column("version", sa.Text(), nullable=True),
        sa.Column("examples", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("device_id"),
    )
    op.create_index("ix_devices_public_key", "devices", ["public_key"], unique=False)
    op.create_table(
        "capabilities",
        sa.Column("id", Counter, nullable=False),
        sa.Column("device_id", sa.Text(), nullable=False),
        sa.Column("at", sa.Float(), nullable=False),
        sa.Column("facts", sa.JSON(), nullable=False),
        sa.Column("shards", sa.JSON(), nullable=False),
        sa.ForeignKeyConstraint(
            ["device_id"],
            ["devices.device_id"],
        ),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index("ix_capabilities_device", "capabilities", ["device_id", "at"], unique=False)
    op.create_table(
        "events",
        sa.Column("id", Counter, nullable=False),
        sa.Column("at", sa.Float(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("message", sa.Text(), nullable=False),
        sa.Column("run_id", sa.Text(), nullable=True),
        sa.Column("device_id", sa.Text(), nullable=True),
        sa.Column("data", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index("ix_events_at", "events", ["at"], unique=False)
    op.create_index("ix_events_run", "events", ["run_id", "at"], unique=False)


def _create_runs() -> None:
    op.create_table(
        "runs",
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("task", sa.Text(), nullable=False),
        sa.Column("strategy", sa.Text(), nullable=False),
        sa.Column("config", sa.JSON(), nullable=False),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=True),
        sa.Column("submitted_at", sa.Float(), nullable=False),
        sa.Column("started_at", sa.Float(), nullable=True),
        sa.Column("finished_at", sa.Float(), nullable=True),
        sa.Column("rounds", sa.BigInteger(), nullable=False),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.Column("accuracy", sa.Float(), nullable=True),
        sa.Column("seed", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("run_id"),
    )
    op.create_index("ix_runs_status", "runs", ["status", "submitted_at"], unique=False)
    op.create_table(
        "rounds",
        sa.Column("id", Counter, nullable=False),
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("round", sa.BigInteger(), nullable=False),
        sa.Column("version", sa.BigInteger(), nullable=True),
        sa.Column("started_at", sa.Float(), nullable=False),
        sa.Column("closed_at", sa.Float(), nullable=True),
        sa.Column("num_devices", sa.BigInteger(), nullable=False),
        sa.Column("num_updates", sa.BigInteger(), nullable=False),
        sa.Column("loss", sa.Float(), nullable=True),
        sa.Column("bytes_up", sa.BigInteger(), nullable=False),
        sa.Column("bytes_down", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(
            ["run_id"],
            ["runs.run_id"],
        ),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("run_id", "round", name="uq_rounds"),
    )
    op.create_index("ix_rounds_started", "rounds", ["started_at"], unique=False)
    op.create_table(
        "checkpoints",
        sa.Column("id", Counter, nullable=False),
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.Column("round", sa.BigInteger(), nullable=False),
        sa.Column("last_record", sa.BigInteger(), nullable=False),
        sa.Column("sha256", sa.Text(), nullable=False),
        sa.Column("bytes_file", sa.BigInteger(), nullable=False),
        sa.Column("accuracy", sa.Float(), nullable=True),
        sa.Column("at", sa.Float(), nullable=False),
        sa.ForeignKeyConstraint(
            ["run_id"],
            ["runs.run_id"],
        ),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("run_id", "last_record", name="uq_checkpoints"),
    )


def _create_ledger() -> None:
    op.create_table(
        "updates",
        sa.Column("id", Counter, nullable=False),
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("round", sa.BigInteger(), nullable=False),
        sa.Column("assignment_id", sa.Text(), nullable=False),
        sa.Column("device_id", sa.Text(), nullable=False),
        sa.Column("base_version", sa.BigInteger(), nullable=False),
        sa.Column("applied_version", sa.BigInteger(), nullable=True),
        sa.Column("staleness", sa.BigInteger(), nullable=True),
        sa.Column("iterations", sa.BigInteger(), nullable=True),
        sa.Column("num_examples", sa.BigInteger(), nullable=True),
        sa.Column("bytes_up", sa.BigInteger(), nullable=True),
        sa.Column("bytes_down", sa.BigInteger(), nullable=True),
        sa.Column("compute_s", sa.Float(), nullable=True),
        sa.Column("send_s", sa.Float(), nullable=True),
        sa.Column("wait_s", sa.Float(), nullable=True),
        sa.Column("loss", sa.Float(), nullable=True),
        sa.Column("outcome", sa.Text(), nullable=True),
        sa.Column("reason", sa.Text(), nullable=True),
        sa.Column("dispatched_at", sa.Float(), nullable=True),
        sa.Column("received_at", sa.Float(), nullable=True),
        sa.Column("metrics", sa.JSON(), nullable=False),
        sa.ForeignKeyConstraint(
            ["run_id"],
            ["runs.run_id"],
        ),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("run_id", "assignment_id", name="uq_updates"),
    )
    op.create_index("ix_updates_device", "updates", ["device_id", "run_id"], unique=False)
    op.create_index("ix_updates_dispatched", "updates", ["dispatched_at"], unique=False)
    op.create_index("ix_updates_round", "updates", ["run_id", "round"], unique=False)
    op.create_table(
        "evaluations",
        sa.Column("id", Counter, nullable=False),
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("assignment_id", sa.Text(), nullable=False),
        sa.Column("round", sa.BigInteger(), nullable=False),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.Column("device_id", sa.Text(), nullable=False),
        sa.Column("source", sa.Text(), nullable=False),
        sa.Column("loss", sa.Float(), nullable=True),
        sa.Column("accuracy", sa.Float(), nullable=True),
        sa.Column("num_examples", sa.BigInteger(), nullable=False),
        sa.Column("bytes_up", sa.BigInteger(), nullable=False),
        sa.Column("bytes_down", sa.BigInteger(), nullable=False),
        sa.Column("at", sa.Float(), nullable=False),
        sa.Column("metrics", sa.JSON(), nullable=False),
        sa.ForeignKeyConstraint(
            ["run_id"],
            ["runs.run_id"],
        ),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("run_id", "assignment_id", name="uq_evaluations"),
    )
    op.create_index("ix_evaluations_at", "evaluations", ["at"], unique=False)
    op.create_index("ix_evaluations_round", "evaluations", ["run_id", "round", "source"], unique=False)


def _create_heartbeats() -> None:
    op.create_table(
        "heartbeats",
        sa.Column("id", Counter, nullable=False),
        sa.Column("device_id", sa.Text(), nullable=False),
        sa.Column("at", sa.Float(), nullable=False),
        sa.Column("seq", sa.BigInteger(), nullable=True),
        sa.Column("session_no", sa.BigInteger(), nullable=True),
        sa.Column("uptime_s", sa.Float(), nullable=True),
        sa.Column("clock_skew_s", sa.Float(), nullable=True),
        sa.Column("temperature_c", sa.Float(), nullable=True),
        sa.Column("throttled", sa.Text(), nullable=True),
        sa.Column("cpu_fraction", sa.Float(), nullable=True),
        sa.Column("memory_fraction", sa.Float(), nullable=True),
        sa.Column("memory_bytes", sa.BigInteger(), nullable=True),
        sa.Column("disk_free_bytes", sa.BigInteger(), nullable=True),
        sa.Column("battery_fraction", sa.Float(), nullable=True),
        sa.Column("power_w", sa.Float(), nullable=True),
        sa.Column("run", sa.Text(), nullable=True),
        sa.Column("iteration", sa.BigInteger(), nullable=True),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index("ix_heartbeats_at", "heartbeats", ["at", "device_id"], unique=False)
    op.create_index("ix_heartbeats_device", "heartbeats", ["device_id", "at"], unique=False)
    op.create_table(
        "heartbeats_5min",
        sa.Column("device_id", sa.Text(), nullable=False),
        sa.Column("at", sa.Float(), nullable=False),
        sa.Column("num_heartbeats", sa.BigInteger(), nullable=False),
        sa.Column("uptime_s", sa.Float(), nullable=True),
        sa.Column("clock_skew_s", sa.Float(), nullable=True),
        sa.Column("temperature_c", sa.Float(), nullable=True),
        sa.Column("throttled", sa.Text(), nullable=True),
        sa.Column("cpu_fraction", sa.Float(), nullable=True),
        sa.Column("memory_fraction", sa.Float(), nullable=True),
        sa.Column("memory_bytes", sa.BigInteger(), nullable=True),
        sa.Column("disk_free_bytes", sa.BigInteger(), nullable=True),
        sa.Column("battery_fraction", sa.Float(), nullable=True),
        sa.Column("power_w", sa.Float(), nullable=True),
        sa.Column("run", sa.Text(), nullable=True),
        sa.Column("iteration", sa.BigInteger(), nullable=True),
        sa.PrimaryKeyConstraint("device_id", "at"),
    )
    op.create_index("ix_heartbeats_5min_at", "heartbeats_5min", ["at", "device_id"], unique=False)

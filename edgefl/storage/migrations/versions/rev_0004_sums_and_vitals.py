"""Hardware telemetry of each assignment, the straggler of a round, and sums by run, device and day.

The sums and waits of existing rows are computed once the schema is complete: see `derived_tables`.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

V_ROUNDS = """
    SELECT s.run_id, s.round, s.version, s.started_at, s.closed_at, s.seconds,
        s.num_devices, s.num_updates, s.train_loss, s.bytes_up, s.bytes_down, s.source,
        (SELECT sum(e.loss * e.num_examples) / NULLIF(sum(e.num_examples), 0) FROM evaluations e
            WHERE e.run_id = s.run_id AND e.round = s.round AND e.source = s.source AND e.subject = '') AS loss,
        (SELECT sum(e.accuracy * e.num_examples) / NULLIF(sum(e.num_examples), 0) FROM evaluations e
            WHERE e.run_id = s.run_id AND e.round = s.round AND e.source = s.source AND e.subject = '') AS accuracy,
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
    """
V_UPDATES = """
    SELECT u.run_id, r.name AS run_name, u.round, u.assignment_id, u.device_id, u.outcome, u.base_version,
        u.applied_version, u.staleness, u.iterations, u.num_examples, u.loss, u.compute_s, u.send_s, u.wait_s,
        u.received_at - u.dispatched_at AS total_s, u.bytes_up, u.bytes_down, u.codec, u.dispatched_at, u.received_at,
        u.ended_at, u.reason, u.max_temperature_c, u.throttled, u.signal_dbm, u.link_bits_per_s, u.energy_j, u.metrics
    FROM updates u JOIN runs r ON r.run_id = u.run_id
    """
V_DEVICES = """
    SELECT d.device_id, d.role, d.groups, d.presence, d.joined_at, d.last_seen_at, d.removed_at, d.version,
        d.examples, coalesce(t.num_assignments, 0) AS num_assignments, coalesce(t.num_used, 0) AS num_used,
        coalesce(t.compute_s, 0) AS compute_s, coalesce(t.send_s, 0) AS send_s, coalesce(t.wait_s, 0) AS wait_s,
        coalesce(t.bytes_up, 0) AS bytes_up, coalesce(t.bytes_down, 0) AS bytes_down
    FROM devices d LEFT JOIN device_totals t ON t.device_id = d.device_id
    """
# A run with its costs.
V_RUNS = """
    SELECT r.run_id, r.name, r.task, r.strategy, r.status, r.reason, r.submitted_at, r.started_at, r.finished_at,
        r.finished_at - r.started_at AS seconds, r.rounds, r.version, r.accuracy,
        coalesce(t.num_assignments, 0) AS num_assignments, coalesce(t.num_used, 0) AS num_used,
        coalesce(t.num_late, 0) AS num_late, coalesce(t.num_lost, 0) AS num_lost,
        coalesce(t.num_refused, 0) AS num_refused, coalesce(t.num_failed, 0) AS num_failed,
        coalesce(t.compute_s, 0) AS compute_s, coalesce(t.send_s, 0) AS send_s, coalesce(t.wait_s, 0) AS wait_s,
        coalesce(t.bytes_up, 0) AS bytes_up, coalesce(t.bytes_down, 0) AS bytes_down, t.max_staleness,
        t.max_temperature_c, t.energy_j
    FROM runs r LEFT JOIN run_totals t ON t.run_id = r.run_id
    """
# A round with the assignment that it waited for.
V_SLOW = """
    SELECT r.run_id, r.round, r.started_at, r.seconds, r.waited_for, r.waited_s, u.outcome, u.iterations, u.compute_s,
        u.send_s, u.bytes_up, u.bytes_down, u.max_temperature_c, u.throttled, u.signal_dbm, u.link_bits_per_s,
        u.reason
    FROM rounds r
    LEFT JOIN updates u ON u.id = r.waited_update_id AND u.run_id = r.run_id
    WHERE r.seconds IS NOT NULL
    """
VIEWS = {
    "v_rounds": V_ROUNDS,
    "v_updates": V_UPDATES,
    "v_devices": V_DEVICES,
    "v_runs": V_RUNS,
    "v_slow": V_SLOW,
}
COUNTS = (
    "num_assignments", "num_used", "num_late", "num_lost", "num_refused", "num_failed", "num_stale", "sum_staleness",
)  # fmt: skip
INDEXES = (
    ("ix_rounds_run", "rounds", ["run_id", "started_at"]),
    ("ix_rounds_seconds", "rounds", ["seconds"]),
    ("ix_rounds_run_seconds", "rounds", ["run_id", "seconds"]),
    ("ix_rounds_waited", "rounds", ["waited_for", "seconds"]),
    ("ix_updates_device", "updates", ["device_id", "dispatched_at"]),
    ("ix_updates_round", "updates", ["run_id", "round", "device_id"]),
    ("ix_updates_run", "updates", ["run_id", "dispatched_at"]),
    ("ix_updates_outcome", "updates", ["outcome", "dispatched_at"]),
    ("ix_evaluations_run", "evaluations", ["run_id", "at"]),
    ("ix_evaluations_device", "evaluations", ["device_id", "at"]),
    ("ix_heartbeats_run", "heartbeats", ["run", "at", "device_id"]),
    ("ix_heartbeats_5min_run", "heartbeats_5min", ["run", "at", "device_id"]),
    ("ix_events_device", "events", ["device_id", "at"]),
)


def upgrade() -> None:
    for name in ("v_rounds", "v_updates", "v_devices"):
        op.execute(f"DROP VIEW {name}")
    _add_columns()
    for name in ("ix_updates_device", "ix_updates_round"):
        op.drop_index(name, table_name="updates")
    for name, table, columns in INDEXES:
        op.create_index(name, table, columns, unique=False)
    _create_totals()
    for name, query in VIEWS.items():
        op.execute(f"CREATE VIEW {name} AS {query}")


def _add_columns() -> None:
    for name, kind in (
        ("seconds", sa.Float()),
        ("waited_for", sa.Text()),
        ("waited_s", sa.Float()),
        ("waited_update_id", sa.BigInteger()),
    ):
        op.add_column("rounds", sa.Column(name, kind, nullable=True))
    for name in ("ended_at", "max_temperature_c", "signal_dbm", "link_bits_per_s", "energy_j"):
        op.add_column("updates", sa.Column(name, sa.Float(), nullable=True))
    op.add_column("updates", sa.Column("throttled", sa.Text(), nullable=True))


def _create_totals() -> None:
    keys = {
        "totals": ("run_id", "device_id", "day"),
        "run_totals": ("run_id",),
        "device_totals": ("device_id",),
        "day_totals": ("day",),
    }
    for table, names in keys.items():
        op.create_table(
            table,
            *(sa.Column(name, sa.Text(), nullable=False) for name in names),
            *(sa.Column(name, sa.BigInteger(), nullable=False) for name in COUNTS),
            sa.Column("max_staleness", sa.BigInteger(), nullable=True),
            sa.Column("iterations", sa.BigInteger(), nullable=False),
            sa.Column("num_examples", sa.BigInteger(), nullable=False),
            *(sa.Column(name, sa.Float(), nullable=False) for name in ("compute_s", "send_s", "wait_s")),
            *(sa.Column(name, sa.BigInteger(), nullable=False) for name in ("bytes_up", "bytes_down")),
            *(sa.Column(name, sa.Float(), nullable=True) for name in ("max_temperature_c", "energy_j")),
            sa.PrimaryKeyConstraint(*names),
        )
    op.create_index("ix_totals_device", "totals", ["device_id", "day"], unique=False)
    op.create_index("ix_totals_day", "totals", ["day", "device_id"], unique=False)

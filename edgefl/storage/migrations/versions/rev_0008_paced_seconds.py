"""Seconds of thermal pacing in an assignment."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None

V_UPDATES = """
    SELECT u.run_id, r.name AS run_name, u.round, u.assignment_id, u.device_id, u.outcome, u.base_version,
        u.applied_version, u.staleness, u.iterations, u.num_examples, u.loss, u.compute_s, u.paced_s, u.send_s,
        u.wait_s, u.received_at - u.dispatched_at AS total_s, u.bytes_up, u.bytes_down, u.codec, u.dispatched_at,
        u.received_at, u.ended_at, u.reason, u.max_temperature_c, u.throttled, u.signal_dbm, u.link_bits_per_s,
        u.energy_j, u.metrics
    FROM updates u JOIN runs r ON r.run_id = u.run_id
    """
V_SLOW = """
    SELECT r.run_id, r.round, r.started_at, r.seconds, r.waited_for, r.waited_s, u.outcome, u.iterations, u.compute_s,
        u.paced_s, u.send_s, u.bytes_up, u.bytes_down, u.max_temperature_c, u.throttled, u.signal_dbm,
        u.link_bits_per_s, u.reason
    FROM rounds r
    LEFT JOIN updates u ON u.id = r.waited_update_id AND u.run_id = r.run_id
    WHERE r.seconds IS NOT NULL
    """


def upgrade() -> None:
    op.add_column("updates", sa.Column("paced_s", sa.Float(), nullable=True))
    for name, query in (("v_updates", V_UPDATES), ("v_slow", V_SLOW)):
        op.execute(f"DROP VIEW {name}")
        op.execute(f"CREATE VIEW {name} AS {query}")

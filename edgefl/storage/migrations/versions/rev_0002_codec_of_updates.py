"""The codec of each update, since a run may select it per device."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

V_UPDATES = """
    SELECT u.run_id, r.name AS run_name, u.round, u.assignment_id, u.device_id, u.outcome, u.base_version,
        u.applied_version, u.staleness, u.iterations, u.num_examples, u.loss, u.compute_s, u.send_s, u.wait_s,
        u.received_at - u.dispatched_at AS total_s, u.bytes_up, u.bytes_down, u.codec, u.dispatched_at, u.received_at,
        u.reason, u.metrics
    FROM updates u JOIN runs r ON r.run_id = u.run_id
    """


def upgrade() -> None:
    op.execute("DROP VIEW v_updates")
    op.add_column("updates", sa.Column("codec", sa.Text(), nullable=True))
    op.execute(f"CREATE VIEW v_updates AS {V_UPDATES}")

"""Models of single devices: the subject of an evaluation, and their figures in a round."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

# As before, of the evaluations of the global model alone; and the figures of the devices' own models.
V_ROUNDS = """
    SELECT s.run_id, s.round, s.version, s.started_at, s.closed_at, s.closed_at - s.started_at AS seconds,
        s.num_devices, s.num_updates, s.train_loss, s.bytes_up, s.bytes_down, s.source,
        (SELECT sum(e.loss * e.num_examples) / NULLIF(sum(e.num_examples), 0) FROM evaluations e
            WHERE e.run_id = s.run_id AND e.round = s.round AND e.source = s.source AND e.subject = '') AS loss,
        (SELECT sum(e.accuracy * e.num_examples) / NULLIF(sum(e.num_examples), 0) FROM evaluations e
            WHERE e.run_id = s.run_id AND e.round = s.round AND e.source = s.source AND e.subject = '') AS accuracy,
        s.node_accuracy, s.worst_node_accuracy, s.facts
    FROM (
        SELECT r.run_id, r.round, r.version, r.started_at, r.closed_at, r.num_devices, r.num_updates,
            r.loss AS train_loss, r.bytes_up, r.bytes_down, r.node_accuracy, r.worst_node_accuracy, r.facts,
            (SELECT CASE min(CASE e.source WHEN 'coordinator' THEN 1 WHEN 'evaluator' THEN 2 ELSE 3 END)
                WHEN 1 THEN 'coordinator' WHEN 2 THEN 'evaluator' WHEN 3 THEN 'device' END
                FROM evaluations e WHERE e.run_id = r.run_id AND e.round = r.round AND e.subject = '') AS source
        FROM rounds r
    ) AS s
    """


def upgrade() -> None:
    op.execute("DROP VIEW v_rounds")
    op.add_column("evaluations", sa.Column("subject", sa.Text(), nullable=False, server_default=""))
    op.add_column("rounds", sa.Column("node_accuracy", sa.Float(), nullable=True))
    op.add_column("rounds", sa.Column("worst_node_accuracy", sa.Float(), nullable=True))
    op.add_column("rounds", sa.Column("facts", sa.JSON(), nullable=True))
    op.execute(f"CREATE VIEW v_rounds AS {V_ROUNDS}")

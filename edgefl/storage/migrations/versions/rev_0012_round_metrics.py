"""The metrics of a task: of each round's model, and the first one of each kept model."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None

# A round with its evaluation: the coordinator's, else the evaluators', else the devices' mean by examples.
# Evaluations are those of the global model alone.
ROUNDS_VIEW = """
    SELECT s.run_id, s.round, s.version, s.started_at, s.closed_at, s.seconds,
        s.num_devices, s.num_updates, s.train_loss, s.bytes_up, s.bytes_down, s.source,
        (SELECT sum(e.loss * e.num_examples) / NULLIF(sum(e.num_examples), 0) FROM evaluations e
            WHERE e.run_id = s.run_id AND e.round = s.round AND e.source = s.source AND e.subject = '') AS loss,
        (SELECT sum(e.accuracy * e.num_examples) / NULLIF(sum(e.num_examples), 0) FROM evaluations e
            WHERE e.run_id = s.run_id AND e.round = s.round AND e.source = s.source AND e.subject = '')
            AS accuracy,
        s.node_accuracy, s.worst_node_accuracy, s.facts, s.metrics, s.waited_for, s.waited_s
    FROM (
        SELECT r.run_id, r.round, r.version, r.started_at, r.closed_at, r.seconds, r.num_devices, r.num_updates,
            r.loss AS train_loss, r.bytes_up, r.bytes_down, r.node_accuracy, r.worst_node_accuracy, r.facts,
            r.metrics, r.waited_for, r.waited_s,
            (SELECT CASE min(CASE e.source WHEN 'coordinator' THEN 1 WHEN 'evaluator' THEN 2 ELSE 3 END)
                WHEN 1 THEN 'coordinator' WHEN 2 THEN 'evaluator' WHEN 3 THEN 'device' END
                FROM evaluations e WHERE e.run_id = r.run_id AND e.round = r.round AND e.subject = '') AS source
        FROM rounds r
    ) AS s
    """


def upgrade() -> None:
    op.add_column("rounds", sa.Column("metrics", sa.JSON(), nullable=True))
    columns = {column["name"] for column in sa.inspect(op.get_bind()).get_columns("checkpoints")}
    if "quality" not in columns:  # some builds had it in the first revision
        op.add_column("checkpoints", sa.Column("quality", sa.Float(), nullable=True))
    op.execute("DROP VIEW v_rounds")
    op.execute(f"CREATE VIEW v_rounds AS {ROUNDS_VIEW}")

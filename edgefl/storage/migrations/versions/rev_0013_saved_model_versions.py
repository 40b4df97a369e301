"""Saved models are one per version: while a journal is replayed, several have the same last record."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None


def upgrade() -> None:
    checkpoints = sa.table("checkpoints", sa.column("id"), sa.column("run_id"), sa.column("version"))
    newest = sa.select(sa.func.max(checkpoints.c.id)).group_by(checkpoints.c.run_id, checkpoints.c.version)
    op.execute(sa.delete(checkpoints).where(checkpoints.c.id.not_in(newest)))
    with op.batch_alter_table("checkpoints") as batch:
        batch.drop_constraint("uq_checkpoints", type_="unique")
        batch.create_unique_constraint("uq_checkpoints", ["run_id", "version"])

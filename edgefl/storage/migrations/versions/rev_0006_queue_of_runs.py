"""The queue of runs: priority, and number of resumes."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    for name in ("priority", "resumes"):
        op.add_column("runs", sa.Column(name, sa.BigInteger(), nullable=False, server_default="0"))

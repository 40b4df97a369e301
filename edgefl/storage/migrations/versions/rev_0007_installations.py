"""Installations: releases and task packs, and their state on each device."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "installations",
        sa.Column("installation_id", sa.Text(), primary_key=True),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("version", sa.Text(), nullable=False),
        sa.Column("key", sa.Text(), nullable=False),
        sa.Column("sha256", sa.Text(), nullable=False),
        sa.Column("bytes_file", sa.BigInteger(), nullable=False),
        sa.Column("canary", sa.BigInteger(), nullable=False),
        sa.Column("canary_s", sa.Float(), nullable=False),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=True),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("canary_until", sa.Float(), nullable=True),
        sa.Column("finished_at", sa.Float(), nullable=True),
    )
    op.create_index("ix_installations_status", "installations", ["status", "created_at"])
    op.create_table(
        "installation_devices",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), primary_key=True),
        sa.Column("installation_id", sa.Text(), sa.ForeignKey("installations.installation_id"), nullable=False),
        sa.Column("device_id", sa.Text(), nullable=False),
        sa.Column("part", sa.Text(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=True),
        sa.Column("reported_at", sa.Float(), nullable=True),
        sa.UniqueConstraint("installation_id", "device_id", name="uq_installation_devices"),
    )
    op.create_index("ix_installation_devices_device", "installation_devices", ["device_id", "state"])

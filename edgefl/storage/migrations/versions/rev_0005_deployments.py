"""Deployments: models, and their state on each device."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "deployments",
        sa.Column("deployment_id", sa.Text(), primary_key=True),
        sa.Column("run_id", sa.Text(), nullable=True),
        sa.Column("model", sa.Text(), nullable=False),
        sa.Column("task", sa.Text(), nullable=False),
        sa.Column("options", sa.JSON(), nullable=False),
        sa.Column("devices", sa.JSON(), nullable=True),
        sa.Column("canary", sa.BigInteger(), nullable=False),
        sa.Column("canary_s", sa.Float(), nullable=False),
        sa.Column("tolerance", sa.Float(), nullable=False),
        sa.Column("min_accuracy", sa.Float(), nullable=False),
        sa.Column("test_fraction", sa.Float(), nullable=False),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=True),
        sa.Column("onnx_sha256", sa.Text(), nullable=True),
        sa.Column("bytes_file", sa.BigInteger(), nullable=True),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("canary_until", sa.Float(), nullable=True),
        sa.Column("finished_at", sa.Float(), nullable=True),
    )
    op.create_index("ix_deployments_status", "deployments", ["status", "created_at"])
    op.create_table(
        "deployment_devices",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), primary_key=True),
        sa.Column("deployment_id", sa.Text(), sa.ForeignKey("deployments.deployment_id"), nullable=False),
        sa.Column("device_id", sa.Text(), nullable=False),
        sa.Column("part", sa.Text(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=True),
        sa.Column("accuracy", sa.Float(), nullable=True),
        sa.Column("former_accuracy", sa.Float(), nullable=True),
        sa.Column("num_examples", sa.BigInteger(), nullable=True),
        sa.Column("reported_at", sa.Float(), nullable=True),
        sa.UniqueConstraint("deployment_id", "device_id", name="uq_deployment_devices"),
    )
    op.create_index("ix_deployment_devices_device", "deployment_devices", ["device_id", "state"])
    op.create_index("ix_deployment_devices_state", "deployment_devices", ["state"])

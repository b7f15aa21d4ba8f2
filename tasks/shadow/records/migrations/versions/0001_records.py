"""Create the first tables."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    """Create the tables for records and for counts."""
    op.create_table(
        "shadow_record",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("exchange", sa.String(64), nullable=False),
        sa.Column("candidate", sa.String(200), nullable=False),
        sa.Column("role", sa.String(8), nullable=False),
        sa.Column("arm", sa.String(10), nullable=False),
        sa.Column("request_id", sa.String(200), nullable=False),
        sa.Column("session", sa.String(64), nullable=False),
        sa.Column("at", sa.Float, nullable=False),
        sa.Column("path", sa.String(200), nullable=False),
        sa.Column("request", sa.LargeBinary, nullable=False),
        sa.Column("status", sa.Integer, nullable=False),
        sa.Column("response", sa.LargeBinary, nullable=False),
        sa.Column("error", sa.String(200), nullable=False),
        sa.Column("fallback", sa.Boolean, nullable=False),
        sa.Column("first_byte", sa.Float),
        sa.Column("seconds", sa.Float, nullable=False),
    )
    unique_columns = ["exchange", "candidate", "role", "arm"]
    op.create_index("shadow_record_exchange", "shadow_record", unique_columns, unique=True)
    op.create_index("shadow_record_candidate", "shadow_record", ["candidate", "at"])
    op.create_table(
        "shadow_tally",
        sa.Column("candidate", sa.String(200), primary_key=True),
        sa.Column("what", sa.String(60), primary_key=True),
        sa.Column("count", sa.BigInteger, nullable=False),
    )

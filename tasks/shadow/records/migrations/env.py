"""Run the Alembic migrations on the connection of ``records.open_records``."""

from __future__ import annotations

from alembic import context

context.configure(connection=context.config.attributes["connection"], version_table="shadow_version")
with context.begin_transaction():
    context.run_migrations()

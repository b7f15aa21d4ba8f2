"""Where Alembic begins: the connection that ``records.open_records`` holds."""

from __future__ import annotations

from alembic import context

context.configure(connection=context.config.attributes["connection"], version_table="shadow_version")
with context.begin_transaction():
    context.run_migrations()

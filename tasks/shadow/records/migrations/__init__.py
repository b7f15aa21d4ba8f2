"""Migrate the tables of the shadow records. Alembic applies each missing migration, one file per schema change."""

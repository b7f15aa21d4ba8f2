"""Migrate the tables of the shadow records with Alembic, one file per schema change."""

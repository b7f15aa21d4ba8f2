"""Store requests and answers in SQLite or PostgreSQL. ``migrations`` manages the schema."""

from mergegate.tasks.shadow.records.table import Records, open_records

__all__ = ["Records", "open_records"]

"""Store requests and answers in SQLite or PostgreSQL, with a schema that is managed by ``migrations``."""

from mergegate.tasks.shadow.records.table import Records, open_records

__all__ = ["Records", "open_records"]

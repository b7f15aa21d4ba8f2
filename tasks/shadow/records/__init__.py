"""What is kept of requests and answers: one table in SQLite or PostgreSQL, and how it came to be (``migrations``)."""

from mergegate.tasks.shadow.records.table import Records, open_records

__all__ = ["Records", "open_records"]

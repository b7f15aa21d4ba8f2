"""Store requests and answers in SQLite or PostgreSQL. ``migrations`` manages the schema."""

from mergegate.tasks.shadow.records.table import Records, open_records

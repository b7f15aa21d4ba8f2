"""Detect damaged SQLite databases, and delete them together with their journal files so that they are rebuilt."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

from mergegate.merge_core.files.state import is_misplaced, remove_damaged

_FILE_SUFFIXES = ("", "-journal", "-wal", "-shm")
# Another process holds a lock, or the disk refuses the operation. The file itself is intact.
_ENVIRONMENT_ERRORS = frozenset(
    {
        sqlite3.SQLITE_BUSY,
        sqlite3.SQLITE_LOCKED,
        sqlite3.SQLITE_READONLY,
        sqlite3.SQLITE_FULL,
        sqlite3.SQLITE_PERM,
        sqlite3.SQLITE_NOMEM,
        sqlite3.SQLITE_IOERR,
        sqlite3.SQLITE_PROTOCOL,
    }
)
# Kinds of SQLITE_IOERR for invalid content: a file that ends too early, a corrupt file system, a wrong checksum.
_INVALID_CONTENT = frozenset(
    {sqlite3.SQLITE_IOERR_SHORT_READ, sqlite3.SQLITE_IOERR_CORRUPTFS, sqlite3.SQLITE_IOERR_DATA}
)


def sqlite_is_damaged(error: sqlite3.Error, database: Path) -> bool:
    """Return whether ``error`` shows that the file is not a valid database with the expected schema.

    A database that is locked, or that the machine cannot read or write at the moment, is not damaged.
    """
    extended_code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT)
    code = extended_code & 0xFF  # The low byte is the primary code.
    if code == sqlite3.SQLITE_CANTOPEN:
        return bool(misplaced_file(database))
    return code not in _ENVIRONMENT_ERRORS or extended_code in _INVALID_CONTENT


def sqlite_fault(database: Path, *, patience_s: float) -> str:
    """Return why the database cannot be used, or an empty string if it is intact or does not exist yet.

    SQLite reads every page for this check. A database that another process keeps locked for ``patience_s`` seconds
    counts as intact.
    """
    if misplaced := misplaced_file(database):
        return f"{misplaced.name} is not a file"
    if not database.exists():
        return ""
    try:
        with closing(sqlite3.connect(database, timeout=patience_s)) as connection:
            result = connection.execute("PRAGMA quick_check(1)").fetchone()
    except sqlite3.Error as error:
        return str(error) if sqlite_is_damaged(error, database) else ""
    return "" if result == ("ok",) else f"damaged: {result}"


def remove_sqlite(database: Path, reason: str) -> None:
    """Delete the database and its journal files, and log ``reason`` (see :func:`.remove_damaged`)."""
    for suffix in _FILE_SUFFIXES:
        remove_damaged(database.with_name(database.name + suffix), reason)


def misplaced_file(database: Path) -> Path | None:
    """Return the first path of the database and its journals where something other than a regular file is, or None.

    Callers check this before they open the database, because SQLite would wait forever to open a named pipe.
    """
    paths = (database.with_name(database.name + suffix) for suffix in _FILE_SUFFIXES)
    return next((path for path in paths if is_misplaced(path, through_links=True)), None)

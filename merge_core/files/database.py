"""SQLite files of ours: when one counts as damaged, and how it is set aside with what SQLite keeps beside it."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

from mergegate.merge_core.files.state import is_misplaced, set_aside_damaged

_BESIDE = ("", "-journal", "-wal", "-shm")
# Somebody else holds it, or the disk says no: nothing is wrong with the file.
_NOT_ITS_FAULT = frozenset(
    {
        sqlite3.SQLITE_BUSY,
        sqlite3.SQLITE_LOCKED,
        sqlite3.SQLITE_READONLY,
        sqlite3.SQLITE_FULL,
        sqlite3.SQLITE_PERM,
        sqlite3.SQLITE_NOMEM,
    }
)


def sqlite_is_damaged(error: sqlite3.Error, database: Path) -> bool:
    """Whether ``error`` says that the file is none of ours: no database, another schema, something else in its place.

    False where it is locked, or cannot be read or written for reasons of the machine.
    """
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT) & 0xFF  # the rest says more of the same
    if code == sqlite3.SQLITE_CANTOPEN:
        return bool(misplaced_file(database))
    return code not in _NOT_ITS_FAULT


def sqlite_fault(database: Path, *, patience_s: float) -> str:
    """Why the database cannot be used; empty where it is whole, or not there yet. Every page is read.

    Args:
        patience_s: How long to wait for somebody who holds it. Then it counts as whole.
    """
    if beside := misplaced_file(database):
        return f"{beside.name} is no file"
    if not database.exists():
        return ""
    try:
        with closing(sqlite3.connect(database, timeout=patience_s)) as connection:
            said = connection.execute("PRAGMA quick_check(1)").fetchone()
    except sqlite3.Error as error:
        return str(error) if sqlite_is_damaged(error, database) else ""
    return "" if said == ("ok",) else f"damaged: {said}"


def set_sqlite_aside(database: Path, why: str) -> None:
    """Set the database aside; its journals with it, which belong to no other."""
    for suffix in _BESIDE:
        set_aside_damaged(database.with_name(database.name + suffix), why)


def misplaced_file(database: Path) -> Path | None:
    """What stands in the place of the database or of a file beside it and is no file. SQLite waits for pipes."""
    places = (database.with_name(database.name + suffix) for suffix in _BESIDE)
    return next((at for at in places if is_misplaced(at, through_links=True)), None)

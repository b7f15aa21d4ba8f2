"""sha256 of files, each read once: hashes are remembered by (device, inode, size, mtime), like git's index does.

Hashing a 70 B checkpoint takes minutes; a nightly run that finds nothing new must take seconds. A file that was
rewritten, truncated, replaced or touched is hashed again; ``HashMemo.sha256(path, trust=False)`` always reads it.

The table is believed as far as it can be read: one that is damaged or of another schema is set aside and begun anew,
one that is locked or on a full disk is left alone, and files are hashed as if it were not there.
"""

from __future__ import annotations

import hashlib
import logging
import sqlite3
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import TypeVar

from merge_core.store.database import misplaced_file, set_sqlite_aside, sqlite_is_damaged
from merge_core.store.state import state_directory

_CHUNK = 1 << 22
# A table that somebody holds for longer, or that cannot be written, is not asked again for a while.
_PATIENCE_S, _LEAVE_ALONE_S = 5.0, 60.0
_LEFT_ALONE: dict[Path, float] = {}
_log = logging.getLogger(__name__)
R = TypeVar("R")


def sha256_file(path: Path) -> str:
    """sha256 of the file's bytes, 64 hex digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256", _bufsize=_CHUNK).hexdigest()


class HashMemo:
    """A small SQLite table from file identity to sha256. Safe for several processes; losing it costs only time.

    Args:
        database: Where the table lives; created on first use.
    """

    def __init__(self, database: Path) -> None:
        self._database = database

    def sha256(self, path: Path, *, trust: bool = True) -> str:
        """sha256 of ``path``; from memory when the file is the one that was hashed before and ``trust`` allows it."""
        identity = _identity(path)
        if trust:
            row = self._asked(
                lambda connection: connection.execute(
                    "SELECT sha256 FROM hashes WHERE device=? AND inode=? AND size=? AND mtime_ns=?", identity
                ).fetchone()
            )
            if row is not None and (known := _vouched(identity, row[0])):
                return known
        sha256 = sha256_file(path)
        if _identity(path) == identity:  # not written to while we read it
            self._remember(identity, sha256)
        return sha256

    def remember(self, path: Path, sha256: str) -> None:
        """Note a hash that was computed while the file was written, so that it is never read just for hashing."""
        self._remember(_identity(path), sha256)

    def _remember(self, identity: tuple[int, int, int, int], sha256: str) -> None:
        def insert(connection: sqlite3.Connection) -> None:
            with connection:
                connection.execute(
                    "INSERT OR REPLACE INTO hashes VALUES (?, ?, ?, ?, ?)", (*identity, _noted(identity, sha256))
                )

        self._asked(insert)

    def _asked(self, question: Callable[[sqlite3.Connection], R]) -> R | None:
        """What the table answers; None where there is no asking it: it only saves time, and is no reason to stop."""
        for _ in range(2):
            if time.monotonic() < _LEFT_ALONE.get(self._database, 0):
                return None
            if beside := misplaced_file(self._database):
                set_sqlite_aside(self._database, f"{beside.name} is no file")
            try:
                with closing(self._open()) as connection:
                    return question(connection)
            except sqlite3.Error as error:
                if not sqlite_is_damaged(error, self._database):
                    _log.warning("%s: %s; files are hashed again", self._database, error)
                    _LEFT_ALONE[self._database] = time.monotonic() + _LEAVE_ALONE_S
                    return None
                set_sqlite_aside(self._database, str(error))
        return None

    def _open(self) -> sqlite3.Connection:
        state_directory(self._database.parent, private=True)
        connection = sqlite3.connect(self._database, timeout=_PATIENCE_S)
        connection.execute(
            "CREATE TABLE IF NOT EXISTS hashes (device INTEGER, inode INTEGER, size INTEGER, mtime_ns INTEGER,"
            " sha256 TEXT, PRIMARY KEY (device, inode))"
        )
        return connection


def _noted(identity: tuple[int, ...], sha256: str) -> str:
    """The hash as it stands in the table, with a check over it and the file it is of: an altered one is none."""
    return f"{sha256} {hashlib.sha256(f'{identity} {sha256}'.encode()).hexdigest()[:16]}"


def _vouched(identity: tuple[int, ...], noted: object) -> str:
    """The hash of what :func:`_noted` made; empty for anything else."""
    sha256 = str(noted)[:64]
    return sha256 if noted == _noted(identity, sha256) else ""


def _identity(path: Path) -> tuple[int, int, int, int]:
    status = path.stat()
    # SQLite integers are signed; inode numbers of some file systems use all 64 bits.
    signed = status.st_ino - (1 << 64) if status.st_ino >= 1 << 63 else status.st_ino
    return status.st_dev, signed, status.st_size, status.st_mtime_ns

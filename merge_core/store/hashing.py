"""sha256 of files, each read once: hashes are remembered by (device, inode, size, mtime), like git's index does.

Hashing a 70 B checkpoint takes minutes; a nightly run that finds nothing new must take seconds. A file that was
rewritten, truncated, replaced or touched is hashed again; ``HashMemo.sha256(path, trust=False)`` always reads it.
"""

from __future__ import annotations

import hashlib
import sqlite3
from contextlib import closing
from pathlib import Path

_CHUNK = 1 << 22


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
        with closing(self._open()) as connection:
            if trust and (recalled := self._recalled(connection, identity)):
                return recalled
            sha256 = sha256_file(path)
            if _identity(path) == identity:  # not written to while we read it
                self._remember(connection, identity, sha256)
        return sha256

    def known(self, path: Path) -> str | None:
        """sha256 of ``path`` as ``sha256`` would give it, where it need not be read for that."""
        if not (self._database.is_file() and path.is_file()):
            return None
        with closing(self._open()) as connection:
            return self._recalled(connection, _identity(path))

    def remember(self, path: Path, sha256: str) -> None:
        """Note a hash that was computed while the file was written, so that it is never read just for hashing."""
        with closing(self._open()) as connection:
            self._remember(connection, _identity(path), sha256)

    def _recalled(self, connection: sqlite3.Connection, identity: tuple[int, int, int, int]) -> str | None:
        row = connection.execute(
            "SELECT sha256 FROM hashes WHERE device=? AND inode=? AND size=? AND mtime_ns=?", identity
        ).fetchone()
        return None if row is None else str(row[0])

    def _remember(self, connection: sqlite3.Connection, identity: tuple[int, int, int, int], sha256: str) -> None:
        with connection:
            connection.execute("INSERT OR REPLACE INTO hashes VALUES (?, ?, ?, ?, ?)", (*identity, sha256))

    def _open(self) -> sqlite3.Connection:
        self._database.parent.mkdir(parents=True, exist_ok=True)
        connection = sqlite3.connect(self._database, timeout=30)
        connection.execute(
            "CREATE TABLE IF NOT EXISTS hashes (device INTEGER, inode INTEGER, size INTEGER, mtime_ns INTEGER,"
            " sha256 TEXT, PRIMARY KEY (device, inode))"
        )
        return connection


def _identity(path: Path) -> tuple[int, int, int, int]:
    status = path.stat()
    # SQLite integers are signed; inode numbers of some file systems use all 64 bits.
    signed = status.st_ino - (1 << 64) if status.st_ino >= 1 << 63 else status.st_ino
    return status.st_dev, signed, status.st_size, status.st_mtime_ns

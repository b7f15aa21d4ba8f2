"""sha256 of files, each read once: remembered by (device, inode, size, mtime, ctime), much as git's index does.

Hashing a 70 B checkpoint takes minutes; a nightly run that finds nothing new must take seconds. A file that was
rewritten, truncated, replaced or touched is hashed again, also when its time of modification was put back: nobody can
set the time of change (ctime). ``HashMemo.sha256(path, trust=False)`` always reads it.

Clocks of file systems tick every few milliseconds. What is written twice within one tick has the same times, so a file
is read for a memory only when the tick of its last change is over.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import sqlite3
import time
from contextlib import closing, suppress
from pathlib import Path
from typing import NamedTuple

from merge_core.store.locks import locked

log = logging.getLogger(__name__)

_CHUNK = 1 << 22
# Longer than a tick of any clock that files are stamped with (10 ms where the kernel's timer has 100 Hz).
_TICK_NS = 20_000_000
# To be raised with every change of the table's shape.
_SHAPE = 2
# What goes wrong with a table that may be sound: somebody holds it, it may not be written, the disk is full or fails.
_BLAMELESS = ("SQLITE_BUSY", "SQLITE_LOCKED", "SQLITE_READONLY", "SQLITE_FULL", "SQLITE_CANTOPEN", "SQLITE_IOERR")
_COLUMNS = ("device", "inode", "size", "mtime_ns", "ctime_ns")


class FileIdentity(NamedTuple):
    """What is other when a file was replaced, or anything was done to it. Times in nanoseconds."""

    device: int
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int


def file_identity(file: Path | int) -> FileIdentity:
    """Of the file at a path (of what a link leads to), or of an open one.

    Raises:
        OSError: There is none.
    """
    status = file.stat() if isinstance(file, Path) else os.fstat(file)
    return FileIdentity(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


def sha256_file(path: Path) -> str:
    """sha256 of the file's bytes, 64 hex digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256", _bufsize=_CHUNK).hexdigest()


class HashMemo:
    """A small SQLite table from file identity to sha256. Safe for several processes; losing it costs only time.

    A table that is damaged, or of another version's shape, is set aside as ``<name>.old``; where there can be none, the
    files are read.

    Args:
        database: Where the table lives; created on first use.
    """

    def __init__(self, database: Path) -> None:
        self._database = database

    def sha256(self, path: Path, *, trust: bool = True) -> str:
        """sha256 of ``path``; from memory when the file is the one that was hashed before and ``trust`` allows it."""
        identity = file_identity(path)
        if trust and (known := self._recall(identity)) is not None:
            return known
        _wait_for_tick(identity)
        identity = file_identity(path)
        sha256 = sha256_file(path)
        if file_identity(path) == identity:  # not written to while we read it
            self._remember(identity, sha256)
        return sha256

    def known(self, path: Path) -> str | None:
        """sha256 of ``path`` as ``sha256`` would give it, where it need not be read for that."""
        if not (self._database.is_file() and path.is_file()):
            return None
        return self._recall(file_identity(path))

    def remember(self, path: Path, sha256: str) -> None:
        """Note a hash that was computed while the file was written, so that it is never read just for hashing."""
        identity = file_identity(path)
        _wait_for_tick(identity)
        if file_identity(path) == identity:
            self._remember(identity, sha256)

    def _recall(self, identity: FileIdentity) -> str | None:
        which = " AND ".join(f"{column}=?" for column in _COLUMNS)
        rows = self._execute(f"SELECT sha256 FROM hashes WHERE {which}", _stored(identity))
        return str(rows[0][0]) if rows else None

    def _remember(self, identity: FileIdentity, sha256: str) -> None:
        self._execute("INSERT OR REPLACE INTO hashes VALUES (?, ?, ?, ?, ?, ?)", (*_stored(identity), sha256))

    def _execute(self, statement: str, values: tuple[object, ...]) -> list[tuple[object, ...]]:
        """What the table answers; nothing where there is no table to be had."""
        inode = self._inode()
        try:
            try:
                return self._asked(statement, values)
            except sqlite3.DatabaseError as error:
                if error.sqlite_errorname.startswith(_BLAMELESS) and not self._database.is_dir():
                    raise
                log.warning("%s is set aside: %s", self._database, error)
                self._set_aside(inode)
                return self._asked(statement, values)
        except (OSError, sqlite3.Error) as error:
            log.warning("%s cannot be used: %s; files are hashed again", self._database, error)
            return []

    def _asked(self, statement: str, values: tuple[object, ...]) -> list[tuple[object, ...]]:
        self._database.parent.mkdir(parents=True, exist_ok=True)
        with closing(sqlite3.connect(self._database, timeout=30)) as connection, connection:
            _require_shape(connection)
            rows: list[tuple[object, ...]] = connection.execute(statement, values).fetchall()
            return rows

    def _inode(self) -> int | None:
        with suppress(OSError):
            return self._database.stat().st_ino
        return None

    def _set_aside(self, inode: int | None) -> None:
        """Make room for a new table, unless another process has just done so."""
        with locked(self._database.with_name(f"{self._database.name}.lock"), remove=True, required=False):
            if self._inode() != inode:
                return
            old = self._database.with_name(f"{self._database.name}.old")
            if old.is_dir():
                shutil.rmtree(old)
            self._database.replace(old)


def _require_shape(connection: sqlite3.Connection) -> None:
    """Make the table where there is none.

    Raises:
        sqlite3.DatabaseError: It is no database, or of another shape.
    """
    (shape,) = connection.execute("PRAGMA user_version").fetchone()
    if shape == _SHAPE:
        return
    connection.execute("BEGIN IMMEDIATE")  # Another process may be making it at this moment.
    (shape,) = connection.execute("PRAGMA user_version").fetchone()
    if shape != _SHAPE and connection.execute("SELECT 1 FROM sqlite_master").fetchone():
        other = sqlite3.DatabaseError(f"its shape is {shape}, not {_SHAPE}")
        other.sqlite_errorname = "SQLITE_SCHEMA"
        raise other
    columns = ", ".join(f"{column} INTEGER" for column in _COLUMNS)
    connection.execute(f"CREATE TABLE IF NOT EXISTS hashes ({columns}, sha256 TEXT, PRIMARY KEY (device, inode))")
    connection.execute(f"PRAGMA user_version = {_SHAPE}")


def _wait_for_tick(identity: FileIdentity) -> None:
    """Wait until whatever is done to the file from now on gives it another time; 20 ms at most."""
    age = time.time_ns() - identity.ctime_ns
    if 0 <= age < _TICK_NS:
        time.sleep((_TICK_NS - age) / 1e9)


def _stored(identity: FileIdentity) -> tuple[int, ...]:
    # SQLite integers are signed; inode numbers of some file systems use all 64 bits.
    return tuple(number - (1 << 64) if number >= 1 << 63 else number for number in identity)

"""Compute SHA-256 digests of files and cache them by (device, inode, size, mtime, ctime), much like git's index.

Hashing a checkpoint with 70 billion parameters takes minutes, but a scheduled run that finds nothing new must finish in
seconds. mergegate hashes a file again after it was rewritten, truncated, replaced or touched. Resetting the
modification time does not hide a change, because programs cannot set the change time (ctime).

File system clocks tick every few milliseconds, and two writes within one tick leave the same timestamps. ``HashMemo``
therefore waits until the tick of the last change has passed before it reads a file.

The cache never stops a run. A table that is damaged or has another schema is deleted and rebuilt. While a table is
locked or its disk is full, files are hashed without it.
"""

from __future__ import annotations

import hashlib
import logging
import os
import sqlite3
import time
from collections.abc import Callable, Iterable
from contextlib import closing, suppress
from pathlib import Path
from typing import NamedTuple, TypeVar

from mergegate.merge_core.errors import ChangedInput
from mergegate.merge_core.files.state import misplaced_file, remove_sqlite, sqlite_is_damaged, state_directory
from mergegate.merge_core.parsing import plain_file

HASHES = "hashes.sqlite"  # File name of the hash table in a store.
_CHUNK = 1 << 22
# Longer than one tick of any file system clock (10 ms with a 100 Hz kernel timer).
_TICK_NS = 20_000_000
_COLUMNS = ("device", "inode", "size", "mtime_ns", "ctime_ns")
# After a table stays locked for _PATIENCE_S or cannot be written, it is not used for _RETRY_AFTER_S.
_PATIENCE_S, _RETRY_AFTER_S = 5.0, 60.0
_UNUSABLE_UNTIL: dict[Path, float] = {}
_log = logging.getLogger(__name__)
R = TypeVar("R")


class FileIdentity(NamedTuple):
    """Metadata of a file that changes whenever the file is replaced or modified. Times are in nanoseconds."""

    device: int
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int


def file_identity(file: Path | int) -> FileIdentity:
    """Return the identity of a path or an open descriptor, following links. Raise OSError if the file is missing."""
    status = file.stat() if isinstance(file, Path) else os.fstat(file)
    return FileIdentity(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


def require_unchanged(path: Path, identity: FileIdentity, descriptor: int | None = None) -> None:
    """Raise ChangedInput if a file was modified, replaced or removed since ``identity`` was taken.

    An open ``descriptor`` of the file must also still have this identity.
    """
    try:
        is_same = all(file_identity(file) == identity for file in (path, descriptor) if file is not None)
    except OSError:
        is_same = False
    if not is_same:
        raise ChangedInput(
            str(path),
            found="the file changed or was replaced while it was merged",
            expected="the same file during the whole merge",
            remedy="stop the process that writes this file, then run again",
        )


def sha256_file(path: Path) -> str:
    """Return the SHA-256 digest of a plain file as 64 hex digits.

    Raises:
        InvalidInput: A pipe, a device or a directory is at ``path``.
        OSError: The file cannot be read.
    """
    if not path.is_file():  # Opening a pipe would wait for a writer.
        plain_file(path)
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256", _bufsize=_CHUNK).hexdigest()


class HashMemo:
    """SQLite table that maps file identities to SHA-256 digests. Several processes may use it at the same time.

    Args:
        database: Path of the database, which is created on first use.
        before_read: Called with the path of each file before it is read, which may take minutes. Exceptions propagate.
    """

    def __init__(self, database: Path, before_read: Callable[[Path], None] = lambda path: None) -> None:
        self._database, self._before_read = database, before_read

    def sha256(self, path: Path, *, trust: bool = True) -> str:
        """Return the digest of the file at ``path``. Unless ``trust`` is false, use the table if it has the digest."""
        identity = file_identity(path)
        if trust and (cached := self.recall(path)):
            return cached
        self._before_read(path)
        _wait_for_tick(identity)
        identity = file_identity(path)
        sha256 = sha256_file(path)
        if file_identity(path) == identity:  # No process wrote to the file while it was read.
            self._remember(identity, sha256)
        return sha256

    def recall(self, path: Path) -> str | None:
        """Return the digest of the file at ``path`` from the table, or None. Do not read the file."""
        if not (self._database.is_file() and path.is_file()):
            return None
        identity = file_identity(path)
        condition = " AND ".join(f"{column}=?" for column in _COLUMNS)
        statement = f"SELECT sha256 FROM hashes WHERE {condition}"
        row = self._query(lambda connection: connection.execute(statement, _stored(identity)).fetchone())
        sha256 = str(row[0])[:64] if row is not None else ""
        return sha256 if row is not None and row[0] == _hash_with_checksum(identity, sha256) else None

    def remember(self, path: Path, sha256: str) -> None:
        """Record a digest that was computed while the file was written, so that the file need not be read again."""
        identity = file_identity(path)
        _wait_for_tick(identity)
        if file_identity(path) == identity:
            self._remember(identity, sha256)

    def forget(self, files: Iterable[Path]) -> None:
        """Remove the digests of files that are about to be deleted, so that the table does not grow forever."""
        inodes = []
        for file in files:
            with suppress(OSError):
                identity = _stored(file_identity(file))
                inodes.append(identity[:2])
        if not (inodes and self._database.is_file()):
            return

        def delete(connection: sqlite3.Connection) -> None:
            with connection:
                connection.executemany("DELETE FROM hashes WHERE device=? AND inode=?", inodes)

        self._query(delete)

    def _remember(self, identity: FileIdentity, sha256: str) -> None:
        def insert(connection: sqlite3.Connection) -> None:
            with connection:
                connection.execute(
                    "INSERT OR REPLACE INTO hashes VALUES (?, ?, ?, ?, ?, ?)",
                    (*_stored(identity), _hash_with_checksum(identity, sha256)),
                )

        self._query(insert)

    def _query(self, query: Callable[[sqlite3.Connection], R]) -> R | None:
        """Return the result of ``query``, or None if the table cannot be used."""
        for _ in range(2):
            if time.monotonic() < _UNUSABLE_UNTIL.get(self._database, 0):
                return None
            if misplaced := misplaced_file(self._database):
                remove_sqlite(self._database, f"{misplaced.name} is not a file")
            try:
                with closing(self._open()) as connection:
                    return query(connection)
            except sqlite3.Error as error:
                if not sqlite_is_damaged(error, self._database):
                    _log.warning("%s: %s; mergegate hashes files again", self._database, error)
                    _UNUSABLE_UNTIL[self._database] = time.monotonic() + _RETRY_AFTER_S
                    return None
                remove_sqlite(self._database, str(error))
        return None

    def _open(self) -> sqlite3.Connection:
        state_directory(self._database.parent, private=True)
        connection = sqlite3.connect(self._database, timeout=_PATIENCE_S)
        # Do not wait for the disk: a power cut may lose rows, which costs only time, or damage them, which the
        # checksum detects.
        connection.execute("PRAGMA synchronous=OFF")
        columns = ", ".join(f"{column} INTEGER" for column in _COLUMNS)
        connection.execute(f"CREATE TABLE IF NOT EXISTS hashes ({columns}, sha256 TEXT, PRIMARY KEY (device, inode))")
        return connection


def _hash_with_checksum(identity: FileIdentity, sha256: str) -> str:
    """Return a digest as the table stores it, with a checksum over digest and file identity to detect damage."""
    return f"{sha256} {hashlib.sha256(f'{tuple(identity)} {sha256}'.encode()).hexdigest()[:16]}"


def _wait_for_tick(identity: FileIdentity) -> None:
    """Wait, for at most 20 ms, until the next change of the file would get a different timestamp."""
    age = time.time_ns() - identity.ctime_ns
    if 0 <= age < _TICK_NS:
        time.sleep((_TICK_NS - age) / 1e9)


def _stored(identity: FileIdentity) -> tuple[int, ...]:
    # SQLite integers are signed, and the inode numbers of some file systems use all 64 bits.
    return tuple(number - (1 << 64) if number >= 1 << 63 else number for number in identity)

"""sha256 of files, each read once: remembered by (device, inode, size, mtime, ctime), much as git's index does.

Hashing a 70 B checkpoint takes minutes; a nightly run that finds nothing new must take seconds. A file that was
rewritten, truncated, replaced or touched is hashed again, also when its time of modification was put back: nobody can
set the time of change (ctime). ``HashMemo.sha256(path, trust=False)`` always reads it.

Clocks of file systems tick every few milliseconds. What is written twice within one tick has the same times, so a file
is read for a memory only when the tick of its last change is over.

The table is believed as far as it can be read: one that is damaged or of another schema is set aside and begun anew,
one that is locked or on a full disk is left alone, and files are hashed as if it were not there.
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
from mergegate.merge_core.files.database import misplaced_file, set_sqlite_aside, sqlite_is_damaged
from mergegate.merge_core.files.state import state_directory
from mergegate.merge_core.parsing import plain_file

HASHES = "hashes.sqlite"  # what the table of a store is called
_CHUNK = 1 << 22
# Longer than a tick of any clock that files are stamped with (10 ms where the kernel's timer has 100 Hz).
_TICK_NS = 20_000_000
_COLUMNS = ("device", "inode", "size", "mtime_ns", "ctime_ns")
# A table that somebody holds for longer, or that cannot be written, is not asked again for a while.
_PATIENCE_S, _LEAVE_ALONE_S = 5.0, 60.0
_LEFT_ALONE: dict[Path, float] = {}
_log = logging.getLogger(__name__)
R = TypeVar("R")


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


def require_unchanged(path: Path, identity: FileIdentity, descriptor: int | None = None) -> None:
    """See that nothing was done to a file since ``identity`` was taken, and that its name still leads to it.

    Args:
        descriptor: Where it is open, too.

    Raises:
        ChangedInput: Something was.
    """
    try:
        same = all(file_identity(one) == identity for one in (path, descriptor) if one is not None)
    except OSError:
        same = False
    if not same:
        raise ChangedInput(
            str(path),
            found="it was changed or replaced while it was merged",
            expected="the same file from the first byte to the last",
            remedy="find out who writes there; then run again",
        )


def sha256_file(path: Path) -> str:
    """Return the sha256 of a plain file, 64 hex digits.

    Raises:
        InvalidInput: The path names a pipe, a device or a directory.
        OSError: The file cannot be read.
    """
    if not path.is_file():  # opening a pipe would wait for a writer
        plain_file(path)
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256", _bufsize=_CHUNK).hexdigest()


class HashMemo:
    """A small SQLite table from file identity to sha256. Safe for several processes; losing it costs only time.

    Args:
        database: Where the table lives; created on first use.
        about_to_read: Told of a file before it is read, which may take minutes; what it raises is let through.
    """

    def __init__(self, database: Path, about_to_read: Callable[[Path], None] = lambda path: None) -> None:
        self._database, self._about_to_read = database, about_to_read

    def sha256(self, path: Path, *, trust: bool = True) -> str:
        """sha256 of ``path``; from memory when the file is the one that was hashed before and ``trust`` allows it."""
        identity = file_identity(path)
        if trust and (known := self._recall(identity)):
            return known
        self._about_to_read(path)
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

    def forget(self, files: Iterable[Path]) -> None:
        """Files that are about to be deleted: without it the table would grow for ever."""
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

        self._asked(delete)

    def _recall(self, identity: FileIdentity) -> str | None:
        which = " AND ".join(f"{column}=?" for column in _COLUMNS)
        row = self._asked(
            lambda connection: connection.execute(
                f"SELECT sha256 FROM hashes WHERE {which}", _stored(identity)
            ).fetchone()
        )
        return _vouched(identity, row[0]) or None if row is not None else None

    def _remember(self, identity: FileIdentity, sha256: str) -> None:
        def insert(connection: sqlite3.Connection) -> None:
            with connection:
                connection.execute(
                    "INSERT OR REPLACE INTO hashes VALUES (?, ?, ?, ?, ?, ?)",
                    (*_stored(identity), _noted(identity, sha256)),
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
        # What a power cut takes costs time and what it mangles is told (_vouched), so no file waits for the disk.
        connection.execute("PRAGMA synchronous=OFF")
        columns = ", ".join(f"{column} INTEGER" for column in _COLUMNS)
        connection.execute(f"CREATE TABLE IF NOT EXISTS hashes ({columns}, sha256 TEXT, PRIMARY KEY (device, inode))")
        return connection


def _noted(identity: FileIdentity, sha256: str) -> str:
    """The hash as it stands in the table, with a check over it and the file it is of: an altered one is none."""
    return f"{sha256} {hashlib.sha256(f'{tuple(identity)} {sha256}'.encode()).hexdigest()[:16]}"


def _vouched(identity: FileIdentity, noted: object) -> str:
    """The hash of what :func:`_noted` made; empty for anything else."""
    sha256 = str(noted)[:64]
    return sha256 if noted == _noted(identity, sha256) else ""


def _wait_for_tick(identity: FileIdentity) -> None:
    """Wait until whatever is done to the file from now on gives it another time; 20 ms at most."""
    age = time.time_ns() - identity.ctime_ns
    if 0 <= age < _TICK_NS:
        time.sleep((_TICK_NS - age) / 1e9)


def _stored(identity: FileIdentity) -> tuple[int, ...]:
    # SQLite integers are signed; inode numbers of some file systems use all 64 bits.
    return tuple(number - (1 << 64) if number >= 1 << 63 else number for number in identity)

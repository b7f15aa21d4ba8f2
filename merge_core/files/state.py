"""Read and write state files and SQLite databases that may be damaged.

Damage in mergegate's home directory and in the store never stops a run. A reader of state gets a value, or learns that
the file is missing or damaged. A damaged cache is deleted and built again. A damaged record that a later verdict
depends on is *set aside*, that is, renamed to ``<name>.damaged-<n>``, so that an operator can inspect it::

    match read_state(path, Manifest.model_validate_json):
        case Damaged() as damage: ...        # garbage, a directory, a link loop, not readable
        case None: ...                       # the file does not exist
        case manifest: ...

Errors of the machine rather than of the file (no descriptors left, no memory) are raised. So is the error of a
directory that is not writable, because nothing can be rebuilt there.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import shutil
import sqlite3
import stat
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import get_ident
from typing import TypeVar

ASIDE = ".damaged-"
# A name with the ID of the writing process and perhaps of its thread, a name from ``tempfile``, or a key.
_TEMPORARY = re.compile(r"(.+\.\d+(-\d+)?|(runner|probe)-.+|[0-9a-f]{32}(\..+)?)\.partial")
# Size limit of a state file. A larger file is damaged.
MOST_BYTES = 1 << 30

# Errors that a parser raises for invalid content.
_PARSE_ERRORS = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError)
# Errors of open() that concern the file itself. All others (EMFILE, ENOMEM) concern the machine.
_FILE_ERRORS = {
    errno.ELOOP: "a link instead of a file",
    errno.EISDIR: "a directory instead of a file",
    errno.ENXIO: "not a file",
    errno.ENODEV: "not a file",
    errno.EACCES: "not readable by this user",
    errno.EPERM: "not readable by this user",
    errno.EIO: "not readable because of a disk error",
    errno.ENAMETOOLONG: "not readable because its name is too long",
}

_log = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True)
class Damaged:
    """Path of damaged state, and the reason why it cannot be read."""

    path: Path
    reason: str

    def __str__(self) -> str:
        return f"{self.path} cannot be read: {self.reason}"


def read_state(path: Path, parse: Callable[[bytes], T], *, most: int = MOST_BYTES) -> T | Damaged | None:
    """Return the parsed content of the file at ``path``, :class:`Damaged`, or None if the file does not exist.

    Args:
        path: Regular file. A link, a pipe or a device counts as damaged.
        parse: Parser of the content. If it raises ValueError or a similar exception, the file counts as damaged.
        most: Maximum size in bytes. A larger file counts as damaged. Default: 1 GiB.

    Raises:
        OSError: The machine cannot read files at the moment, for example because it has no descriptors left.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        if error.errno in _FILE_ERRORS:
            return Damaged(path, _FILE_ERRORS[error.errno])
        raise
    try:
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                return Damaged(path, f"a {_kind(status.st_mode)} instead of a file")
            if status.st_size > most:
                return Damaged(path, f"{status.st_size} bytes instead of at most {most}")
            content = file.read()
        return parse(content)
    except OSError as error:  # Reading failed: a failing disk, or a directory on systems that can open one.
        if error.errno in _FILE_ERRORS:
            return Damaged(path, _FILE_ERRORS[error.errno])
        raise
    except _PARSE_ERRORS as error:
        message = " ".join(str(error).split())
        return Damaged(path, message[:200] or type(error).__name__)
    finally:
        os.close(descriptor)


def remove_damaged(path: Path, reason: str) -> None:
    """Delete the file or directory at ``path``, which can be built again, and log ``reason`` if it existed."""
    if os.path.lexists(path):
        remove_any(path)
        _log.warning("%s: %s; removed", path, reason)


def is_misplaced(path: Path, *, through_links: bool = False) -> bool:
    """Return whether something other than a regular file is at ``path``.

    With ``through_links``, a link to a regular file does not count. If another process removes the path at the same
    time, the result is false.
    """
    try:
        status = path.stat() if through_links else path.lstat()
    except OSError:  # The path does not exist, or is a broken link.
        return path.is_symlink()
    return not stat.S_ISREG(status.st_mode)


def is_set_aside(path: Path) -> bool:
    """Return whether ``path`` has a name that :func:`set_aside_damaged` gives, ``<name>.damaged-<n>``."""
    return re.search(rf"{re.escape(ASIDE)}[1-9][0-9]{{0,8}}$", path.name) is not None


def is_temporary(path: Path) -> bool:
    """Return whether ``path`` has a name that mergegate gives to files and directories while it writes them."""
    return _TEMPORARY.fullmatch(path.name) is not None


def set_aside_damaged(path: Path, reason: str) -> None:
    """Rename the file, link or directory at ``path`` to ``<name>.damaged-<n>`` and log ``reason``, if it exists."""
    if not os.path.lexists(path):
        return
    number = 1
    while os.path.lexists(aside := path.with_name(f"{path.name}{ASIDE}{number}")):
        number += 1
    with suppress(FileNotFoundError, NotADirectoryError):  # Another process may have moved it.
        path.rename(aside)
        _log.warning("%s: %s; set aside as %s", path, reason, aside.name)


def user_cache() -> Path:
    """Return the directory for what all projects of this user share and can create again, which may not exist yet.

    Raises:
        RuntimeError: The user has no home directory.
    """
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mergegate"


def state_directory(path: Path, *, private: bool = False) -> Path:
    """Create the directory ``path`` and its parents, and set aside anything at ``path`` that is not a directory.

    Only mergegate uses the name of this directory, so a file or a broken link at ``path`` is damage. With ``private``,
    only the owner may use the directory, and its group if it has the setgid bit, like the shared directory of a team.
    An existing directory of this user is changed accordingly.
    """
    mode = 0o700 if private else 0o777
    if not path.is_dir():
        for missing in reversed([parent for parent in path.parents if not parent.exists()]):
            missing.mkdir(mode=mode, exist_ok=True)
        # Try before setting anything aside, because another process may be creating the same directory.
        try:
            path.mkdir(mode=mode, exist_ok=True)
        except FileExistsError:
            set_aside_damaged(path, "not a directory")
            path.mkdir(mode=mode, exist_ok=True)
    if private:
        status = path.stat()
        mode = stat.S_IMODE(status.st_mode)
        private_mode = mode & (0o7770 if mode & stat.S_ISGID else 0o7700)
        if status.st_uid == os.geteuid() and private_mode != mode:
            path.chmod(private_mode)
    return path


def write_state(path: Path, content: bytes) -> None:
    """Write ``content`` to ``path`` atomically and flush it to the disk. A directory at ``path`` is set aside."""
    partial = path.with_name(f"{path.name}.{os.getpid()}-{get_ident()}.partial")
    try:
        with partial.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        try:
            partial.rename(path)  # Replaces a file, a link or a pipe.
        except IsADirectoryError:
            set_aside_damaged(path, "a directory instead of a file")
            partial.rename(path)
    except BaseException:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise
    fsync(path.parent)


def fsync(path: Path) -> None:
    """Flush a file's bytes, or a directory's entries, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync_directories(root: Path) -> None:
    """Flush the entries of ``root`` and of every directory below it, so that new file names survive a crash."""
    for directory in (root, *(path for path in root.rglob("*") if path.is_dir())):
        fsync(directory)


def remove_any(path: Path) -> None:
    """Delete the file, link or directory tree at ``path``, even if its permissions forbid reading it."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, onerror=_retry_with_permission)
    else:
        path.unlink(missing_ok=True)


def regular_files(directory: Path) -> tuple[set[str], set[str]]:
    """Return the relative names of all files below ``directory``, and those of all links, pipes and devices."""
    files: set[str] = set()
    special: set[str] = set()
    for parent, directories, names in os.walk(directory):
        for name in (*names, *directories):
            path = Path(parent, name)
            mode = path.lstat().st_mode
            if not stat.S_ISDIR(mode):
                (files if stat.S_ISREG(mode) else special).add(path.relative_to(directory).as_posix())
    return files, special


def _retry_with_permission(function: Callable[[str], object], path: str, failure: object) -> None:
    Path(path).parent.chmod(0o700)
    if not Path(path).is_symlink():
        Path(path).chmod(0o700)
    if function in (os.unlink, os.rmdir):
        function(path)
    else:
        shutil.rmtree(path)


def _kind(mode: int) -> str:
    kinds = ((stat.S_ISDIR, "directory"), (stat.S_ISFIFO, "pipe"), (stat.S_ISSOCK, "socket"))
    return next((name for is_a, name in kinds if is_a(mode)), "device")


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
    for suffix in _FILE_SUFFIXES:
        remove_damaged(database.with_name(database.name + suffix), reason)


def misplaced_file(database: Path) -> Path | None:
    """Return the first path of the database and its journals where something other than a regular file is, or None.

    Callers check this before they open the database, because SQLite would wait forever to open a named pipe.
    """
    paths = (database.with_name(database.name + suffix) for suffix in _FILE_SUFFIXES)
    return next((path for path in paths if is_misplaced(path, through_links=True)), None)

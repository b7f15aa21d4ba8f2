"""Lock files and directories with flock, exclusively or shared. The kernel releases a lock when its process ends.

The process that holds a lock may remove the lock file at the end. A process that waited for the lock then holds a file
that no other process can open. A lock therefore counts only while its file is still the one at the path::

    with hold_lock(root / "locks" / name, remove=True):
        ...                                            # only one process at a time

Some network file systems do not support locks. By default, this raises DiskUnavailable. With
``required=False``, mergegate logs a warning and proceeds without a lock.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from mergegate.merge_core.errors import DiskUnavailable
from mergegate.merge_core.files.state import is_misplaced, remove_damaged

# Errors of open() for a directory, a link or a socket at the path of a lock file.
_NOT_A_FILE = (errno.EISDIR, errno.ELOOP, errno.ENXIO, errno.ENODEV)
_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)
_log = logging.getLogger(__name__)


@contextmanager
def hold_lock(
    path: Path, *, remove: bool = False, required: bool = True, on_wait: Callable[[], None] = lambda: None
) -> Iterator[None]:
    """Wait for an exclusive lock on a directory or a file, and hold it for the duration of the block.

    Args:
        path: Directory or file. A missing file is created, but its parent directory must exist.
        remove: Whether to remove the file at the end. ``path`` must then be a file.
        required: Whether to raise an error if the file system does not support locks.
        on_wait: Called once if another process holds the lock.
    """
    flags = os.O_RDONLY if path.is_dir() and not remove else os.O_RDWR | os.O_CREAT
    descriptor = try_open_locked(path, flags, required=required)
    if descriptor is None:
        on_wait()
        descriptor = _open_locked(path, flags, fcntl.LOCK_EX, required)
    try:
        yield
    finally:
        try:
            if remove:
                path.unlink(missing_ok=True)
        finally:
            os.close(descriptor)


def try_open_locked(path: Path, flags: int, *, required: bool = True) -> int | None:
    """Open ``path``, lock it exclusively and return the descriptor. Return None if another process holds the lock.

    ``flags`` are those of ``os.open``.
    """
    try:
        return _open_locked(path, flags, fcntl.LOCK_EX | fcntl.LOCK_NB, required)
    except BlockingIOError:
        return None


def unlock_file(descriptor: int) -> None:
    """Release the lock on an open file without closing it."""
    with suppress(OSError):  # A file system without locks has no lock to release.
        fcntl.flock(descriptor, fcntl.LOCK_UN)


def lock_file(descriptor: int, path: Path, *, shared: bool = False, wait: bool = True, required: bool = True) -> bool:
    """Lock an open file, or convert its lock. Return whether it is locked and still the file at ``path``.

    Args:
        descriptor: Descriptor of the open file.
        path: Path that the file was opened with.
        shared: Whether other processes may share the lock.
        wait: Whether to wait until the lock is free. Without waiting, return False if it is not.
        required: Whether to raise an error if the file system does not support locks.
    """
    kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    try:
        _flock(descriptor, path, kind if wait else kind | fcntl.LOCK_NB, required)
    except BlockingIOError:
        return False
    return _is_linked(descriptor, path)


def _open_locked(path: Path, flags: int, operation: int, required: bool) -> int:
    while True:
        descriptor, is_locked = _open(path, flags), False
        try:
            _flock(descriptor, path, operation, required)
            is_locked = _is_linked(descriptor, path)
        finally:
            if not is_locked:
                os.close(descriptor)
        if is_locked:
            return descriptor


def _open(path: Path, flags: int) -> int:
    """Open ``path``. With ``O_CREAT``, first delete anything at the path that is not a file."""
    if not flags & os.O_CREAT:
        return os.open(path, flags | os.O_CLOEXEC)
    all_flags = flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        descriptor = os.open(path, all_flags, 0o644)
    except PermissionError:
        if not os.path.lexists(path):
            raise  # The directory is read-only, so there is nothing to delete.
        if path.parent.stat().st_uid != os.geteuid() or path.lstat().st_uid != os.geteuid():
            raise  # The file belongs to another user, who may hold the lock.
    except OSError as error:
        if error.errno not in _NOT_A_FILE:
            raise
    else:
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            return descriptor
        os.close(descriptor)
    if is_misplaced(path) or not os.access(path, os.R_OK | os.W_OK):  # Another process may have repaired it already.
        remove_damaged(path, "not a file that can be locked")
    return os.open(path, all_flags, 0o644)


def _flock(descriptor: int, path: Path, operation: int, required: bool) -> None:
    try:
        fcntl.flock(descriptor, operation)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        if required:
            raise DiskUnavailable(
                str(path),
                found="this file system does not support locks (flock)",
                expected="a file system with locks, so that only one process writes at a time",
                remedy="use a directory on a local disk, or mount this one with locks",
            ) from None
        _log.warning("%s: this file system does not support locks; run only one process here at a time", path.parent)


def _is_linked(descriptor: int, path: Path) -> bool:
    """Return whether the open file is still the one at ``path``, and was not removed or replaced."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False

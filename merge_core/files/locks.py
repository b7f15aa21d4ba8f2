"""Lock files and directories with flock, exclusively or shared. The kernel releases a lock when its process ends.

A holder may remove the lock file when it is done, so that nothing is left behind. A process that waited for the lock
then holds a file that other processes can no longer open. A lock therefore counts only while its file is still the one
at that path::

    with locked(root / "locks" / name, remove=True):
        ...                                            # only one process at a time

Some network file systems do not support locks. With ``required=False``, mergegate logs a warning and proceeds without
a lock; by default it raises an error.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from mergegate.merge_core.files.state import is_misplaced, set_aside_damaged

# Errors of open() for a directory, a link or a socket at the path of a lock file.
_NOT_A_FILE = (errno.EISDIR, errno.ELOOP, errno.ENXIO, errno.ENODEV)
_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)
_log = logging.getLogger(__name__)


@contextmanager
def hold_lock(
    path: Path, *, remove: bool = False, required: bool = True, on_wait: Callable[[], None] = lambda: None
) -> Iterator[None]:
    """Hold an exclusive lock on a directory or a file for the duration of the block; wait until it is free.

    Args:
        path: Directory or file, whose parent directory exists. A missing file is created.
        remove: Whether to remove the file at the end. ``path`` is then always a file.
        required: Whether to raise an error if the file system does not support locks. See the module docstring.
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
    """Open and lock ``path`` exclusively and return the descriptor, or None while another process holds the lock."""
    try:
        return _open_locked(path, flags, fcntl.LOCK_EX | fcntl.LOCK_NB, required)
    except BlockingIOError:
        return None


def lock_file(descriptor: int, path: Path, *, shared: bool = False, wait: bool = True, required: bool = True) -> bool:
    """Lock an open file and return whether it is locked and still the file at ``path``.

    Args:
        descriptor: Descriptor of the open file. A lock that it already holds is converted.
        path: Path that the file was opened with.
        shared: Whether other processes may share the lock.
        wait: Whether to wait until the lock is free. If false, return False without waiting.
        required: Whether to raise an error if the file system does not support locks. See the module docstring.
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
    """Open ``path``; with ``O_CREAT``, set aside anything at the path that is not a file."""
    if not flags & os.O_CREAT:
        return os.open(path, flags | os.O_CLOEXEC)
    all_flags = flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        descriptor = os.open(path, all_flags, 0o644)
    except PermissionError:
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
        set_aside_damaged(path, "not a file that can be locked")
    return os.open(path, all_flags, 0o644)


def _flock(descriptor: int, path: Path, operation: int, required: bool) -> None:
    try:
        fcntl.flock(descriptor, operation)
    except OSError as error:
        if required or error.errno not in _NO_LOCKS:
            raise
        _log.warning("%s: this file system does not support locks; run only one process here at a time", path.parent)


def _is_linked(descriptor: int, path: Path) -> bool:
    """Return whether the open file is still the one at ``path``, and was not removed or replaced."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False

"""Locks on files and directories (flock): one holder at a time, or several that share; gone with their process.

A holder may remove the file on its way out, so that nothing is left behind. Whoever waited then holds a lock on a file
that nobody else will find: a lock counts only while its file is still the one at that path::

    with locked(root / "locks" / name, remove=True):
        ...                                            # nobody else is here

Some network file systems have no locks. ``required=False`` goes on without, as if nobody else were there, and logs a
warning; otherwise it is an error.
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

from mergegate.merge_core.files.state import is_misplaced, set_aside_damaged

# What opening says where a directory, a link or a socket stands in place of ours.
_NO_FILE = (errno.EISDIR, errno.ELOOP, errno.ENXIO, errno.ENODEV)
_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)
_log = logging.getLogger(__name__)


@contextmanager
def locked(
    path: Path, *, remove: bool = False, required: bool = True, on_wait: Callable[[], None] = lambda: None
) -> Iterator[None]:
    """Hold ``path`` alone, a directory or a file, which is made if it is absent; waits until it is free.

    Args:
        path: In a directory that exists.
        remove: Remove the file at the end; so it is a file, never a directory.
        required: See the module docstring.
        on_wait: Called once if somebody else holds it.
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
    """``path``, opened with ``flags`` and locked for this descriptor alone; None while somebody else holds it."""
    try:
        return _open_locked(path, flags, fcntl.LOCK_EX | fcntl.LOCK_NB, required)
    except BlockingIOError:
        return None


def lock_file(descriptor: int, path: Path, *, shared: bool = False, wait: bool = True, required: bool = True) -> bool:
    """Lock a file that is open; whether it is locked now, and still the file at ``path``.

    Args:
        descriptor: The open file. A lock that it holds already is changed into this one.
        path: Where it was opened.
        shared: Others may hold it as well, if they share it too.
        wait: Until it is free; otherwise False is returned at once.
        required: See the module docstring.
    """
    kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    try:
        _flock(descriptor, path, kind if wait else kind | fcntl.LOCK_NB, required)
    except BlockingIOError:
        return False
    return _is_linked(descriptor, path)


def unlock_file(descriptor: int) -> None:
    """Let others have the file, which stays open."""
    with suppress(OSError):  # Where there are no locks, none is held.
        fcntl.flock(descriptor, fcntl.LOCK_UN)


def _open_locked(path: Path, flags: int, operation: int, required: bool) -> int:
    while True:
        descriptor, held = _opened(path, flags), False
        try:
            _flock(descriptor, path, operation, required)
            held = _is_linked(descriptor, path)
        finally:
            if not held:
                os.close(descriptor)
        if held:
            return descriptor


def _opened(path: Path, flags: int) -> int:
    """Whoever asks for a file to be made has named it: what is there instead is damage, and set aside."""
    if not flags & os.O_CREAT:
        return os.open(path, flags | os.O_CLOEXEC)
    ours = flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        descriptor = os.open(path, ours, 0o644)
    except PermissionError:
        if path.parent.stat().st_uid != os.geteuid() or path.lstat().st_uid != os.geteuid():
            raise  # Somebody else's, who may hold it.
    except OSError as error:
        if error.errno not in _NO_FILE:
            raise
    else:
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            return descriptor
        os.close(descriptor)
    if is_misplaced(path) or not os.access(path, os.R_OK | os.W_OK):  # nobody was quicker
        set_aside_damaged(path, "no file to be locked")
    return os.open(path, ours, 0o644)


def _flock(descriptor: int, path: Path, operation: int, required: bool) -> None:
    try:
        fcntl.flock(descriptor, operation)
    except OSError as error:
        if required or error.errno not in _NO_LOCKS:
            raise
        _log.warning("%s: this file system has no locks: only one process may work here at a time", path.parent)


def _is_linked(descriptor: int, path: Path) -> bool:
    """Whether the open file is the one that ``path`` names now, not one that was removed or replaced meanwhile."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False

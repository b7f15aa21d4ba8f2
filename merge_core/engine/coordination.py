"""Several merges into one directory: who takes part, who is alone, and one at a time where it must be.

Everybody who works on a directory holds a shared lock on one file in it. Who can have it for himself alone knows that
nobody else is there: he may prepare the directory, and at the end he may tidy up. Locks end with their process.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from merge_core.engine.writer import PARTIAL, refusing_disk_errors
from merge_core.store import is_linked

NAME = f"merge{PARTIAL}"
_FINISHING = f"finishing{PARTIAL}"
_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)
_log = logging.getLogger(__name__)


@contextmanager
def participating(
    out: Path, *, check: Callable[[], None], prepare: Callable[[], None], tidy: Callable[[], None]
) -> Iterator[None]:
    """Take part in the merge into ``out``; returns when all participants have finished, or raises on its own.

    Args:
        out: Output directory, exists.
        check: Raises unless ``out`` is empty or holds an unfinished merge. Called before anything is made.
        prepare: Called then, if nobody else is there.
        tidy: Called after, by the last one. Not called after a failure: what is there can be resumed.
    """
    fd = _join(out, check, prepare)
    try:
        yield
        # The others need what tidy removes: all wait here until the last one has what it needs.
        _lock(fd, fcntl.LOCK_UN)
        _lock(fd, fcntl.LOCK_EX)
        if is_linked(fd, out / NAME):
            tidy()
            (out / _FINISHING).unlink(missing_ok=True)
            (out / NAME).unlink()
    finally:
        os.close(fd)


@contextmanager
def one_at_a_time(out: Path) -> Iterator[None]:
    """Among the participants in ``out``, one at a time."""
    path = out / _FINISHING
    with refusing_disk_errors(path):
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        _lock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def try_lock(fd: int) -> bool:
    """Whether the file is now locked for this open file alone; until it is closed."""
    try:
        _lock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _join(out: Path, check: Callable[[], None], prepare: Callable[[], None]) -> int:
    path = out / NAME
    while True:
        there = path.exists()
        check()
        with refusing_disk_errors(path):
            try:
                # Not made anew when it is gone by now: the others have finished, and their result must stay.
                fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | (0 if there else os.O_CREAT), 0o644)
            except FileNotFoundError:
                continue
        try:
            if try_lock(fd) and is_linked(fd, path):
                prepare()
            _lock(fd, fcntl.LOCK_SH)
            if is_linked(fd, path):
                return fd
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)


def _lock(fd: int, operation: int) -> None:
    try:
        fcntl.flock(fd, operation)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        _log.warning("this file system has no locks: only one process may merge into a directory at a time")

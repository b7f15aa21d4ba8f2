"""Several merges into one directory: who takes part, who is alone, and one at a time where it must be.

Every participant holds a shared lock on one file of the directory. Whoever gets it alone knows that nobody else is
there, and may prepare the directory, or tidy up at the end. Locks end with their process.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from mergegate.merge_core.engine.writer import PARTIAL, shard_disk_errors_refused
from mergegate.merge_core.files import MARK_CONTENT, lock_file, locked, unlock_file

NAME = f"merge{PARTIAL}"
_FINISHING = f"finishing{PARTIAL}"


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
        unlock_file(fd)
        if lock_file(fd, out / NAME, required=False):
            tidy()
            (out / _FINISHING).unlink(missing_ok=True)
            (out / NAME).unlink()
    finally:
        os.close(fd)


@contextmanager
def one_at_a_time(out: Path) -> Iterator[None]:
    """Among the participants in ``out``, one at a time."""
    path = out / _FINISHING
    with ExitStack() as held:
        with shard_disk_errors_refused(path):
            held.enter_context(locked(path, required=False))
        yield


def _join(out: Path, check: Callable[[], None], prepare: Callable[[], None]) -> int:
    path = out / NAME
    while True:
        there = path.exists()
        check()
        with shard_disk_errors_refused(path):
            try:
                # Not created when it is gone by now: the others have finished, and their result must stay.
                fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | (0 if there else os.O_CREAT), 0o644)
            except FileNotFoundError:
                continue
        try:
            # Before anything else is in the directory: the mark says that all that follows is ours. Participants write
            # the same bytes to the same place.
            os.write(fd, MARK_CONTENT)
            if lock_file(fd, path, wait=False, required=False):
                prepare()
            if lock_file(fd, path, shared=True, required=False):
                return fd
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)

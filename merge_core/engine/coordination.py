"""Coordinate processes that merge into one directory: the first prepares the directory, and the last cleans up.

Every participant holds a shared lock on one file in the directory. A participant that gets an exclusive lock knows that
it is the only one. A lock ends with its process.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from mergegate.merge_core.engine.writer import PARTIAL, refuse_disk_errors
from mergegate.merge_core.files import MARK_CONTENT, lock_file, unlock_file

NAME = f"merge{PARTIAL}"
FINISHING = f"finishing{PARTIAL}"


@contextmanager
def join_merge(
    out: Path, *, check: Callable[[], None], prepare: Callable[[], None], tidy: Callable[[], None]
) -> Iterator[None]:
    """Take part in the merge into ``out`` while the ``with`` block runs, then wait for the other participants.

    If the block raises, do not wait.

    Args:
        out: Output directory. It must exist.
        check: Function called before any file is created. It raises unless ``out`` is empty or has an unfinished merge.
        prepare: Function called after ``check`` if there is no other participant.
        tidy: Function that the last participant calls at the end. It is not called after a failure, because the merge
            can be resumed from the files that it would remove.
    """
    path = out / NAME
    while True:
        exists = path.exists()
        check()
        with refuse_disk_errors(path):
            try:
                # If the file existed and is gone now, the others have finished. Do not recreate it: their result stays.
                fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | (0 if exists else os.O_CREAT), 0o644)
            except FileNotFoundError:
                continue
        try:
            # Write the mark before any other file, because it shows that later files belong to mergegate. It does not
            # matter that all participants write it: they write the same bytes at the same offset.
            with refuse_disk_errors(path):
                os.write(fd, MARK_CONTENT)
            if lock_file(fd, path, wait=False, required=False):
                prepare()
            if lock_file(fd, path, shared=True, required=False):
                break
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)

    try:
        yield
        # Other participants still need the files that tidy removes, so all wait until the last one is done.
        unlock_file(fd)
        if lock_file(fd, path, required=False):
            tidy()
            (out / FINISHING).unlink(missing_ok=True)
            path.unlink()
    finally:
        os.close(fd)

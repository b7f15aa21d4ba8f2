"""The directory that a command makes: whole, or not there; and by one command at a time."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from merge_core.errors import InvalidInput, Refused
from merge_core.store import try_open_locked


@contextmanager
def new_directory(
    out: Path, *, by: str = "command that makes it", remedy: str = "wait for it, or name another directory"
) -> Iterator[Path]:
    """The place in which what will be ``out`` is made: beside it, and renamed in the end. What a run that was killed
    has left there is still there; where this ends in an error, it stays for the next one.

    Raises:
        InvalidInput: for an ``out`` that exists.
        Refused: when another process makes it just now.
    """
    lock, place = out.with_name(f".{out.name}.lock"), out.with_name(f"{out.name}.partial")
    out.parent.mkdir(parents=True, exist_ok=True)
    descriptor = try_open_locked(lock, os.O_RDWR | os.O_CREAT, required=False)
    if descriptor is None:
        raise Refused(str(out), found=f"another {by} is running", expected="one at a time", remedy=remedy)
    try:
        if os.path.lexists(out):
            raise InvalidInput(
                str(out), found="it exists", expected="a new directory", remedy="name another, or remove it"
            )
        yield place
        place.rename(out)
    finally:
        lock.unlink(missing_ok=True)
        os.close(descriptor)


@contextmanager
def fresh_directory(out: Path) -> Iterator[Path]:
    """As ``new_directory``, for what cannot be resumed: nothing lies in the place, and nothing is left there."""
    with new_directory(out) as place:
        shutil.rmtree(place, ignore_errors=True)
        try:
            yield place
        except BaseException:
            shutil.rmtree(place, ignore_errors=True)
            raise

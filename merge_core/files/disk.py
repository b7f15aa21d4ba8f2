"""What a disk says no to, in words: one message for every place that writes, with what to do about it.

A disk that is full or read-only is nobody's input and no judgement. It ends a run like a refusal, because a person has
to do something; but no remedy of the recipe is tried for it, and running again goes on where it stopped.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mergegate.merge_core.errors import DiskRefused

_FULL = ("the disk is full", "room for what is to be written", "free some space, or choose a place on another disk")
_RIGHTS = ("the right to read and write here", "have the permissions changed, or choose another place")
_LIMIT = ("fewer open files, or a higher limit", "raise the limit (ulimit -n)")
_SAID: dict[int, tuple[str, str, str]] = {
    errno.ENOSPC: _FULL,
    errno.EDQUOT: ("the disk is full: this user's share of it is used up", *_FULL[1:]),
    errno.EFBIG: ("the file is larger than is allowed here", _FULL[1], "raise the limit (ulimit -f), or choose a disk"),
    errno.EROFS: ("the disk is read-only", "a disk that can be written", "mount it for writing, or choose another"),
    errno.EACCES: ("", *_RIGHTS),
    errno.EPERM: ("", *_RIGHTS),
    errno.EIO: ("", "a disk that works", "look at the disk (dmesg), then run again"),
    errno.ESTALE: ("", "a network disk that answers", "mount it again, then run again"),
    errno.EMFILE: ("", *_LIMIT),
    errno.ENFILE: ("", *_LIMIT),
    errno.ENAMETOOLONG: ("", "a path that the file system can hold", "choose shorter names"),
}
# What is said of a disk, in distinction from the network: connections fail with an OSError, too.
_OF_DISKS = frozenset(_SAID)


def is_disk_error(error: BaseException) -> bool:
    """Whether ``error`` is one that a disk, its rights or its limits cause."""
    return isinstance(error, OSError) and error.errno in _OF_DISKS


@contextmanager
def disk_errors_refused(where: str | Path = "") -> Iterator[None]:
    """Turn what a disk says no to into a refusal; other errors of the system (of the network) stay what they are."""
    try:
        yield
    except OSError as error:
        if not is_disk_error(error):
            raise
        raise disk_refusal(error, where) from None


def disk_refusal(error: OSError, where: str | Path = "") -> DiskRefused:
    """``error`` as a refusal that says where, what and what to do.

    Args:
        error: Of the operating system.
        where: What was to be read or written, if the error does not name it.
    """
    named = error.filename if isinstance(error.filename, (str, bytes)) else None
    place = os.fsdecode(named) if named else str(where)
    reason = error.strerror or " ".join(str(error).split()) or type(error).__name__
    said, expected, remedy = _SAID.get(error.errno or 0, ("", "", "see what stands there, then run again"))
    return DiskRefused(
        place or "the operating system",
        found=said or f"cannot be read or written: {reason}",
        expected=expected,
        remedy=remedy,
    )

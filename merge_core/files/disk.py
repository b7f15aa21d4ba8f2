"""Turn disk errors into refusals that explain the problem and how to fix it.

A full or read-only disk is neither invalid input nor a verdict about the merge. It ends a run like a refusal, because
an operator has to act. mergegate then tries no other recipe, and the next run resumes the work.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mergegate.merge_core.errors import DiskUnavailable

_FULL = ("the disk is full", "enough free space", "free some space, or use another disk")
_RIGHTS = ("permission to read and write", "change the permissions, or use another directory")
_LIMIT = ("fewer open files, or a higher limit", "raise the limit (ulimit -n)")
# For each error number: what is wrong, what is expected, and the remedy.
_EXPLANATIONS: dict[int, tuple[str, str, str]] = {
    errno.ENOSPC: _FULL,
    errno.EDQUOT: ("the disk quota of this user is exhausted", *_FULL[1:]),
    errno.EFBIG: (
        "the file exceeds the size limit",
        "a higher limit",
        "raise the limit (ulimit -f), or use another disk",
    ),
    errno.EROFS: ("the disk is read-only", "a writable disk", "mount it for writing, or use another disk"),
    errno.EACCES: ("", *_RIGHTS),
    errno.EPERM: ("", *_RIGHTS),
    errno.EIO: ("", "a working disk", "check the disk (dmesg), then run again"),
    errno.ESTALE: ("", "a network disk that responds", "mount it again, then run again"),
    errno.EMFILE: ("", *_LIMIT),
    errno.ENFILE: ("", *_LIMIT),
    errno.ENAMETOOLONG: ("", "a path that the file system supports", "use shorter names"),
}
# Failed network connections raise OSError too, so the error number decides.
_DISK_ERRORS = frozenset(_EXPLANATIONS)


def is_disk_error(error: BaseException) -> bool:
    """Return whether ``error`` is about a disk, file permissions, or limits of the system, not about a network."""
    return isinstance(error, OSError) and error.errno in _DISK_ERRORS


@contextmanager
def disk_errors_refused(location: str | Path = "") -> Iterator[None]:
    """Raise DiskUnavailable for a disk error inside the block. Other system errors, such as network errors, pass."""
    try:
        yield
    except OSError as error:
        if not is_disk_error(error):
            raise
        raise disk_refusal(error, location) from None


def disk_refusal(error: OSError, location: str | Path = "") -> DiskUnavailable:
    """Return a refusal that explains a disk error. It names ``location`` if the error does not contain a path."""
    filename = error.filename if isinstance(error.filename, (str, bytes)) else None
    named_file = os.fsdecode(filename) if filename else str(location)
    reason = error.strerror or " ".join(str(error).split()) or type(error).__name__
    problem, expected, remedy = _EXPLANATIONS.get(error.errno or 0, ("", "", "check the file, then run again"))
    return DiskUnavailable(
        named_file or "the operating system",
        found=problem or f"cannot be read or written: {reason}",
        expected=expected,
        remedy=remedy,
    )

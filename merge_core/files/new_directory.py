"""Create output directories outside the store atomically, and turn disk errors into refusals.

mergegate deletes only directories that it wrote.

mergegate writes to ``<name>.partial/output``, which is renamed to its final name when it is complete. The partial
directory also contains a *mark*, a file that only mergegate writes. A directory that is neither marked nor empty
belongs to the user: mergegate neither deletes it nor writes into it.

A full or read-only disk is neither invalid input nor a verdict about the merge. It ends a run like a refusal, because
an operator has to act. mergegate then tries no other recipe, and the next run resumes the work.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from mergegate.merge_core.errors import DiskUnavailable, InvalidInput, Refused
from mergegate.merge_core.files.locks import try_open_locked
from mergegate.merge_core.files.state import remove_any

MARK = "mergegate.partial"
OUTPUT = "output"
MARK_CONTENT = b"Unfinished output of mergegate. Run the same command again to finish it, or delete this directory.\n"


def has_mark(file: Path) -> bool:
    """Return whether ``file`` is a mark: a plain file with exactly the text that mergegate writes."""
    try:
        if not file.is_file() or file.is_symlink() or file.stat().st_size != len(MARK_CONTENT):
            return False
        return file.read_bytes() == MARK_CONTENT
    except OSError:
        return False


def remove_contents(directory: Path) -> None:
    """Remove everything in ``directory``, or a file or link at its path. Do nothing if it does not exist."""
    if directory.is_dir() and not directory.is_symlink():
        for path in sorted(directory.iterdir()):
            remove_any(path)
    else:
        remove_any(directory)


@contextmanager
def new_directory(
    out: Path,
    partial: Path | None = None,
    *,
    resume: bool = False,
    by: str = "command that writes it",
    remedy: str = "wait until it ends, or use another directory",
) -> Iterator[Path]:
    """Yield a directory for the content of ``out``, and rename it to ``out`` at the end of the block.

    Args:
        out: Final directory.
        partial: Directory that contains the output until it is complete. Default: ``<out>.partial``.
        resume: Whether to start with the files that a killed run left in the partial directory, and to leave them there
            after an error. By default, the block starts with an empty directory, and an error leaves nothing.
        by: Description of another process that may be writing ``out``, for the error message.
        remedy: Advice for that case, for the error message.

    Raises:
        InvalidInput: ``out`` exists or cannot be the name of a directory, or mergegate did not create the partial
            directory.
        Refused: Another process is writing ``out``.
    """
    _require_absent(out)
    partial = partial or out.with_name(f"{out.name}.partial")
    out.parent.mkdir(parents=True, exist_ok=True)
    descriptor = _claim(partial)
    if descriptor is None:
        raise Refused(str(out), found=f"another {by} is running", expected="one command at a time", remedy=remedy)
    output = partial / OUTPUT
    try:
        try:
            _require_absent(out)  # Another process may have just completed it.
            if not resume:
                for path in sorted(partial.iterdir()):
                    if path.name != MARK:
                        remove_any(path)
            output.mkdir(exist_ok=True)
            yield output
            output.rename(out)
        except BaseException:
            if not resume or not output.is_dir() or not any(output.iterdir()):
                remove_any(partial)
            raise
        with suppress(OSError):  # The output is complete. The next run for it removes what is left.
            remove_any(partial)
    finally:
        os.close(descriptor)


def _require_absent(out: Path) -> None:
    if out.name in ("", "..") or os.path.lexists(out):
        raise InvalidInput(
            str(out), found="it exists", expected="a new directory", remedy="use another name, or remove it"
        )


def finish_directory(partial: Path) -> None:
    """Remove a partial directory that a run left when it was killed just after it had completed its output.

    The caller ensures that no other process uses the directory.
    """
    if os.path.lexists(partial) and _is_ours(partial):
        remove_any(partial)


def _is_ours(partial: Path) -> bool:
    """Return whether a directory is marked or empty, or contains only a mark that was not completely written."""
    if partial.is_symlink() or not partial.is_dir():
        return False
    mark, names = partial / MARK, {path.name for path in partial.iterdir()}
    if not names or has_mark(mark):
        return True
    is_plain = names == {MARK} and mark.is_file() and not mark.is_symlink()
    return is_plain and mark.stat().st_size < len(MARK_CONTENT) and MARK_CONTENT.startswith(mark.read_bytes())


def _claim(partial: Path) -> int | None:
    """Create ``partial`` and its mark if needed, and lock the mark. Return None if another process holds the lock."""
    while True:
        try:
            partial.mkdir()
        except FileExistsError:
            if not _is_ours(partial):
                raise InvalidInput(
                    str(partial),
                    found="it exists, and mergegate did not create it",
                    expected="no such path, because mergegate writes there until the output is complete",
                    remedy="move it away, or use another output directory",
                ) from None
        try:
            descriptor = try_open_locked(partial / MARK, os.O_RDWR | os.O_CREAT, required=False)
        except FileNotFoundError:
            continue  # Another process has just completed it.
        if descriptor is not None and not has_mark(partial / MARK):
            os.truncate(descriptor, 0)
            os.write(descriptor, MARK_CONTENT)
            os.fsync(descriptor)
        return descriptor


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

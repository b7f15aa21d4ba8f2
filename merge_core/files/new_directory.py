"""Create output directories outside the store atomically, and delete only directories that mergegate wrote.

mergegate fills ``<name>.partial`` and renames it to its final name when it is complete. The partial directory carries
a mark, a file that only mergegate writes, from the moment it exists. A directory without the mark belongs to the user:
mergegate neither deletes it nor writes into it.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mergegate.merge_core.errors import InvalidInput, Refused
from mergegate.merge_core.files.locks import try_open_locked
from mergegate.merge_core.files.state import remove_any

MARK = "mergegate.partial"
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
    """Remove everything in a partial directory except its mark. A ``directory`` that does not exist is left alone."""
    if directory.is_dir() and not directory.is_symlink():
        for path in sorted(directory.iterdir()):
            if path.name != MARK:
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
    remedy: str = "wait for it, or name another directory",
) -> Iterator[Path]:
    """Yield the directory in which to write ``out``, and rename it to ``out`` at the end of the block.

    Args:
        out: The final directory.
        partial: The directory to write into, next to ``out``. Default: ``<out>.partial``.
        resume: Whether to keep the files of a killed run in the partial directory, and to keep them after an error.
            By default the block starts with an empty directory and an error leaves nothing.
        by: Description of another process that may be writing ``out``, for the error message.
        remedy: Advice for that case, for the error message.

    Raises:
        InvalidInput: ``out`` exists or is not the name of a directory, or mergegate did not create the partial
            directory.
        Refused: Another process is writing ``out``.
    """
    _require_absent(out)
    partial = partial or out.with_name(f"{out.name}.partial")
    out.parent.mkdir(parents=True, exist_ok=True)
    descriptor = _claim(partial)
    if descriptor is None:
        raise Refused(str(out), found=f"another {by} is running", expected="one at a time", remedy=remedy)
    try:
        try:
            _require_absent(out)  # Another process may have just completed it.
            if not resume:
                remove_contents(partial)
            yield partial
            partial.rename(out)
        except BaseException:
            if not resume or list(partial.iterdir()) == [partial / MARK]:
                remove_any(partial)
            raise
        # Remove the mark last. A run that is killed before this line leaves a complete directory that is still marked.
        (out / MARK).unlink()
    finally:
        os.close(descriptor)


def _require_absent(out: Path) -> None:
    if out.name in ("", "..") or os.path.lexists(out):
        raise InvalidInput(str(out), found="it exists", expected="a new directory", remedy="name another, or remove it")


def finish_directory(out: Path) -> None:
    """Remove the mark from a complete directory, which a run leaves if it is killed just after the rename."""
    if has_mark(out / MARK):
        (out / MARK).unlink()


def _claim(partial: Path) -> int | None:
    """Open and lock the mark of ``partial``, creating both if needed; return None while another process holds it."""
    while True:
        if not os.path.lexists(partial):
            _create(partial)
        if partial.is_symlink() or not has_mark(partial / MARK):
            raise InvalidInput(
                str(partial),
                found="it exists, and mergegate did not create it",
                expected="no such path: mergegate writes there until its output is complete",
                remedy="move it away, or name another output directory",
            )
        try:
            return try_open_locked(partial / MARK, os.O_RDWR, required=False)
        except FileNotFoundError:
            continue  # Another process has just completed it.


def _create(partial: Path) -> None:
    """Create ``partial`` and its mark in one step, unless another process is quicker."""
    temporary = partial.with_name(f".{secrets.token_hex(8)}.partial")
    temporary.mkdir()
    try:
        (temporary / MARK).write_bytes(MARK_CONTENT)
        temporary.rename(partial)
    except OSError:
        remove_any(temporary)
        if not os.path.lexists(partial):
            raise

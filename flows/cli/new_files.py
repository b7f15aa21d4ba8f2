"""Add new files to a user's directory: all of them or none, and never over an existing file."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from mergegate.merge_core.errors import InvalidInput


def require_new(files: Iterable[Path]) -> None:
    """Check that none of these files exists.

    Raises:
        InvalidInput: A file exists. The error names the first one.
    """
    if existing := next((file for file in files if os.path.lexists(file)), None):
        raise InvalidInput(
            str(existing), found="it exists", expected="a new file", remedy="choose another --name or --out"
        )


def write_new_files(texts: Mapping[Path, str]) -> None:
    """Write ``texts``. If that fails midway (Ctrl-C, a full disk, another process wrote a file), remove all of them.

    Raises:
        InvalidInput: A file exists.
    """
    written: list[Path] = []
    try:
        for file, text in texts.items():
            with file.open("x", encoding="utf-8") as stream:
                written.append(file)
                stream.write(text)
    except BaseException as error:
        for file in written:
            file.unlink(missing_ok=True)
        if isinstance(error, FileExistsError):
            require_new(texts)
        raise


@contextmanager
def directory_for_new_files(directory: Path) -> Iterator[None]:
    """Create ``directory`` if necessary, and remove it again if it is still empty at the end."""
    created = [parent for parent in (directory, *directory.parents) if not os.path.lexists(parent)]
    directory.mkdir(parents=True, exist_ok=True)
    try:
        yield
    finally:
        with suppress(OSError):  # stops at the first directory with content
            for parent in created:
                parent.rmdir()

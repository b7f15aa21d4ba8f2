"""Files that a command adds to a person's directory: all of them or none, and never over another."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from mergegate.merge_core.errors import InvalidInput


def require_new(files: Iterable[Path]) -> None:
    """See that nothing is there under any of these names.

    Raises:
        InvalidInput: naming the first that is.
    """
    if there := next((file for file in files if os.path.lexists(file)), None):
        raise InvalidInput(
            str(there), found="it exists", expected="a new file", remedy="choose another --name or --out"
        )


def write_new_files(texts: Mapping[Path, str]) -> None:
    """Write ``texts``; what ends it on the way (Ctrl-C, a full disk, a file that somebody else wrote meanwhile) leaves
    none of them.

    Raises:
        InvalidInput: for a file that exists.
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
def directory_for_new_files(place: Path) -> Iterator[None]:
    """``place``, made if need be; where nothing was put into what was made for it, it goes again."""
    made = [each for each in (place, *place.parents) if not os.path.lexists(each)]
    place.mkdir(parents=True, exist_ok=True)
    try:
        yield
    finally:
        with suppress(OSError):  # the first that has something in it, and with it all above
            for each in made:
                each.rmdir()

"""Open files in untrusted directories, if they are plain files inside that directory.

A checkpoint is a directory that a third party filled. ``merges.txt`` may be a link to a private key, and
``config.json`` may be a link to ``/dev/zero`` or a pipe without a writer. mergegate therefore checks a file before
opening it, because opening a pipe blocks and opening a device may have side effects. It checks the file again after
opening it, and requires that it is inside its directory. The only exception is the Hub's cache, recognized by name:
``models--org--name/snapshots/<commit>/`` consists of links into the neighboring directory ``blobs/``.
"""

from __future__ import annotations

import io
import os
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

from mergegate.merge_core.errors import InvalidInput

# Text, prompt and traffic files are read into memory completely.
MAX_DATA_BYTES = 1 << 30
MAX_CODE_BYTES = 16 << 20
_KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
    stat.S_IFDIR: "a directory",
}
_OUTSIDE = "copy the file into the directory if it belongs there; do not use a checkpoint from a stranger that has this"


def plain_file(path: Path, *, within: Path | None = None, most: int | None = None) -> Path:
    """Return the real path of a plain file, without opening it.

    Args:
        path: Path as a user or another file names it.
        within: Directory that the file must be in, also after all links. Default: anywhere.
        most: Largest size in bytes. Default: any size.

    Raises:
        FileNotFoundError: There is no such file.
        InvalidInput: The path names a pipe, a device, a socket or a directory, leads out of ``within``, cannot be the
            name of a file, or the file is larger than ``most``.
    """
    try:
        # Resolve without checking existence, so as not to reveal whether a file outside the directory exists.
        real = Path(os.path.realpath(path))
        if within is not None and not _belongs(real, Path(os.path.realpath(within))):
            raise InvalidInput(
                str(path), found=f"a link to {real}", expected=f"a file inside {within}", remedy=_OUTSIDE
            )
        status = real.stat()
    except FileNotFoundError:
        raise
    except OSError as error:
        raise InvalidInput(str(path), found=f"cannot be read: {error.strerror}") from None
    except ValueError:
        raise InvalidInput(str(path), found="a name that no file can have", expected="the name of a file") from None
    kind = stat.S_IFMT(status.st_mode)
    if most is not None and status.st_size > most:
        raise InvalidInput(str(path), found=f"{status.st_size} bytes", expected=f"at most {most} bytes")
    if kind != stat.S_IFREG:
        raise InvalidInput(str(path), found=_KINDS.get(kind, "a special file"), expected="a plain file")
    return real


def open_plain(path: Path, *, within: Path | None = None) -> BinaryIO:
    """Open a plain file for reading, unbuffered. See :func:`plain_file`.

    Raises:
        FileNotFoundError: The file does not exist.
        InvalidInput: The file is not valid for :func:`plain_file`, or is not readable by this user.
    """
    real = plain_file(path, within=within)
    try:
        # The file may have been replaced by a link or a pipe since the check. Do not follow the link or block.
        fd = os.open(real, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise InvalidInput(
            str(path), found=f"cannot be read: {error.strerror}", remedy="check disk and rights"
        ) from None
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise InvalidInput(str(path), found="no plain file any more", expected="a plain file")
    return os.fdopen(fd, "rb", buffering=0)


def read_plain(path: Path, most: int, *, within: Path | None = None, expected: str = "", remedy: str = "") -> bytes:
    """Return the content of a plain file.

    Args:
        path: Path of the file.
        most: Largest size in bytes.
        within: Directory that the file must be in. Default: anywhere.
        expected: Description of the expected file, for error messages.
        remedy: Advice to the user, for error messages.

    Raises:
        InvalidInput: The file is missing, larger than ``most``, or not valid for :func:`open_plain`.
    """
    try:
        with open_plain(path, within=within) as file:
            return content_of(file, path, most)
    except FileNotFoundError:
        raise InvalidInput(
            str(path), found="cannot be read: No such file or directory", expected=expected, remedy=remedy
        ) from None


def open_buffered(path: Path, *, within: Path | None = None) -> BinaryIO:
    """Open a plain file for buffered reading, for example by lines. See :func:`open_plain`."""
    return io.BufferedReader(open_plain(path, within=within))  # type: ignore[type-var]  # open_plain returns a FileIO.


def content_of(file: BinaryIO, path: Path, most: int) -> bytes:
    """Return the content of an open plain file.

    Args:
        file: Open file.
        path: Path of the file, for error messages.
        most: Largest size in bytes.

    Raises:
        InvalidInput: The file is larger than ``most``, grows while it is read, or the disk reports an error.
    """
    try:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise InvalidInput(str(path), found=f"{size} bytes", expected=f"at most {most} bytes")
        content = b""
        while len(content) <= most and (chunk := file.read(size + 1 if not content else 1 << 20)):
            content += chunk
    except OSError as error:
        raise InvalidInput(str(path), found=f"cannot be read: {error.strerror}") from None
    if len(content) > most:
        raise InvalidInput(str(path), found="more bytes than a moment ago", expected="a file that nobody writes to")
    return content


def read_text(path: Path, most: int, *, within: Path | None = None, expected: str = "", remedy: str = "") -> str:
    """Return the UTF-8 text of a plain file. See :func:`read_plain` for the arguments.

    Raises:
        InvalidInput: The file is not valid for :func:`read_plain`, or is not UTF-8 text.
    """
    try:
        return read_plain(path, most, within=within, expected=expected, remedy=remedy).decode()
    except UnicodeDecodeError:
        raise InvalidInput(
            str(path), found="cannot be read: not UTF-8 text", expected=expected, remedy=remedy
        ) from None


def check_entries(directory: Path, names: Iterable[str]) -> None:
    """Require that the named entries of a directory, if they exist, are plain files or directories inside it.

    Call this before passing the directory to a library that opens these files itself.

    Raises:
        InvalidInput: An entry is not a plain file inside the directory. The message names the first one.
    """
    for name in names:
        path = directory / name
        try:
            if os.path.isdir(path) and not path.is_symlink():  # noqa: PTH112  # Path.is_dir raises for long names.
                continue
            plain_file(path, within=directory)
        except FileNotFoundError:
            continue


def is_special(path: Path) -> bool:
    """Return whether ``path`` itself is neither a plain file nor a directory, but a link, a pipe or the like."""
    mode = path.lstat().st_mode
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))


def _belongs(real: Path, directory: Path) -> bool:
    """Return whether a resolved path is inside a resolved directory, or in the blobs of the same Hub cache."""
    if real.is_relative_to(directory):
        return True
    snapshots = directory.parent
    in_cache = snapshots.name == "snapshots" and snapshots.parent.name.startswith(("models--", "datasets--"))
    return in_cache and real.parent == snapshots.parent / "blobs"

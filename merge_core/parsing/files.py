"""Opening what a stranger has put into a directory: plain files that lie in it, and nothing else.

A checkpoint is a directory that somebody else filled. ``merges.txt`` may be a link to a private key, ``config.json`` a
link to ``/dev/zero`` or a pipe that nobody writes to. So a file is looked at before it is opened (opening a pipe waits,
opening a device does things), looked at again when it is open, and must lie inside its directory. The one exception is
the Hub's cache, by name: ``models--org--name/snapshots/<commit>/`` is made of links into ``blobs/`` beside it.
"""

from __future__ import annotations

import io
import os
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

from mergegate.merge_core.errors import InvalidInput

# Texts, prompts and traffic are read into memory as a whole.
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
        # Not strict: where a link leads out, its target's existence is nobody's business.
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
    """Open a plain file for reading, unbuffered; see :func:`plain_file`.

    Raises:
        FileNotFoundError: There is nothing of that name.
        InvalidInput: As :func:`plain_file`, or the rights are missing.
    """
    real = plain_file(path, within=within)
    try:
        # What was plain a moment ago may be a link or a pipe by now: neither is followed or waited for.
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
    """All bytes of a plain file of at most ``most`` bytes.

    Raises:
        InvalidInput: As :func:`open_plain`; it is not there, or is larger.
    """
    try:
        with open_plain(path, within=within) as file:
            return content_of(file, path, most)
    except FileNotFoundError:
        raise InvalidInput(
            str(path), found="cannot be read: No such file or directory", expected=expected, remedy=remedy
        ) from None


def open_buffered(path: Path, *, within: Path | None = None) -> BinaryIO:
    """Open a plain file for reading in small pieces, such as lines; see :func:`open_plain`, which reads unbuffered."""
    return io.BufferedReader(open_plain(path, within=within))  # type: ignore[type-var]  # a FileIO


def content_of(file: BinaryIO, path: Path, most: int) -> bytes:
    """All bytes of an open plain file of at most ``most`` bytes, which messages call ``path``.

    Raises:
        InvalidInput: It is larger, grows while it is read, or the disk reports an error.
    """
    try:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise InvalidInput(str(path), found=f"{size} bytes", expected=f"at most {most} bytes")
        content = b""
        while len(content) <= most and (more := file.read(size + 1 if not content else 1 << 20)):
            content += more
    except OSError as error:
        raise InvalidInput(str(path), found=f"cannot be read: {error.strerror}") from None
    if len(content) > most:
        raise InvalidInput(str(path), found="more bytes than a moment ago", expected="a file that nobody writes to")
    return content


def read_text(path: Path, most: int, *, within: Path | None = None, expected: str = "", remedy: str = "") -> str:
    """The UTF-8 text of a plain file of at most ``most`` bytes.

    Raises:
        InvalidInput: As :func:`read_plain`, or it is no text.
    """
    try:
        return read_plain(path, most, within=within, expected=expected, remedy=remedy).decode()
    except UnicodeDecodeError:
        raise InvalidInput(
            str(path), found="cannot be read: not UTF-8 text", expected=expected, remedy=remedy
        ) from None


def check_entries(directory: Path, names: Iterable[str]) -> None:
    """See that the files of those names in ``directory`` are plain files inside it. What is not there is not looked at.

    For directories that are then given to a library which opens what it finds.

    Raises:
        InvalidInput: naming the first that is not.
    """
    for name in names:
        path = directory / name
        try:
            if os.path.isdir(path) and not path.is_symlink():  # noqa: PTH112  # no error for names that are too long
                continue
            plain_file(path, within=directory)
        except FileNotFoundError:
            continue


def is_special(path: Path) -> bool:
    """Whether there is something at ``path`` itself that is neither a plain file nor a directory: a link, a pipe, …"""
    mode = path.lstat().st_mode
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))


def _belongs(real: Path, directory: Path) -> bool:
    """Whether a real path lies in a real directory, or in the blobs of the Hub's cache that it is part of."""
    if real.is_relative_to(directory):
        return True
    snapshots = directory.parent
    in_cache = snapshots.name == "snapshots" and snapshots.parent.name.startswith(("models--", "datasets--"))
    return in_cache and real.parent == snapshots.parent / "blobs"

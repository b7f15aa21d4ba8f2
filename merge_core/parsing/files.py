"""Open files in an untrusted directory, but only plain files inside that directory.

A checkpoint is a directory that a third party filled. ``merges.txt`` may be a link to a private key, and
``config.json`` may be a link to ``/dev/zero`` or a pipe without a writer. mergegate checks a file before opening it,
because opening a pipe blocks and opening a device may have side effects, and again after opening it. The only links out
of the directory that it follows are those of the Hub's cache, recognized by name:
``models--org--name/snapshots/<commit>/`` consists of links into the neighboring directory ``blobs/``.

:func:`check_zip_directory` checks a zip file before the library ``zipfile`` reads it.

:data:`LocalPath` is the type of local paths in profiles, settings and command-line options.
"""

from __future__ import annotations

import io
import os
import stat
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, BinaryIO

from pydantic import BeforeValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

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
_OUTSIDE = "copy the file into the directory; do not use a checkpoint from an unknown source that contains such a link"
_KIND = "local_path"  # Name of the error type in pydantic.
_LONGEST_NAME = 255  # Bytes. The limit of ext4, XFS, Btrfs, APFS and NTFS.
_LONGEST_PATH = 4095  # Bytes. PATH_MAX of Linux without the final NUL byte.
_MEMBER_BYTES = 320  # Size limit of the central directory of a zip file per allowed member.


def plain_file(path: Path, *, within: Path | None = None, most: int | None = None) -> Path:
    """Return the real path of a plain file, without opening it.

    Args:
        path: Path from a user or from another file.
        within: Directory that must contain the file, also after following links. Default: anywhere.
        most: Largest size in bytes. Default: any size.

    Raises:
        FileNotFoundError: The file does not exist.
        InvalidInput: The path is that of a pipe, a device, a socket or a directory, leads out of ``within``, cannot be
            a file name, or the file is larger than ``most``.
    """
    try:
        # Resolve without checking existence, so as not to reveal whether a file outside the directory exists.
        real = Path(os.path.realpath(path))
        directory = Path(os.path.realpath(within)) if within is not None else None
        if directory is not None and not real.is_relative_to(directory):
            repository = directory.parent.parent
            is_in_cache = directory.parent.name == "snapshots" and repository.name.startswith(
                ("models--", "datasets--")
            )
            if not is_in_cache or real.parent != repository / "blobs":
                raise InvalidInput(
                    str(path), found=f"a link to {real}", expected=f"a file inside {within}", remedy=_OUTSIDE
                )
        status = real.stat()
    except FileNotFoundError:
        raise
    except OSError as error:
        raise InvalidInput(str(path), found=f"cannot be read: {error.strerror}") from None
    except ValueError:
        raise InvalidInput(str(path), found="an invalid file name", expected="the name of a file") from None
    kind = stat.S_IFMT(status.st_mode)
    if most is not None and status.st_size > most:
        raise InvalidInput(str(path), found=f"{status.st_size} bytes", expected=f"at most {most} bytes")
    if kind != stat.S_IFREG:
        raise InvalidInput(str(path), found=_KINDS.get(kind, "a special file"), expected="a plain file")
    return real


def open_plain(path: Path, *, within: Path | None = None) -> BinaryIO:
    """Open a file that :func:`plain_file` accepts for reading, unbuffered. FileNotFoundError is raised as it is."""
    real = plain_file(path, within=within)
    try:
        # The file may have been replaced by a link or a pipe since the check. Do not follow the link or block.
        fd = os.open(real, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise InvalidInput(
            str(path), found=f"cannot be read: {error.strerror}", remedy="check the disk and the permissions"
        ) from None
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise InvalidInput(str(path), found="it is no longer a plain file", expected="a plain file")
    return os.fdopen(fd, "rb", buffering=0)


def read_plain(path: Path, most: int, *, within: Path | None = None, expected: str = "", remedy: str = "") -> bytes:
    """Return the content of a plain file.

    Raises:
        InvalidInput: The file is missing or larger than ``most``, or :func:`open_plain` rejects it.
    """
    try:
        with open_plain(path, within=within) as file:
            return content_of(file, path, most)
    except FileNotFoundError:
        raise InvalidInput(
            str(path), found="cannot be read: No such file or directory", expected=expected, remedy=remedy
        ) from None


def open_buffered(path: Path) -> BinaryIO:
    """Open a plain file like :func:`open_plain`, but with a buffer, for example to read lines."""
    return io.BufferedReader(open_plain(path))  # type: ignore[type-var]  # open_plain returns a FileIO.


def content_of(file: BinaryIO, path: Path, most: int) -> bytes:
    """Return the content of an open plain file of at most ``most`` bytes, which must not grow while it is read."""
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
        raise InvalidInput(
            str(path), found="the file grew while it was read", expected="a file that no process writes to"
        )
    return content


def read_text(path: Path, most: int, *, expected: str = "", remedy: str = "") -> str:
    """Return the UTF-8 text of a plain file that :func:`read_plain` accepts."""
    try:
        return read_plain(path, most, expected=expected, remedy=remedy).decode()
    except UnicodeDecodeError:
        raise InvalidInput(
            str(path), found="cannot be read: not UTF-8 text", expected=expected, remedy=remedy
        ) from None


def check_entries(directory: Path, names: Iterable[str]) -> None:
    """Raise InvalidInput if a named entry of a directory exists but is not a plain file or directory inside it.

    Call this before passing the directory to a library that opens these files itself.
    """
    for name in names:
        path = directory / name
        try:
            if os.path.isdir(path) and not path.is_symlink():  # noqa: PTH112  # Path.is_dir raises for long names.
                continue
            plain_file(path, within=directory)
        except FileNotFoundError:
            continue


def parse_path(text: str) -> Path:
    """Return ``text`` as a path, or raise PydanticCustomError if no file can have this path."""
    if not text:
        raise PydanticCustomError(_KIND, "expected a path, not an empty text")
    if "\0" in text:
        raise PydanticCustomError(_KIND, "expected a path without a NUL byte")
    try:
        encoded = os.fsencode(text)
    except UnicodeEncodeError:
        raise PydanticCustomError(_KIND, "expected a path of Unicode text") from None
    longest = max(len(name) for name in encoded.split(b"/"))
    if longest > _LONGEST_NAME:
        raise PydanticCustomError(_KIND, f"expected names of at most {_LONGEST_NAME} bytes, not of {longest:,}")
    if len(encoded) > _LONGEST_PATH:
        raise PydanticCustomError(_KIND, f"expected a path of at most {_LONGEST_PATH:,} bytes, not of {len(encoded):,}")
    return Path(text)


def _check(value: Any) -> Any:
    """Check a string that Pydantic then converts to a path. Pydantic itself rejects other types."""
    if isinstance(value, str):
        parse_path(value)
    return value


LocalPath = Annotated[
    Path, BeforeValidator(_check), WithJsonSchema({"type": "string", "format": "path", "minLength": 1})
]


def check_zip_directory(file: BinaryIO, size: int, path: Path, *, most: int, remedy: str = "") -> None:
    """Raise InvalidInput if the central directory of the zip is too large, before zipfile allocates memory for it.

    The record at the end of the file (PKZIP application note, 4.3.16, or 4.3.14 for 64 bits) declares the number of
    members and the size of their list. The last 64 kB of the file may be a comment that contains the signature of such
    a record again, so every occurrence is checked.

    Args:
        file: Open zip file. Its position afterwards is the start.
        size: Size of the file in bytes.
        path: Path of the file, for messages.
        most: Largest number of members.
        remedy: Way to get a smaller file, for messages.
    """
    start = max(0, size - (1 << 16) - 22 - 20 - 56)
    file.seek(start)
    tail = file.read(size - start)
    declared = []
    position = tail.find(b"PK\x05\x06")
    while position >= 0:
        if len(tail) >= position + 22:
            members, length = struct.unpack("<HI", tail[position + 10 : position + 16])
            declared.append((0 if members == 0xFFFF else members, 0 if length == 0xFFFFFFFF else length))
        position = tail.find(b"PK\x05\x06", position + 1)
    position = tail.find(b"PK\x06\x06")
    while position >= 0:
        if len(tail) >= position + 56:
            declared.append(struct.unpack("<QQ", tail[position + 32 : position + 48]))
        position = tail.find(b"PK\x06\x06", position + 1)
    members, length = (max((record[part] for record in declared), default=0) for part in (0, 1))
    if members > most or length > most * _MEMBER_BYTES:
        raise InvalidInput(
            str(path),
            found=f"a zip of {members} members, whose list has {length} bytes",
            expected=f"at most {most} members",
            remedy=remedy,
        )
    file.seek(0)

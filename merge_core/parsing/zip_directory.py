"""Check the central directory of a zip file before the library ``zipfile`` reads it."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import BinaryIO

from mergegate.merge_core.errors import InvalidInput

_MEMBER_BYTES = 320  # Size limit of the central directory per allowed member.


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

"""Define the type of local paths in profiles, settings and command-line options."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

_KIND = "local_path"  # Name of the error type in pydantic.
_LONGEST_NAME = 255  # Bytes. The limit of ext4, XFS, Btrfs, APFS and NTFS.
_LONGEST_PATH = 4095  # Bytes. PATH_MAX of Linux without the final NUL byte.


def parse_path(text: str) -> Path:
    """Return ``text`` as a path.

    Raises:
        PydanticCustomError: No file can have this path: it is empty, contains a NUL byte, is too long, or is not text.
    """
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
    """Check a string. Pydantic converts it to a path afterward and rejects other types."""
    if isinstance(value, str):
        parse_path(value)
    return value


LocalPath = Annotated[
    Path, BeforeValidator(_check), WithJsonSchema({"type": "string", "format": "path", "minLength": 1})
]

"""A file as a commit on the Hub lists it, with the Hub's own hashes."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass


@dataclass(frozen=True)
class RemoteFile:
    """A file as the Hub lists it.

    ``sha256`` is of its content where it lies in large file storage (LFS or Xet); of any other file the Hub knows only
    ``blob``, git's sha1 of it.
    """

    size: int
    blob: str
    sha256: str | None = None


def git_blob(data: bytes) -> str:
    """git's id of a file with this content: 40 hex digits, sha1 over a header and the bytes."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()

"""Describe a file in the listing of a commit on the Hub, with the Hub's own hashes."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass


@dataclass(frozen=True)
class RemoteFile:
    """One file in the Hub's listing of a commit.

    Attributes:
        size: Size in bytes.
        blob: Git's sha1 of the file.
        sha256: sha256 of the content, or None for files outside large file storage (LFS or Xet). For those, the Hub
            lists only ``blob``.
    """

    size: int
    blob: str
    sha256: str | None = None


def git_blob(data: bytes) -> str:
    """Return git's id of a file with this content: the sha1 over a header and the bytes, as 40 hex digits."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()

"""A file as a commit on the Hub lists it, with the Hub's own hashes."""

from __future__ import annotations

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

"""Flush files and directories to the disk, so that they survive a crash of the machine."""

from __future__ import annotations

import os
from pathlib import Path


def fsync(path: Path) -> None:
    """Flush a file's bytes, or a directory's entries, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync_directories(root: Path) -> None:
    """Flush the entries of ``root`` and of every directory below it, so that new file names survive a crash."""
    for directory in (root, *(path for path in root.rglob("*") if path.is_dir())):
        fsync(directory)

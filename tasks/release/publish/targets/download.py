"""Download a published release for comparison, verify it against its file list, and cache it.

The cache is in mergegate's home directory and is keyed by content, so a scheduled run with the same champion downloads
nothing. A release that no run has used for 30 days is removed.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from mergegate.merge_core.errors import Refused
from mergegate.merge_core.files import HASHES, HashMemo, hold_lock, remove_any, state_directory
from mergegate.tasks.base.stage import home
from mergegate.tasks.base.store import ContentMismatch, merkle, receive_directory

_RETENTION_S = 30 * 24 * 3600
_log = logging.getLogger(__name__)


def download_release(location: str, files: Mapping[str, tuple[int, str]], fetch: Callable[[str, Path], None]) -> Path:
    """Return a directory that contains exactly ``files``, and download them if they are not cached.

    ``location`` names the release in messages. ``fetch`` downloads the file with the given name to the given path. The
    sha256 of every downloaded file is added to the store's cache of hashes.
    """
    hashes = HashMemo(home() / "store" / HASHES)
    root = state_directory(home() / "releases", private=True)
    directory = root / merkle(files)[:32]
    with hold_lock(root / f".{directory.name}.lock"):
        present = {path.relative_to(directory).as_posix() for path in directory.rglob("*") if not path.is_dir()}
        is_intact = directory.is_dir() and present == set(files)
        if not is_intact or any(hashes.sha256(directory / name) != sha256 for name, (_, sha256) in files.items()):
            remove_any(directory)
            try:
                digests = receive_directory(directory, files, fetch)
            except ContentMismatch as damage:
                raise Refused(
                    location,
                    found=f"the downloaded files differ from their list: {damage}",
                    expected="the release that was published",
                    remedy="run again; if the error persists, publish the release again",
                ) from None
            for path, sha256 in digests.items():
                hashes.remember(path, sha256)
        os.utime(directory)
    try:
        for path in root.iterdir():
            if path != directory and _is_unused(path):
                with hold_lock(root / f".{path.name}.lock", remove=True):
                    if _is_unused(path):  # Another process may have used it while this one waited for the lock.
                        remove_any(path)
    except OSError as error:
        _log.warning("unused releases in %s were not removed: %s", root, error)
    return directory


def _is_unused(path: Path) -> bool:
    return path.is_dir() and path.stat().st_mtime < time.time() - _RETENTION_S

"""A release that was downloaded to be compared with: whole, as its list has it, and once as long as it is current.

It lies by its content below the project's home, so a night with the same champion downloads nothing; what no run has
wanted for a month is removed.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from mergegate.merge_core.errors import Refused
from mergegate.merge_core.files import HashMemo, locked, remove_any, state_directory
from mergegate.tasks.stage import home
from mergegate.tasks.store import ContentMismatch, merkle, receive_directory

_KEPT_S = 30 * 24 * 3600
_log = logging.getLogger(__name__)


def downloaded_release(
    where: str, files: Mapping[str, tuple[int, str]], fetch: Callable[[str, Path], None], hashes: HashMemo | None = None
) -> Path:
    """The directory that holds exactly ``files``, downloaded now if it has to be.

    Args:
        where: The release, for messages.
        files: Name -> size in bytes, sha256.
        fetch: Writes the file of that name to a path.
        hashes: Told the sha256 of what has arrived, so that it is not read again.

    Raises:
        Refused: when what arrives is not what is listed.
    """
    memo = hashes or HashMemo(home() / "store" / "hashes.sqlite")
    root = state_directory(home() / "releases", private=True)
    place = root / merkle(files)[:32]
    with locked(root / f".{place.name}.lock"):
        if not (place.is_dir() and _agrees(place, files, memo)):
            remove_any(place)
            try:
                arrived = receive_directory(place, files, fetch)
            except ContentMismatch as damage:
                raise Refused(
                    where,
                    found=f"what was downloaded is not what it lists: {damage}",
                    expected="the release that was published",
                    remedy="run again; if it stays, publish the release anew",
                ) from None
            for path, sha256 in arrived.items():
                memo.remember(path, sha256)
        os.utime(place)
    _forget_others(root, place)
    return place


def _agrees(place: Path, files: Mapping[str, tuple[int, str]], memo: HashMemo) -> bool:
    """Whether a directory is still what was downloaded: each hash is remembered as long as nobody touches its file."""
    present = {path.relative_to(place).as_posix() for path in place.rglob("*") if not path.is_dir()}
    return present == set(files) and all(memo.sha256(place / name) == sha256 for name, (_, sha256) in files.items())


def _forget_others(root: Path, wanted: Path) -> None:
    try:
        for other in root.iterdir():
            if other != wanted and other.is_dir() and other.stat().st_mtime < time.time() - _KEPT_S:
                with locked(root / f".{other.name}.lock", remove=True):
                    remove_any(other)
    except OSError as error:
        _log.warning("%s: %s", root, error)

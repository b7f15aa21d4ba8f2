"""Directories that come from elsewhere: fetched beside their final place, compared with their list, then renamed.

What has its final name is whole and is what was listed, whatever happened on the way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from mergegate.merge_core.files import fsync, fsync_directories, remove_any, sha256_file

ARRIVING = ".arriving.partial"  # unfinished work, to whoever collects garbage


class ContentMismatch(Exception):
    """What arrived is not what was listed; the message names the file."""


def receive_directory(
    final: Path, files: Mapping[str, tuple[int, str]], fetch: Callable[[str, Path], None]
) -> dict[Path, str]:
    """Make ``final`` hold exactly ``files``. Call it with a lock held: one at a time for each place.

    Args:
        final: Where nothing is yet. What a killed arrival has left beside it is removed.
        files: Relative name -> size in bytes, sha256.
        fetch: Writes the file of that name to a path whose directory exists.

    Returns:
        sha256 of every file by its final path: they need not be read again.

    Raises:
        ContentMismatch: when a file has other bytes, or a name that leads out of the directory. Nothing is left.
        Exception: what ``fetch`` raises. Nothing is left.
    """
    arriving = final.with_name(final.name + ARRIVING)
    remove_any(arriving)
    try:
        arriving.mkdir(parents=True)
        for name, (size, sha256) in sorted(files.items()):
            place = arriving / name
            if not _is_inside(name):
                raise ContentMismatch(f"{name!r} is no name of a file in a directory")
            place.parent.mkdir(parents=True, exist_ok=True)
            fetch(name, place)
            found = place.stat().st_size
            if found != size:
                raise ContentMismatch(f"{name} has {found} bytes instead of {size}")
            if (hashed := sha256_file(place)) != sha256:
                raise ContentMismatch(f"{name}: sha256 is {hashed[:12]}… instead of {sha256[:12]}…")
            fsync(place)
        fsync_directories(arriving)
        arriving.rename(final)
    except BaseException:
        remove_any(arriving)
        raise
    fsync(final.parent)
    return {final / name: sha256 for name, (_, sha256) in files.items()}


def _is_inside(name: str) -> bool:
    return "\0" not in name and not any(part in ("", ".", "..") for part in name.split("/"))

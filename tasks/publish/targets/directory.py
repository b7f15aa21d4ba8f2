"""Publishing to a directory: a release is all there or not at all, and a version never changes its content.

::

    releases/demo/3f9a0c71b2de/      a version: complete, immutable
    releases/demo/latest             a link to the version that is published now; it moves in one step

A version is written beside its final name, every byte is hashed on the way and compared with what was gated, everything
is fsynced, then one rename makes it exist and another one moves ``latest``. A run that is killed in between is repaired
by running again; a run with nothing new changes nothing.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from merge_core.errors import Refused
from merge_core.store import HashMemo, fsync, fsync_directories, locked
from tasks.publish.content import ReleaseFile

LATEST = "latest"
_CHUNK = 1 << 22


@dataclass(frozen=True)
class Published:
    """Where a release stands. ``new`` is false when it was there already and nothing was touched."""

    version: str
    location: Path
    new: bool


def publish_directory(
    files: Sequence[ReleaseFile],
    target: Path,
    version: str,
    hashes: HashMemo,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Published:
    """Make ``target/version`` hold exactly ``files`` and ``target/latest`` point to it.

    Args:
        on_progress: Told bytes written and to be written, while there is something to write.

    Raises:
        Refused: when the version exists with other content, or a source is not what was gated.
    """
    place = target / version
    target.mkdir(parents=True, exist_ok=True)
    with locked(target):  # One publisher at a time; on the directory itself, so there is nothing to clean up.
        fresh = not place.exists()
        if fresh:
            _write_version(files, place, on_progress)
        else:
            _require_same(place, files, hashes)
        moved = _point(target / LATEST, version)
        fsync(target)
    return Published(version, place, new=fresh or moved)


def _write_version(files: Sequence[ReleaseFile], place: Path, on_progress: Callable[[int, int], None]) -> None:
    """All files beside their final place, then one rename."""
    done, total = 0, sum(file.size for file in files)

    def wrote(count: int) -> None:
        nonlocal done
        done += count
        on_progress(done, total)

    partial = place.with_name(f".{place.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    for file in files:
        _write(file, partial / file.name, wrote)
    fsync_directories(partial)
    partial.rename(place)


def _point(link: Path, version: str) -> bool:
    """Make ``link`` point to ``version`` in one step; whether it pointed elsewhere before."""
    if link.is_symlink() and link.readlink() == Path(version):
        return False
    if link.exists() and not link.is_symlink():
        raise Refused(str(link), found="a file or directory", expected="a link", remedy="move it away")
    step = link.with_name(f".{link.name}.partial")
    step.unlink(missing_ok=True)
    step.symlink_to(version)
    step.rename(link)
    return True


def _require_same(place: Path, files: Sequence[ReleaseFile], hashes: HashMemo) -> None:
    expected = {file.name: file.sha256 for file in files}
    present = {path.relative_to(place).as_posix() for path in place.rglob("*") if path.is_file()}
    wrong = [name for name, sha256 in expected.items() if name in present and hashes.sha256(place / name) != sha256]
    if odd := sorted({*wrong, *(present ^ set(expected))}):
        raise Refused(
            str(place / odd[0]),
            found="the version is already published with other content",
            expected="a version that never changes",
            remedy="publish under a new version, or remove the altered one by hand",
        )


def _write(file: ReleaseFile, place: Path, wrote: Callable[[int], None]) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    running = hashlib.sha256()
    with place.open("wb") as output:
        if isinstance(file.source, bytes):
            running.update(file.source)
            output.write(file.source)
            wrote(len(file.source))
        else:
            with file.source.open("rb") as source:
                while chunk := source.read(_CHUNK):
                    running.update(chunk)
                    output.write(chunk)
                    wrote(len(chunk))
        output.flush()
        os.fsync(output.fileno())
    if running.hexdigest() != file.sha256:
        raise Refused(
            str(file.source),
            found=f"sha256 {running.hexdigest()[:12]}…",
            expected=f"{file.sha256[:12]}…, the bytes that were evaluated and gated",
            remedy="run again: the altered artifact is noticed and made anew",
        )

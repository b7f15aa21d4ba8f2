"""What lies in a store, seen from outside: damaged, set aside, unfinished, left over; and what may be done about it.

No run needs this: each of them passes over what it cannot believe. It is for a person who wants to know, or wants the
room::

    for found in examine_store(root):
        print(found.kind, found.path, found.what)
        mend_state(found)
"""

from __future__ import annotations

import os
import re
import stat
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mergegate.merge_core.files import (
    ASIDE,
    HASHES,
    Damaged,
    is_set_aside,
    is_temporary,
    read_state,
    regular_files,
    remove_any,
    set_aside_damaged,
    set_sqlite_aside,
    sha256_file,
    sqlite_fault,
    try_open_locked,
)
from mergegate.tasks.store.keys import digest
from mergegate.tasks.store.manifest import MANIFEST, ArtifactManifest, ValueRecord
from mergegate.tasks.store.shared import OUTBOX
from mergegate.tasks.store.store import LOCKS, TRASH

_KEY = re.compile("[0-9a-f]{32}")
_STAGE = re.compile("[a-z][a-z_-]*")  # of its directory
# Unfinished work that no run has gone on with for so long belongs to inputs that nobody merges any more.
_ABANDONED_S = 30 * 86_400.0
_DATABASE_PATIENCE_S = 2.0

FindingKind = Literal["damaged", "set aside", "unfinished", "abandoned", "left over", "foreign"]


@dataclass(frozen=True)
class StateFinding:
    """Something below the project's home that is no sound state.

    Args:
        kind: ``damaged``: the next run that wants it makes it again. ``set aside``: that has happened. ``unfinished``:
            the next run of the same goes on from it. ``abandoned``: for a month none has. ``left over``: of a run that
            was killed; nobody reads it. ``foreign``: mergegate did not write it, and leaves it alone.
        path: Where.
        what: Why it counts as that.
        bytes: Its size on the disk.
    """

    kind: FindingKind
    path: Path
    what: str
    bytes: int


def examine_store(root: Path, *, deep: bool = False) -> Iterator[StateFinding]:
    """Everything in the store at ``root`` that is no whole artifact. What somebody works on now is passed over.

    Artifacts are compared with their manifests by names and sizes, values by their digests.

    Args:
        deep: By hashes, too: every byte is read, whatever is remembered of it.
    """
    if not root.is_dir():
        if os.path.lexists(root):
            yield set_aside_count(root, "no directory")
        return
    yield from examine_database(root / HASHES)
    for place in sorted(root.iterdir()):
        if place.name.startswith(HASHES) and ASIDE not in place.name:
            continue
        if (passed := is_leftover(place)) is not None:
            yield passed
        elif place.is_symlink() or not place.is_dir():
            is_stage = _STAGE.fullmatch(place.name) or place.name in (LOCKS, TRASH, OUTBOX)
            yield set_aside_count(place, "no directory") if is_stage else _foreign(place)
        elif place.name == OUTBOX:
            continue
        elif place.name == LOCKS:
            yield from _unheld(place)
        elif place.name == TRASH:
            for entry in sorted(place.iterdir()):
                yield StateFinding("left over", entry, "was being removed", directory_bytes(entry))
        else:
            for entry in sorted(place.iterdir()):
                if not _is_held(root / LOCKS / f"{place.name}-{entry.name[:32]}"):
                    yield from _entry(entry, deep)


def examine_database(database: Path) -> Iterator[StateFinding]:
    """Whether a database is one, whole."""
    if why := sqlite_fault(database, patience_s=_DATABASE_PATIENCE_S):
        yield set_aside_count(database, why)


def is_leftover(path: Path) -> StateFinding | None:
    """What the name alone says of it: that it was set aside, or is left from a write that was not finished."""
    if is_set_aside(path):
        return StateFinding("set aside", path, "it could not be believed, and was made again", directory_bytes(path))
    if is_temporary(path) and not path.is_dir():
        return StateFinding("left over", path, "of a write that was not finished", directory_bytes(path))
    return None


def _foreign(path: Path) -> StateFinding:
    return StateFinding("foreign", path, "mergegate did not write it, and leaves it alone", directory_bytes(path))


def set_aside_count(path: Path, why: str) -> StateFinding:
    """``path`` as damage, for ``why``."""
    return StateFinding("damaged", path, why, directory_bytes(path))


def mend_state(found: StateFinding) -> str:
    """Set aside what is damaged, remove what nobody reads; leave what a run can go on from. Says what was done."""
    if found.kind in ("unfinished", "foreign"):
        return ""
    if found.kind != "damaged":
        remove_any(found.path)
        return "removed"
    if found.path.suffix in (".sqlite", ".db"):
        set_sqlite_aside(found.path, found.what)
    else:
        set_aside_damaged(found.path, found.what)
    return "set aside"


def directory_bytes(path: Path) -> int:
    """Bytes of a file, or of all files below a directory. Links count as themselves, what goes meanwhile as nothing."""
    if path.is_symlink() or not path.is_dir():
        return path.lstat().st_size if os.path.lexists(path) else 0
    size = 0
    for above, _, names in os.walk(path):
        for name in names:
            with suppress(FileNotFoundError):
                status = os.lstat(f"{above}/{name}")
                size += status.st_size if stat.S_ISREG(status.st_mode) else 0
    return size


def _entry(entry: Path, deep: bool) -> Iterator[StateFinding]:
    if (passed := is_leftover(entry)) is not None:
        yield passed
    elif not _KEY.match(entry.name):
        yield _foreign(entry)
    elif entry.name.endswith(".doomed"):
        yield StateFinding("left over", entry, "to be removed", directory_bytes(entry))
    elif entry.name.endswith(".partial"):
        age = time.time() - entry.stat().st_mtime
        kind: FindingKind = "abandoned" if age > _ABANDONED_S else "unfinished"
        yield StateFinding(kind, entry, f"last worked on {age / 86_400:.0f} days ago", directory_bytes(entry))
    elif why := _fault(entry, deep):
        yield set_aside_count(entry, why)


def _fault(entry: Path, deep: bool) -> str:
    if not _KEY.fullmatch(entry.name.removesuffix(".json")):
        return "not the name of an artifact"
    return _value_fault(entry) if entry.name.endswith(".json") else _artifact_fault(entry, deep)


def _artifact_fault(directory: Path, deep: bool) -> str:
    if directory.is_symlink() or not directory.is_dir():
        return "no directory"
    manifest = read_state(directory / MANIFEST, ArtifactManifest.model_validate_json)
    if manifest is None:
        return f"{MANIFEST} is missing"
    if isinstance(manifest, Damaged):
        return f"{MANIFEST}: {manifest.why}"
    if not manifest.key.startswith(directory.name):
        return "it belongs to another key"
    present, odd = regular_files(directory)
    for name, file in manifest.files.items():
        if name not in present or (directory / name).stat().st_size != file.size:
            return f"{name} is missing or of another size"
        if deep and (fault := _content_fault(directory / name, file.sha256)):
            return f"{name} {fault}"
    extra = (present | odd) - {MANIFEST, *manifest.files}
    return f"{min(extra)} is not of this artifact" if extra else ""


def _content_fault(file: Path, sha256: str) -> str:
    try:
        return "" if sha256_file(file) == sha256 else "was altered"
    except OSError as error:
        return f"cannot be read: {error.strerror}"


def _value_fault(path: Path) -> str:
    record = read_state(path, ValueRecord.model_validate_json)
    if not isinstance(record, ValueRecord):
        return record.why if record else ""
    if not record.key.startswith(path.stem):
        return "it belongs to another key"
    return "" if record.sha256 == digest(record.value) else "it was altered"


def _unheld(locks: Path) -> Iterator[StateFinding]:
    for lock in sorted(locks.iterdir()):
        if not _is_held(lock):
            yield StateFinding("left over", lock, "a lock that nobody holds", directory_bytes(lock))


def _is_held(lock: Path) -> bool:
    if not lock.is_file():
        return False
    descriptor = try_open_locked(lock, os.O_RDONLY, required=False)
    if descriptor is None:
        return True
    os.close(descriptor)
    return False

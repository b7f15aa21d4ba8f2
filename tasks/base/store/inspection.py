"""Find damaged, set-aside, unfinished and leftover files in a store, and clean them up.

Runs do not need this module, because they skip damaged files. It serves operators who want to see the condition of a
store or to free space::

    for finding in examine_store(root):
        print(finding.kind, finding.path, finding.explanation)
        mend_state(finding)
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
    remove_sqlite,
    set_aside_damaged,
    sha256_file,
    sqlite_fault,
    try_open_locked,
)
from mergegate.tasks.base.store.manifest import MANIFEST, ArtifactManifest, ValueRecord, digest
from mergegate.tasks.base.store.shared import OUTBOX
from mergegate.tasks.base.store.store import LOCKS, TRASH

KEY = re.compile("[0-9a-f]{32}")  # Beginning of the key of an artifact, which names it in the store.
_STAGE = re.compile("[a-z][a-z_-]*")  # Directory name of a stage.
# Unfinished work that no run has resumed for this long belongs to inputs that are no longer merged.
_ABANDONED_S = 30 * 86_400.0
_DATABASE_PATIENCE_S = 2.0

EntryKind = Literal["artifact", "value", "unfinished", "left over"]
FindingKind = Literal["damaged", "set aside", "unfinished", "abandoned", "left over", "foreign"]


@dataclass(frozen=True)
class StateFinding:
    """Problem with a file or directory in mergegate's home directory.

    Args:
        kind: ``damaged``: the next run that needs it rebuilds it. ``set aside``: a run found it damaged.
            ``unfinished``: the next run with the same inputs resumes it. ``abandoned``: no run has resumed it for 30
            days. ``left over``: a killed process left it, and no run reads it. ``foreign``: mergegate did not write it
            and does not change it.
        explanation: Reason for the kind, such as ``it was altered``.
        bytes: Size on the disk in bytes.
    """

    kind: FindingKind
    path: Path
    explanation: str
    bytes: int


def examine_store(root: Path, *, deep: bool = False) -> Iterator[StateFinding]:
    """Yield everything in the store at ``root`` that is not a complete artifact, except work in progress.

    An artifact must have the file names and sizes that its manifest lists, and a value must match its digest. With
    ``deep``, all files are hashed again and compared with their manifest, too.
    """
    if not root.is_dir():
        if os.path.lexists(root):
            yield damaged_finding(root, "not a directory")
        return
    yield from examine_database(root / HASHES)
    for path in sorted(root.iterdir()):
        if path.name.startswith(HASHES) and ASIDE not in path.name:
            continue
        if (leftover := leftover_finding(path)) is not None:
            yield leftover
        elif path.is_symlink() or not path.is_dir():
            is_stage = _STAGE.fullmatch(path.name) or path.name in (LOCKS, TRASH, OUTBOX)
            yield damaged_finding(path, "not a directory") if is_stage else _foreign(path)
        elif path.name == OUTBOX:
            continue
        elif path.name == LOCKS:
            for lock in sorted(path.iterdir()):
                if not _is_held(lock):
                    yield StateFinding("left over", lock, "a lock that no process holds", directory_bytes(lock))
        elif path.name == TRASH:
            for entry in sorted(path.iterdir()):
                yield StateFinding("left over", entry, "its removal was interrupted", directory_bytes(entry))
        else:
            for entry in sorted(path.iterdir()):
                if not _is_held(root / LOCKS / f"{path.name}-{entry.name[:32]}"):
                    yield from _examine_entry(entry, deep)


def examine_database(database: Path) -> Iterator[StateFinding]:
    """Yield a finding if the SQLite database in the file ``database`` is damaged."""
    if why := sqlite_fault(database, patience_s=_DATABASE_PATIENCE_S):
        yield damaged_finding(database, why)


def leftover_finding(path: Path) -> StateFinding | None:
    """Return a finding if the name of ``path`` shows that it was set aside or is from an unfinished write."""
    if is_set_aside(path):
        return StateFinding("set aside", path, "it was damaged, and a run continued without it", directory_bytes(path))
    if is_temporary(path) and not path.is_dir():
        return StateFinding("left over", path, "from a write that was not completed", directory_bytes(path))
    return None


def _foreign(path: Path) -> StateFinding:
    return StateFinding("foreign", path, "mergegate did not write it and does not change it", directory_bytes(path))


def damaged_finding(path: Path, why: str) -> StateFinding:
    """Return a finding of the kind ``damaged`` with ``why`` as its explanation."""
    return StateFinding("damaged", path, why, directory_bytes(path))


def mend_state(finding: StateFinding) -> str:
    """Remove a damaged cache or a file that no run reads. Set aside other damage. Leave unfinished and foreign files.

    Returns:
        ``removed``, ``set aside``, or an empty string if nothing was done.
    """
    if finding.kind in ("unfinished", "foreign"):
        return ""
    if finding.kind != "damaged":
        remove_any(finding.path)
        return "removed"
    if finding.path.suffix in (".sqlite", ".db"):
        remove_sqlite(finding.path, finding.explanation)
    elif KEY.fullmatch(finding.path.name.removesuffix(".json")):  # An entry of the store.
        remove_any(finding.path)
    else:
        set_aside_damaged(finding.path, finding.explanation)
        return "set aside"
    return "removed"


def directory_bytes(path: Path) -> int:
    """Return the size in bytes of a file, or of all regular files below a directory.

    If ``path`` is a link, the result is the size of the link itself. A file that is deleted during the scan counts as
    zero.
    """
    if path.is_symlink() or not path.is_dir():
        return path.lstat().st_size if os.path.lexists(path) else 0
    size = 0
    for parent, _, names in os.walk(path):
        for name in names:
            with suppress(FileNotFoundError):
                status = os.lstat(f"{parent}/{name}")
                size += status.st_size if stat.S_ISREG(status.st_mode) else 0
    return size


def entry_kind(path: Path) -> EntryKind | None:
    """Return the kind of an entry of a stage, or None if mergegate did not create it and must not remove it."""
    if is_temporary(path):
        return "unfinished" if path.is_dir() and not path.is_symlink() else "left over"
    if path.is_symlink() or not KEY.fullmatch(path.name.removesuffix(".json")):
        return None
    return "value" if path.suffix else "artifact" if path.is_dir() else None


def _examine_entry(entry: Path, deep: bool) -> Iterator[StateFinding]:
    kind, fault = entry_kind(entry), ""
    if (leftover := leftover_finding(entry)) is not None:
        yield leftover
    elif not KEY.match(entry.name):
        yield _foreign(entry)
    elif kind == "unfinished":
        age = time.time() - entry.stat().st_mtime
        condition: FindingKind = "abandoned" if age > _ABANDONED_S else "unfinished"
        yield StateFinding(condition, entry, f"last changed {age / 86_400:.0f} days ago", directory_bytes(entry))
    elif kind == "value":
        fault = _value_fault(entry)
    elif kind == "artifact":
        fault = _artifact_fault(entry, deep)
    else:
        is_named = KEY.fullmatch(entry.name.removesuffix(".json"))
        fault = "not a directory" if is_named else "not the name of an artifact"
    if fault:
        yield damaged_finding(entry, fault)


def _value_fault(file: Path) -> str:
    record = read_state(file, ValueRecord.model_validate_json)
    if isinstance(record, Damaged):
        return record.reason
    if record is not None and not record.key.startswith(file.stem):
        return "it belongs to another key"
    return "it was altered" if record is not None and record.sha256 != digest(record.value) else ""


def _artifact_fault(directory: Path, deep: bool) -> str:
    manifest = read_state(directory / MANIFEST, ArtifactManifest.model_validate_json)
    if manifest is None:
        return f"{MANIFEST} is missing"
    if isinstance(manifest, Damaged):
        return f"{MANIFEST}: {manifest.reason}"
    if not manifest.key.startswith(directory.name):
        return "it belongs to another key"
    present, special = regular_files(directory)
    for name, file in manifest.files.items():
        path = directory / name
        if name not in present or path.stat().st_size != file.size:
            return f"{name} is missing or has another size"
        try:
            if deep and sha256_file(path) != file.sha256:
                return f"{name} was altered"
        except OSError as error:
            return f"{name} cannot be read: {error.strerror}"
    extra = (present | special) - {MANIFEST, *manifest.files}
    return f"{min(extra)} is not part of this artifact" if extra else ""


def _is_held(lock: Path) -> bool:
    if not lock.is_file():
        return False
    descriptor = try_open_locked(lock, os.O_RDONLY, required=False)
    if descriptor is None:
        return True
    os.close(descriptor)
    return False

"""Garbage collection: what nobody needs leaves the store, beside runs that use it.

::

    collected = collect_garbage(root, runs, RetentionRule(grace_s=86_400.0))
    collected.plan.goes, collected.bytes_freed

One collector works at a time; a second one waits, and finds less to do. Each thing is taken under the lock of its key
(what somebody works on is left alone), moved into ``.trash`` in one step and only then deleted: a collector that is
killed leaves nothing half-deleted under its name, and the next one empties the trash.

A run notes what it is about to use and then asks the store. The collector moves something away, looks at the notes
once more, and puts it back where it was noted meanwhile. So either the collector sees the note, or the run sees that
the artifact is not there and makes it: neither has to wait for the other.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from mergegate.merge_core.files import (
    HASHES,
    HashMemo,
    fsync,
    is_set_aside,
    is_temporary,
    locked,
    regular_files,
    remove_any,
    state_directory,
    try_open_locked,
)
from mergegate.tasks.store.inspection import directory_bytes
from mergegate.tasks.store.retention import (
    EntryKind,
    EntryName,
    RetentionPlan,
    RetentionRule,
    RunUse,
    StoreEntry,
    needed_by,
    plan_retention,
    runs_that_count,
)
from mergegate.tasks.store.runs import RunReader
from mergegate.tasks.store.store import LOCKS, TRASH

_COLLECTION = "collection"  # the lock of whoever collects
_KEY = re.compile("[0-9a-f]{32}")


@dataclass(frozen=True)
class CollectedGarbage:
    """What a collection came to.

    Args:
        plan: As it was carried out; of a dry run: as it would be.
        bytes_freed: 0 of a dry run.
    """

    plan: RetentionPlan
    bytes_freed: int


def list_store(root: Path) -> tuple[StoreEntry, ...]:
    """Everything in the store that can go by itself. What goes while we look is left out."""
    found = []
    for place in sorted(root.iterdir()) if root.is_dir() else []:
        if place.name in (LOCKS, TRASH):
            continue
        if is_set_aside(place):
            found.append(_entry("", place, "set aside"))
        elif place.is_dir() and not place.is_symlink():
            for entry in sorted(place.iterdir()):
                if (kind := _kind(entry)) is not None:
                    found.append(_entry(place.name, entry, kind))
    return tuple(one for one in found if one is not None)


def store_bytes(root: Path) -> int:
    """Of everything in the store, tables and trash too."""
    return directory_bytes(root) if root.is_dir() else 0


def explain_retention(runs: Path) -> dict[EntryName, str]:
    """What of the store is needed, and why."""
    return _Needs(runs).now()


def plan_collection(root: Path, runs: Path, rule: RetentionRule, now: float | None = None) -> RetentionPlan:
    """What a collection would do. Changes nothing.

    Args:
        now: Seconds since the epoch; absent: the clock's.
    """
    return _planned(root, explain_retention(runs), rule, time.time() if now is None else now)


def collect_garbage(
    root: Path,
    runs: Path,
    rule: RetentionRule,
    now: float | None = None,
    on_wait: Callable[[], None] = lambda: None,
) -> CollectedGarbage:
    """Remove what may go.

    Args:
        root: The store.
        runs: The records of runs.
        now: Seconds since the epoch; absent: the clock's.
        on_wait: Called once if somebody else is collecting.

    Raises:
        OSError: when something cannot be moved or deleted. What has gone until then has gone.
    """
    moment = time.time() if now is None else now
    state_directory(root, private=True)
    before = store_bytes(root)
    with locked(state_directory(root / LOCKS) / _COLLECTION, remove=True, on_wait=on_wait):
        _empty_trash(root)
        needs = _Needs(runs)
        busy: set[tuple[str, str]] = set()
        gone: list[tuple[StoreEntry, str]] = []
        while True:
            plan = _planned(root, needs.now(), rule, moment, busy)
            if not plan.goes:
                break
            for entry, why in plan.goes:
                if _take_away(root, entry, needs):
                    gone.append((entry, why))
                else:  # then something else has to go for the quota
                    busy.add((entry.stage, entry.name))
            _empty_trash(root)
        done = RetentionPlan(tuple(gone), plan.stays, before, store_bytes(root), rule.quota)
    return CollectedGarbage(done, max(0, before - done.bytes_after))


class _Needs:
    """What runs need, asked again and again."""

    def __init__(self, runs: Path) -> None:
        self._reader = RunReader(runs)
        self._runs: tuple[RunUse, ...] = ()
        self._needed: dict[EntryName, str] = {}

    def now(self) -> dict[EntryName, str]:
        if (runs := self._reader.read()) != self._runs:
            self._runs, self._needed = runs, needed_by(runs, runs_that_count(runs))
        return self._needed


def _planned(
    root: Path,
    needed: Mapping[EntryName, str],
    rule: RetentionRule,
    now: float,
    busy: Collection[tuple[str, str]] = (),
) -> RetentionPlan:
    entries = list_store(root)
    trash = root / TRASH
    beside = store_bytes(root) - sum(one.bytes for one in entries) - (directory_bytes(trash) if trash.is_dir() else 0)
    return plan_retention(entries, needed, rule, now, beside=max(0, beside), busy=busy)


def _take_away(root: Path, entry: StoreEntry, needs: _Needs) -> bool:
    """Move something into the trash; False where somebody works on it, or has come to need it."""
    place = root / entry.stage / entry.name
    trash = state_directory(root / TRASH) / f"{entry.stage}-{entry.name}-{time.time_ns()}"
    # What is set aside is nobody's, whatever is made in its place meanwhile.
    aside = entry.kind == "set aside"
    lock = root / LOCKS / (f"{entry.stage}-{entry.key}" if entry.key else _COLLECTION + "-other")
    descriptor = try_open_locked(lock, os.O_RDWR | os.O_CREAT)
    if descriptor is None:
        return False
    try:
        if not aside and entry.made_by in needs.now():
            return False
        try:
            place.rename(trash)
        except FileNotFoundError:
            return not os.path.lexists(place)  # gone already
        if not aside and entry.made_by in needs.now():
            with suppress(FileNotFoundError):
                trash.rename(place)
            return False
        # Names first: after a power cut nothing is back under its name that has lost files.
        fsync(place.parent)
        return True
    finally:
        try:
            lock.unlink(missing_ok=True)
        finally:
            os.close(descriptor)


def _empty_trash(root: Path) -> None:
    trash = root / TRASH
    for left in sorted(trash.iterdir()) if trash.is_dir() else []:
        with suppress(FileNotFoundError):  # somebody else tidies up, too
            if left.is_dir() and not left.is_symlink():
                HashMemo(root / HASHES).forget(left / name for name in regular_files(left)[0])
            remove_any(left)
    with suppress(OSError):
        trash.rmdir()


def _entry(stage: str, path: Path, kind: EntryKind) -> StoreEntry | None:
    key = path.name[:32]
    try:
        used = _last_change(path) if kind == "unfinished" else path.lstat().st_mtime
        size = directory_bytes(path)
    except FileNotFoundError:
        return None
    return StoreEntry(stage, path.name, key if _KEY.fullmatch(key) else "", kind, size, used)


def _kind(path: Path) -> EntryKind | None:
    """None: whatever it is, it is not ours to remove."""
    name = path.name
    if is_set_aside(path):
        return "set aside"
    if name.endswith(".doomed") and _KEY.match(name):
        return "left over"
    if is_temporary(path):
        return "unfinished" if path.is_dir() and not path.is_symlink() else "left over"
    if path.is_symlink() or not _KEY.fullmatch(name.removesuffix(".json")):
        return None
    return "value" if name.endswith(".json") else "artifact" if path.is_dir() else None


def _last_change(directory: Path) -> float:
    """Of unfinished work: journals grow inside, and a directory does not tell."""
    return max(path.lstat().st_mtime for path in _with_all_below(directory))


def _with_all_below(directory: Path) -> Iterator[Path]:
    yield directory
    yield from directory.rglob("*")

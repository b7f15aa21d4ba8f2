"""Collect garbage: remove artifacts that no run needs, even while runs use the store.

::

    collected = collect_garbage(root, runs, RetentionRule(grace_s=86_400.0))
    collected.plan.removals, collected.bytes_freed

An entry stays while a run needs it (see ``runs_that_count``). Each run records every entry that it requests from the
store, including cache hits, so entries need not refer to each other. The other entries are removed, least recently used
first, if they are older than a grace period, or until the store meets a quota. ``plan_retention`` decides this without
accessing the disk.

Only one collector works at a time; a second one waits. The collector locks the key of each entry, skips entries that
another process has locked, moves the entry into ``.trash`` in one step, and deletes it there. A collector that is
killed therefore never leaves an incomplete artifact under its final name. The next collector empties the trash.

Before a run opens an artifact, it adds the artifact to its record. After the collector has moved an entry into the
trash, it reads the records of all runs again and moves the entry back if a run needs it. Either the collector sees the
record, or the run finds the artifact missing and builds it again. Neither waits for the other.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from mergegate.merge_core.files import (
    HASHES,
    HashMemo,
    fsync,
    hold_lock,
    regular_files,
    remove_any,
    state_directory,
    try_open_locked,
)
from mergegate.tasks.base.store.inspection import KEY, EntryKind, directory_bytes, entry_kind
from mergegate.tasks.base.store.runs import EntryName, RunReader, RunUse, runs_that_count
from mergegate.tasks.base.store.store import LOCKS, TRASH

_COLLECTION = "collection"  # Name of the collector's lock.


@dataclass(frozen=True)
class StoreEntry:
    """File or directory in a store that can be removed separately."""

    stage: str  # Name of the stage, or an empty string for an entry at the top of the store.
    name: str
    key: str  # First 32 hex digits of the key, or an empty string if the name does not contain a key.
    kind: EntryKind
    bytes: int
    used: float  # Time of creation or last use, in seconds since the epoch.

    @property
    def entry_name(self) -> EntryName:
        return EntryName(self.stage, self.key)

    @property
    def is_unused(self) -> bool:
        """Whether no run reads the entry, even if a run needs the artifact of the same key."""
        return self.kind == "left over"


@dataclass(frozen=True)
class RetentionRule:
    """Limits on the age and the total size of entries that no run needs."""

    grace_s: float | None  # Seconds without use after which an entry is removed. None: no age limit.
    # Size limit of the whole store in bytes. Above it, the least recently used entries are removed regardless of age.
    # None: no limit.
    quota: int | None = None


@dataclass(frozen=True)
class RetentionPlan:
    """Entries to remove and to keep, each with the reason, least recently used first.

    ``bytes_before`` and ``bytes_after`` are the size of the whole store before and after the removals. ``quota`` is its
    limit in bytes, or None.
    """

    removals: tuple[tuple[StoreEntry, str], ...]
    retained: tuple[tuple[StoreEntry, str], ...]
    bytes_before: int
    bytes_after: int
    quota: int | None = None

    @property
    def over_quota(self) -> int:
        """Number of bytes by which the store exceeds the quota after the removals. 0 if it meets the quota."""
        return max(0, self.bytes_after - self.quota) if self.quota is not None else 0


@dataclass(frozen=True)
class CollectedGarbage:
    """Entries that a garbage collection removed, and the bytes that it freed. For a dry run, the plan and 0 bytes."""

    plan: RetentionPlan
    bytes_freed: int


def list_store(root: Path) -> tuple[StoreEntry, ...]:
    """Return all entries that can be removed separately. Entries that disappear during the scan are omitted."""
    entries = []
    for directory in sorted(root.iterdir()) if root.is_dir() else []:
        if directory.name in (LOCKS, TRASH):
            continue
        if directory.is_dir() and not directory.is_symlink():
            for path in sorted(directory.iterdir()):
                if (kind := entry_kind(path)) is not None:
                    entries.append(_entry(directory.name, path, kind))
    return tuple(entry for entry in entries if entry is not None)


def store_bytes(root: Path) -> int:
    """Return the size of the whole store in bytes, including its databases and trash."""
    return directory_bytes(root) if root.is_dir() else 0


def explain_retention(runs: Path) -> dict[EntryName, str]:
    """Return the reason to keep each entry that the runs recorded in the directory ``runs`` need."""
    return _Needs(runs).now()


def collect_garbage(
    root: Path,
    runs: Path,
    rule: RetentionRule,
    now: float | None = None,
    on_wait: Callable[[], None] = lambda: None,
    *,
    dry_run: bool = False,
) -> CollectedGarbage:
    """Remove entries from the store at ``root`` that ``rule`` allows to remove and no run needs.

    ``runs`` is the directory of the run records. ``now`` is in seconds since the epoch; default: the current time.
    ``on_wait`` is called once if another process is collecting. With ``dry_run``, this only returns the plan.

    Raises:
        OSError: An entry cannot be moved or deleted. Entries removed before that are gone.
    """
    moment = time.time() if now is None else now
    if dry_run:
        return CollectedGarbage(_plan(root, explain_retention(runs), rule, moment), 0)
    state_directory(root, private=True)
    before = store_bytes(root)
    with hold_lock(state_directory(root / LOCKS) / _COLLECTION, remove=True, on_wait=on_wait):
        _empty_trash(root)
        needs = _Needs(runs)
        busy: set[tuple[str, str]] = set()
        removed: list[tuple[StoreEntry, str]] = []
        while True:
            plan = _plan(root, needs.now(), rule, moment, busy)
            if not plan.removals:
                break
            for entry, why in plan.removals:
                if _move_to_trash(root, entry, needs):
                    removed.append((entry, why))
                else:  # The next plan removes another entry to meet the quota.
                    busy.add((entry.stage, entry.name))
            _empty_trash(root)
        completed = RetentionPlan(tuple(removed), plan.retained, before, store_bytes(root), rule.quota)
    return CollectedGarbage(completed, max(0, before - completed.bytes_after))


class _Needs:
    """Entries that runs need. Each call of ``now`` reads the records of the runs again."""

    def __init__(self, runs: Path) -> None:
        self._reader = RunReader(runs)
        self._runs: tuple[RunUse, ...] = ()
        self._needed: dict[EntryName, str] = {}

    def now(self) -> dict[EntryName, str]:
        if (runs := self._reader.read()) != self._runs:
            self._runs, self._needed = runs, needed_by(runs, runs_that_count(runs))
        return self._needed


def _plan(
    root: Path,
    reasons_to_keep: Mapping[EntryName, str],
    rule: RetentionRule,
    now: float,
    busy: Collection[tuple[str, str]] = (),
) -> RetentionPlan:
    entries = list_store(root)
    trash = root / TRASH
    trash_bytes = directory_bytes(trash) if trash.is_dir() else 0
    other_bytes = store_bytes(root) - sum(entry.bytes for entry in entries) - trash_bytes
    return plan_retention(entries, reasons_to_keep, rule, now, other_bytes=max(0, other_bytes), busy=busy)


def _move_to_trash(root: Path, entry: StoreEntry, needs: _Needs) -> bool:
    """Move an entry into the trash. Return False if another process has locked it or a run now needs it."""
    path = root / entry.stage / entry.name
    trash = state_directory(root / TRASH) / f"{entry.stage}-{entry.name}-{time.time_ns()}"
    lock = root / LOCKS / (f"{entry.stage}-{entry.key}" if entry.key else _COLLECTION + "-other")
    descriptor = try_open_locked(lock, os.O_RDWR | os.O_CREAT)
    if descriptor is None:
        return False
    try:
        if not entry.is_unused and entry.entry_name in needs.now():
            return False
        try:
            path.rename(trash)
        except FileNotFoundError:
            return not os.path.lexists(path)  # Already gone.
        if not entry.is_unused and entry.entry_name in needs.now():
            with suppress(FileNotFoundError):
                trash.rename(path)
            return False
        # Flush the rename before deleting files. Otherwise a power cut could bring back the name without some files.
        fsync(path.parent)
        return True
    finally:
        try:
            lock.unlink(missing_ok=True)
        finally:
            os.close(descriptor)


def _empty_trash(root: Path) -> None:
    trash = root / TRASH
    for path in sorted(trash.iterdir()) if trash.is_dir() else []:
        with suppress(FileNotFoundError):  # Another process may be emptying the trash, too.
            if path.is_dir() and not path.is_symlink():
                HashMemo(root / HASHES).forget(path / name for name in regular_files(path)[0])
            remove_any(path)
    with suppress(OSError):
        trash.rmdir()


def _entry(stage: str, path: Path, kind: EntryKind) -> StoreEntry | None:
    try:
        used = path.lstat().st_mtime
        if kind == "unfinished":  # A growing journal does not change the modification time of its directory.
            used = max([used, *(file.lstat().st_mtime for file in path.rglob("*"))])
        size = directory_bytes(path)
    except FileNotFoundError:
        return None
    return StoreEntry(stage, path.name, path.name[:32] if KEY.match(path.name) else "", kind, size, used)


def needed_by(runs: Sequence[RunUse], counting: Mapping[str, str]) -> dict[EntryName, str]:
    """Return the entries that the runs in ``counting`` used, each with the strongest reason to keep it."""
    needed: dict[EntryName, str] = {}
    by_id = {run.run: run for run in runs}
    for run_id, why in counting.items():
        for name in by_id[run_id].used:
            if name not in needed or _rank(why) < _rank(needed[name]):
                needed[name] = why
    return needed


def plan_retention(
    entries: Iterable[StoreEntry],
    reasons_to_keep: Mapping[EntryName, str],
    rule: RetentionRule,
    now: float,
    *,
    other_bytes: int = 0,
    busy: Collection[tuple[str, str]] = (),
) -> RetentionPlan:
    """Decide which entries to remove.

    Args:
        entries: Entries of the store.
        reasons_to_keep: Entries that must stay, each with the reason.
        rule: Grace period and quota.
        now: Current time in seconds since the epoch. If the clock was set back, an entry may have a later time of use.
            It then counts as used now.
        other_bytes: Size in bytes of the parts of the store that are not entries, such as its databases.
        busy: Stage and name of each entry that another process has locked. These entries stay.
    """
    oldest_first = sorted(entries, key=lambda entry: (entry.used, entry.stage, entry.name))
    size = before = other_bytes + sum(entry.bytes for entry in oldest_first)
    removals: list[tuple[StoreEntry, str]] = []
    retained: list[tuple[StoreEntry, str]] = []
    for entry in oldest_first:
        age = max(0.0, now - entry.used)
        if (why := reasons_to_keep.get(entry.entry_name)) and not entry.is_unused:
            retained.append((entry, why))
        elif (entry.stage, entry.name) in busy:
            retained.append((entry, "in use"))
        elif rule.grace_s is not None and age >= rule.grace_s:
            removals.append((entry, _unused_for(age)))
            size -= entry.bytes
        elif rule.quota is not None and size > rule.quota:
            removals.append((entry, f"over the quota; {_unused_for(age)}"))
            size -= entry.bytes
        else:
            retained.append((entry, "in its grace period" if rule.grace_s is not None else "within the quota"))
    return RetentionPlan(tuple(removals), tuple(retained), before, size, rule.quota)


def _rank(why: str) -> tuple[int, str]:
    order = ("in use", "release of", "last runs of")
    return next((rank for rank, prefix in enumerate(order) if why.startswith(prefix)), len(order)), why


def _unused_for(age: float) -> str:
    days = age / 86_400.0
    return f"not used for {days:.0f} days" if days >= 1.95 else f"not used for {age / 3600.0:.1f} hours"

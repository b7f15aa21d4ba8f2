"""Decide which entries of a store to keep and which to remove, without accessing the disk.

An entry stays while a run needs it: a run in progress, the run that created the published release, or one of the last
runs of each profile. Each run records every entry that it requests from the store, including cache hits, so entries
need not refer to each other. The other entries are removed, least recently used first, if they are older than a grace
period, or until the store meets a quota::

    counting = runs_that_count(runs)
    plan = plan_retention(entries, needed_by(runs, counting), RetentionRule(grace_s=86_400.0), now)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

# Number of recent runs to keep for each profile. With two, one failed run does not discard the results before it.
LAST_RUNS = 2
RELEASED = "released"

EntryKind = Literal["artifact", "value", "unfinished", "left over"]


class EntryName(NamedTuple):
    """Stage of an entry and the first 32 hex digits of its key."""

    stage: str
    key: str


@dataclass(frozen=True)
class RunUse:
    """A run and the entries that it requested from the store.

    Args:
        profile: Name of the profile, or an empty string for a run without one.
        started: Start time in seconds since the epoch.
        status: Final status, or an empty string if the run is in progress or was killed.
        judged: Whether the run got far enough that the next run of the profile will need the same entries.
        is_live: Whether the run is in progress.
        used: For each entry that the run used, the subject that the run recorded for it, such as a model, or an empty
            string.
        bytes_created: Total size in bytes of the artifacts that the run created.
    """

    run: str
    flow: str
    profile: str
    started: float
    status: str
    judged: bool
    is_live: bool
    used: Mapping[EntryName, str]
    bytes_created: int = 0


@dataclass(frozen=True)
class StoreEntry:
    """File or directory in a store that can be removed separately.

    Args:
        stage: Name of the stage, or an empty string for an entry at the top of the store.
        key: First 32 hex digits of the key, or an empty string if the name does not contain a key.
        used: Time of creation or last use, in seconds since the epoch.
    """

    stage: str
    name: str
    key: str
    kind: EntryKind
    bytes: int
    used: float

    @property
    def entry_name(self) -> EntryName:
        return EntryName(self.stage, self.key)

    @property
    def is_unused(self) -> bool:
        """Whether no run reads the entry, even if a run needs the artifact of the same key."""
        return self.kind == "left over"


@dataclass(frozen=True)
class RetentionRule:
    """Limits on the age and the total size of entries that no run needs.

    Args:
        grace_s: Seconds without use after which an entry is removed. None: no age limit.
        quota: Size limit of the whole store in bytes. Above it, the least recently used entries are removed regardless
            of age. None: no limit.
    """

    grace_s: float | None
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


def runs_that_count(runs: Iterable[RunUse]) -> dict[str, str]:
    """Return the runs whose entries must be kept, as a dict from run ID to reason.

    For each flow and profile, these are the runs in progress; the last run, even if it was killed, because the next run
    resumes it; the last two judged runs; and the last run that published, because its merge is the champion.
    """
    by_profile: dict[tuple[str, str], list[RunUse]] = defaultdict(list)
    for run in runs:
        by_profile[run.flow, run.profile].append(run)
    counting: dict[str, str] = {}
    for (_, profile), group in sorted(by_profile.items()):
        group.sort(key=lambda run: (run.started, run.run))
        if profile:
            judged = [run for run in group if run.judged]
            for run in (*judged[-LAST_RUNS:], group[-1]):
                counting[run.run] = f"last runs of {profile}"
            for run in [run for run in judged if run.status == RELEASED][-1:]:
                counting[run.run] = f"release of {profile}"
        for run in group:
            if run.is_live:
                counting[run.run] = f"in use by a run of {profile}" if profile else "in use"
    return counting


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

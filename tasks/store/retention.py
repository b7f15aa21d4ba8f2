"""What of a store stays and what may go: a decision about values, without a look at any disk.

What somebody needs stays: a run that goes on, the run that released what is published, the last runs of each profile.
No reachability has to be followed, because a run notes everything that it asks the store for, what was cached too. The
rest goes, the least recently used first: what is older than a grace period, or as much as a quota demands::

    counting = runs_that_count(runs)
    plan = plan_retention(entries, needed_by(runs, counting), RetentionRule(grace_s=86_400.0), now)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

# Of each profile: two, so that a night that went wrong in a way nobody foresaw does not lose what was before it.
LAST_RUNS = 2
RELEASED = "released"

EntryKind = Literal["artifact", "value", "unfinished", "set aside", "left over"]


class EntryName(NamedTuple):
    """Names what a stage made: the stage, and the first 32 hex digits of the key."""

    stage: str
    key: str


@dataclass(frozen=True)
class RunUse:
    """A run, and what it asked the store for.

    Args:
        run: Its id.
        flow: What kind of run.
        profile: Whose; empty: nobody's.
        started: Seconds since the epoch.
        status: How it ended; empty: it has not, or was killed.
        judged: It got so far that what it used is what the next run of the profile will need.
        live: It goes on.
        used: Subjects by what was used.
        made: Bytes of the artifacts that it has made.
    """

    run: str
    flow: str
    profile: str
    started: float
    status: str
    judged: bool
    live: bool
    used: Mapping[EntryName, str]
    made: int = 0

    def with_life(self, live: bool) -> RunUse:
        """The same run, going on or over."""
        return replace(self, live=live)


@dataclass(frozen=True)
class StoreEntry:
    """Something in a store that can go by itself.

    Args:
        stage: Its directory; empty: it lies in the store itself.
        name: Of the file or directory there.
        key: First 32 hex digits; empty where the name tells none.
        bytes: On the disk.
        used: When it was made or last used, seconds since the epoch.
    """

    stage: str
    name: str
    key: str
    kind: EntryKind
    bytes: int
    used: float

    @property
    def made_by(self) -> EntryName:
        return EntryName(self.stage, self.key)


@dataclass(frozen=True)
class RetentionRule:
    """When something that nobody needs goes.

    Args:
        grace_s: After so many seconds without use; None: not for its age alone.
        quota: Bytes that the whole store may have; then the oldest go first, whatever their age. None: no limit.
    """

    grace_s: float | None
    quota: int | None = None


@dataclass(frozen=True)
class RetentionPlan:
    """What goes and what stays, each with why, the least recently used first.

    Args:
        bytes_before: Of the whole store.
        bytes_after: Once all of ``goes`` is gone.
    """

    goes: tuple[tuple[StoreEntry, str], ...]
    stays: tuple[tuple[StoreEntry, str], ...]
    bytes_before: int
    bytes_after: int
    quota: int | None = None

    @property
    def over_quota(self) -> int:
        """Bytes that are needed beyond the quota; 0: it is kept."""
        return max(0, self.bytes_after - self.quota) if self.quota is not None else 0


def runs_that_count(runs: Iterable[RunUse]) -> dict[str, str]:
    """Which runs keep what they used, and why, by id.

    Of each flow and profile: those that go on, the last one however it ended (what was killed goes on from there), the
    last two that were judged (nights on which nothing could be judged must not displace them), and the last that
    released: its merge is the champion.
    """
    by_profile: dict[tuple[str, str], list[RunUse]] = defaultdict(list)
    for run in runs:
        by_profile[run.flow, run.profile].append(run)
    counting: dict[str, str] = {}
    for (_, profile), those in sorted(by_profile.items()):
        those.sort(key=lambda one: (one.started, one.run))
        if profile:
            judged = [one for one in those if one.judged]
            for one in (*judged[-LAST_RUNS:], those[-1]):
                counting[one.run] = f"last runs of {profile}"
            for one in [one for one in judged if one.status == RELEASED][-1:]:
                counting[one.run] = f"release of {profile}"
        for one in those:
            if one.live:
                counting[one.run] = f"in use by a run of {profile}" if profile else "in use"
    return counting


def needed_by(runs: Sequence[RunUse], counting: Mapping[str, str]) -> dict[EntryName, str]:
    """Everything that one of the counting runs used, and why it is kept: the strongest of the reasons."""
    needed: dict[EntryName, str] = {}
    by_id = {one.run: one for one in runs}
    for run, why in counting.items():
        for name in by_id[run].used:
            if name not in needed or _rank(why) < _rank(needed[name]):
                needed[name] = why
    return needed


def plan_retention(
    entries: Iterable[StoreEntry],
    needed: Mapping[EntryName, str],
    rule: RetentionRule,
    now: float,
    *,
    beside: int = 0,
    busy: Collection[tuple[str, str]] = (),
) -> RetentionPlan:
    """Decide what goes.

    Args:
        entries: All that could go by itself.
        needed: What may not, with why.
        now: Seconds since the epoch. What was used later than that (a clock that was put back) was used now.
        beside: Bytes of the store that are no entries: its tables.
        busy: Stage and name of what somebody works on: it stays.
    """
    oldest_first = sorted(entries, key=lambda one: (one.used, one.stage, one.name))
    size = before = beside + sum(one.bytes for one in oldest_first)
    goes: list[tuple[StoreEntry, str]] = []
    stays: list[tuple[StoreEntry, str]] = []
    for entry in oldest_first:
        age = max(0.0, now - entry.used)
        if (why := needed.get(entry.made_by)) and entry.kind not in ("set aside", "left over"):
            stays.append((entry, why))
        elif (entry.stage, entry.name) in busy:
            stays.append((entry, "in use"))
        elif rule.grace_s is not None and age >= rule.grace_s:
            goes.append((entry, _unused_for(age)))
            size -= entry.bytes
        elif rule.quota is not None and size > rule.quota:
            goes.append((entry, f"over the quota; {_unused_for(age)}"))
            size -= entry.bytes
        else:
            stays.append((entry, "in its grace period" if rule.grace_s is not None else "within the quota"))
    return RetentionPlan(tuple(goes), tuple(stays), before, size, rule.quota)


def _rank(why: str) -> tuple[int, str]:
    order = ("in use", "release of", "last runs of")
    return next((at for at, start in enumerate(order) if why.startswith(start)), len(order)), why


def _unused_for(age: float) -> str:
    days = age / 86_400.0
    return f"not used for {days:.0f} days" if days >= 1.95 else f"not used for {age / 3600.0:.1f} hours"

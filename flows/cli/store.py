"""``mergegate store``: what the store holds and why, how large it is, whether it is whole, and what may go.

::

    mergegate store ls                        # every artifact: size, age, why it is kept
    mergegate store du                        # by stage
    mergegate store verify                    # every byte against its hash
    mergegate store gc --dry-run              # what would go; without --dry-run, it goes
    mergegate store gc --quota 50GB           # the least recently used, until the store fits

What a run, a release or the last runs of a profile need never goes. What goes by mistake all the same (somebody deletes
files) is a miss: the next run makes it again.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from rich.console import Console
from rich.table import Table

from mergegate.flows.cli.output import print_answer
from mergegate.merge_core.errors import InvalidInput, suggest
from mergegate.merge_core.wording import format_bytes, parse_bytes
from mergegate.tasks.stage import home, runs_directory, store_quota
from mergegate.tasks.store import (
    EntryName,
    RetentionPlan,
    RetentionRule,
    StoreEntry,
    collect_garbage,
    examine_store,
    explain_retention,
    forget_profile,
    list_store,
    plan_collection,
    read_runs,
    store_bytes,
)

_DAY_S = 86_400.0
_NOBODY = "nobody needs it"


@dataclass(frozen=True)
class _StageSize:
    """Of one stage: how much there is, and how many bytes of it are needed."""

    stage: str
    entries: int
    bytes: int
    needed: int


def list_artifacts(console: Console, as_json: bool) -> None:
    """Everything in the store, by stage, the last used first: key, what of, size, age, why it is kept.

    Raises:
        OSError: when the store cannot be read.
    """
    needed, now = explain_retention(runs_directory()), time.time()
    subjects = {name: subject for run in read_runs(runs_directory()) for name, subject in run.used.items()}
    entries = sorted(list_store(home() / "store"), key=lambda one: (one.stage, -one.used, one.name))
    told = [(one, subjects.get(one.made_by, ""), _why(one, needed)) for one in entries]
    if as_json:
        rows = [{**_plain(one, now), "subject": subject, "why": why} for one, subject, why in told]
        print_answer("listed", f"{len(rows)} artifacts", {"home": str(home()), "entries": rows})
        return
    table = _table("stage", "key", "of", ">size", ">age", "why it is kept")
    for one, subject, why in told:
        key = one.key[:12] or one.name
        named = key if one.kind in ("artifact", "value") else f"{key} ({one.kind})"
        table.add_row(one.stage, named, subject, format_bytes(one.bytes), _age(now - one.used), why)
    console.print(table if told else "the store is empty")


def print_sizes(console: Console, as_json: bool) -> None:
    """How large the store is, by stage, and how much of that is needed.

    Raises:
        InvalidInput: for a quota that is none.
        OSError: when the store cannot be read.
    """
    needed, quota = explain_retention(runs_directory()), store_quota()
    total, by_stage = store_bytes(home() / "store"), defaultdict[str, list[StoreEntry]](list)
    for entry in list_store(home() / "store"):
        by_stage[entry.stage or "set aside"].append(entry)
    sizes = [_stage_size(stage, those, needed) for stage, those in by_stage.items()]
    sizes.sort(key=lambda one: (-one.bytes, one.stage))
    if as_json:
        stages = [asdict(one) for one in sizes]
        more = {"home": str(home()), "bytes": total, "quota": quota, "stages": stages}
        print_answer("listed", format_bytes(total), more)
        return
    table = _table("stage", ">entries", ">size", ">needed")
    for one in sizes:
        table.add_row(one.stage, str(one.entries), format_bytes(one.bytes), format_bytes(one.needed))
    table.add_row("tables, locks", "", format_bytes(max(0, total - sum(one.bytes for one in sizes))), "")
    console.print(table)
    limit = f" of {format_bytes(quota)}" if quota is not None else ""
    needs = sum(one.needed for one in sizes)
    console.print(f"{home() / 'store'}: {format_bytes(total)}{limit}, {format_bytes(needs)} needed")


def verify_store(console: Console, as_json: bool) -> int:
    """Read every byte of the store and compare; the exit code: 3 where something is damaged, else 0.

    Raises:
        OSError: when the store cannot be read.
    """
    entries = [one for one in list_store(home() / "store") if one.kind in ("artifact", "value")]
    with console.status(f"reading {format_bytes(sum(one.bytes for one in entries))}"):
        found = [one for one in examine_store(home() / "store", deep=True) if one.kind == "damaged"]
    if as_json:
        told = [{"path": str(one.path), "what": one.what, "bytes": one.bytes} for one in found]
        message = f"{len(told)} of {len(entries)} artifacts are damaged"
        print_answer("damaged" if found else "sound", message, {"read": len(entries), "damaged": told})
        return 3 if found else 0
    for one in found:
        console.print(f"  damaged  {one.path}: {one.what}", markup=False)
    if found:
        console.print(
            "  the next run that wants them makes them again; mergegate doctor --mend sets aside what it sees"
        )
    else:
        console.print(f"{home() / 'store'}: {len(entries)} artifacts and values, every byte as it was made")
    return 3 if found else 0


def collect_store(
    console: Console,
    as_json: bool,
    *,
    dry_run: bool = False,
    older: float | None = None,
    quota: str | None = None,
    forget: Sequence[str] = (),
) -> None:
    """Remove what nobody needs, and say what went and what stays.

    Args:
        dry_run: Only say it.
        older: Days without use after which something goes; absent: one, or, where there is a quota, only as much goes
            as it demands.
        quota: What the store may have, such as ``50GB``; absent: no limit.
        forget: Profiles that are not run any more: nothing is kept for them.

    Raises:
        InvalidInput: for a quota that is none, or a profile that has not run.
        OSError: when something cannot be removed.
    """
    limit = parse_bytes(quota, "--quota") if quota is not None else None
    if older is None and limit is None:
        older = 1.0
    rule = RetentionRule(None if older is None else older * _DAY_S, limit)
    _forget(forget, dry_run)
    root, runs = home() / "store", runs_directory()
    if dry_run:
        plan, freed = plan_collection(root, runs, rule), 0
    elif root.is_dir():
        done = collect_garbage(root, runs, rule, on_wait=lambda: console.print("somebody else is collecting; waiting"))
        plan, freed = done.plan, done.bytes_freed
    else:
        plan, freed = RetentionPlan((), (), 0, 0, limit), 0
    if as_json:
        now = time.time()
        told = {name: [{**_plain(one, now), "why": why} for one, why in part] for name, part in _parts(plan)}
        sizes = {"before": plan.bytes_before, "after": plan.bytes_after, "over_quota": plan.over_quota}
        more = {"dry_run": dry_run, "bytes_freed": freed, **sizes, **told}
        print_answer("planned" if dry_run else "collected", f"{format_bytes(freed)} freed", more)
        return
    for one, why in plan.goes:
        place = f"{one.stage}/{one.name}" if one.stage else one.name
        console.print(
            f"  {'would go' if dry_run else 'gone'}  {place} ({format_bytes(one.bytes)}): {why}", markup=False
        )
    reasons: dict[str, list[int]] = defaultdict(list)
    for one, why in plan.stays:
        reasons[why].append(one.bytes)
    for why, sizes_of in sorted(reasons.items(), key=lambda item: -sum(item[1])):
        console.print(f"  stays  {len(sizes_of)} ({format_bytes(sum(sizes_of))}): {why}", markup=False)
    verb = "would be" if dry_run else "is"
    console.print(f"{root}: {format_bytes(plan.bytes_before)}, {verb} {format_bytes(plan.bytes_after)} now")
    if plan.over_quota:
        console.print(f"  {format_bytes(plan.over_quota)} over the quota: all of the rest is needed", markup=False)


def _forget(profiles: Sequence[str], dry_run: bool) -> None:
    known = {run.profile for run in read_runs(runs_directory()) if run.profile}
    for profile in profiles:
        if profile not in known:
            raise InvalidInput(
                "--forget", found=f"{profile!r}, of which no run is known", expected=suggest(profile, known)
            )
        if dry_run:
            raise InvalidInput("--forget", found="a dry run forgets nothing", remedy="leave one of the two away")
    for profile in profiles:
        forget_profile(runs_directory(), profile)


def _stage_size(stage: str, those: Sequence[StoreEntry], needed: Mapping[EntryName, str]) -> _StageSize:
    wanted = sum(one.bytes for one in those if _why(one, needed) != _NOBODY)
    return _StageSize(stage, len(those), sum(one.bytes for one in those), wanted)


def _why(entry: StoreEntry, needed: Mapping[EntryName, str]) -> str:
    return needed.get(entry.made_by, _NOBODY) if entry.kind in ("artifact", "value", "unfinished") else _NOBODY


def _parts(plan: RetentionPlan) -> tuple[tuple[str, tuple[tuple[StoreEntry, str], ...]], ...]:
    return ("goes", plan.goes), ("stays", plan.stays)


def _plain(entry: StoreEntry, now: float) -> dict[str, object]:
    age = round(max(0.0, now - entry.used))
    return {"stage": entry.stage, "name": entry.name, "kind": entry.kind, "bytes": entry.bytes, "age_s": age}


def _age(seconds: float) -> str:
    days, hours = seconds / _DAY_S, seconds / 3600
    return f"{days:.0f} d" if days >= 1.95 else f"{hours:.0f} h" if hours >= 0.95 else f"{max(0, seconds / 60):.0f} min"


def _table(*columns: str) -> Table:
    """Lines for people; a column that begins with ``>`` holds numbers."""
    table = Table(box=None, pad_edge=False)
    for column in columns:
        table.add_column(column.lstrip(">"), justify="right" if column[0] == ">" else "left", no_wrap=True)
    return table

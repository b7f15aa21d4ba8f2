"""``mergegate store``: list, measure and verify the store, and remove unneeded artifacts.

::

    mergegate store ls                        # every artifact: size, age, why it is kept
    mergegate store du                        # by stage
    mergegate store verify                    # every byte against its hash
    mergegate store gc --dry-run              # what would be removed; without --dry-run, it is removed
    mergegate store gc --quota 50GB           # the least recently used, until the store fits

Artifacts that a run, a release or the last runs of a profile need are never removed. A file that is missing anyway (a
user deleted it) is a cache miss, and the next run rebuilds it.
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
_NOT_NEEDED = "nobody needs it"


@dataclass(frozen=True)
class _StageSize:
    """Size of one stage: number of entries, bytes, and needed bytes."""

    stage: str
    entries: int
    bytes: int
    needed: int


def list_artifacts(console: Console, as_json: bool) -> None:
    """Print all artifacts by stage, the last used first: key, subject, size, age, and why they are kept.

    Raises:
        OSError: The store cannot be read.
    """
    needed, now = explain_retention(runs_directory()), time.time()
    subjects = {name: subject for run in read_runs(runs_directory()) for name, subject in run.used.items()}
    entries = sorted(list_store(home() / "store"), key=lambda entry: (entry.stage, -entry.used, entry.name))
    rows_by_entry = [(entry, subjects.get(entry.made_by, ""), _why(entry, needed)) for entry in entries]
    if as_json:
        rows = [{**_plain(entry, now), "subject": subject, "why": why} for entry, subject, why in rows_by_entry]
        print_answer("listed", f"{len(rows)} artifacts", {"home": str(home()), "entries": rows})
        return
    table = _table("stage", "key", "of", ">size", ">age", "why it is kept")
    for entry, subject, why in rows_by_entry:
        key = entry.key[:12] or entry.name
        label = key if entry.kind in ("artifact", "value") else f"{key} ({entry.kind})"
        table.add_row(entry.stage, label, subject, format_bytes(entry.bytes), _age(now - entry.used), why)
    console.print(table if rows_by_entry else "the store is empty")


def print_sizes(console: Console, as_json: bool) -> None:
    """Print the size of the store by stage, and how much of it is needed.

    Raises:
        InvalidInput: The quota is invalid.
        OSError: The store cannot be read.
    """
    needed, quota = explain_retention(runs_directory()), store_quota()
    total, by_stage = store_bytes(home() / "store"), defaultdict[str, list[StoreEntry]](list)
    for entry in list_store(home() / "store"):
        by_stage[entry.stage or "set aside"].append(entry)
    sizes = [_stage_size(stage, entries, needed) for stage, entries in by_stage.items()]
    sizes.sort(key=lambda stage_size: (-stage_size.bytes, stage_size.stage))
    if as_json:
        stages = [asdict(stage_size) for stage_size in sizes]
        more = {"home": str(home()), "bytes": total, "quota": quota, "stages": stages}
        print_answer("listed", format_bytes(total), more)
        return
    table = _table("stage", ">entries", ">size", ">needed")
    for stage_size in sizes:
        table.add_row(
            stage_size.stage, str(stage_size.entries), format_bytes(stage_size.bytes), format_bytes(stage_size.needed)
        )
    table.add_row("tables, locks", "", format_bytes(max(0, total - sum(stage_size.bytes for stage_size in sizes))), "")
    console.print(table)
    limit = f" of {format_bytes(quota)}" if quota is not None else ""
    needs = sum(stage_size.needed for stage_size in sizes)
    console.print(f"{home() / 'store'}: {format_bytes(total)}{limit}, {format_bytes(needs)} needed")


def verify_store(console: Console, as_json: bool) -> int:
    """Read and compare every byte of the store, and return the exit code: 3 if anything is damaged, otherwise 0.

    Raises:
        OSError: The store cannot be read.
    """
    entries = [entry for entry in list_store(home() / "store") if entry.kind in ("artifact", "value")]
    with console.status(f"reading {format_bytes(sum(entry.bytes for entry in entries))}"):
        damaged = [finding for finding in examine_store(home() / "store", deep=True) if finding.kind == "damaged"]
    if as_json:
        rows = [{"path": str(finding.path), "what": finding.what, "bytes": finding.bytes} for finding in damaged]
        message = f"{len(rows)} of {len(entries)} artifacts are damaged"
        print_answer("damaged" if damaged else "sound", message, {"read": len(entries), "damaged": rows})
        return 3 if damaged else 0
    for finding in damaged:
        console.print(f"  damaged  {finding.path}: {finding.what}", markup=False)
    if damaged:
        console.print(
            "  the next run that wants them makes them again; mergegate doctor --mend sets aside what it sees"
        )
    else:
        console.print(f"{home() / 'store'}: {len(entries)} artifacts and values, every byte as it was made")
    return 3 if damaged else 0


def collect_store(
    console: Console,
    as_json: bool,
    *,
    dry_run: bool = False,
    older: float | None = None,
    quota: str | None = None,
    forget: Sequence[str] = (),
) -> None:
    """Remove unneeded entries, and print the removed and the remaining ones.

    Args:
        dry_run: Whether to only print the plan.
        older: Days without use after which an entry is removed. Default: one, or with a quota only as much as the quota
            requires.
        quota: Maximum size of the store, such as ``50GB``. Default: no limit.
        forget: Profiles that are no longer run, so that nothing is kept for them.

    Raises:
        InvalidInput: The quota is invalid, or a profile has never run.
        OSError: An entry cannot be removed.
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
        collection = collect_garbage(
            root, runs, rule, on_wait=lambda: console.print("somebody else is collecting; waiting")
        )
        plan, freed = collection.plan, collection.bytes_freed
    else:
        plan, freed = RetentionPlan((), (), 0, 0, limit), 0
    if as_json:
        now = time.time()
        entries = {name: [{**_plain(entry, now), "why": why} for entry, why in part] for name, part in _parts(plan)}
        sizes = {"before": plan.bytes_before, "after": plan.bytes_after, "over_quota": plan.over_quota}
        more = {"dry_run": dry_run, "bytes_freed": freed, **sizes, **entries}
        print_answer("planned" if dry_run else "collected", f"{format_bytes(freed)} freed", more)
        return
    for entry, why in plan.goes:
        name = f"{entry.stage}/{entry.name}" if entry.stage else entry.name
        console.print(
            f"  {'would go' if dry_run else 'gone'}  {name} ({format_bytes(entry.bytes)}): {why}", markup=False
        )
    reasons: dict[str, list[int]] = defaultdict(list)
    for entry, why in plan.stays:
        reasons[why].append(entry.bytes)
    for why, sizes_of in sorted(reasons.items(), key=lambda item: -sum(item[1])):
        console.print(f"  stays  {len(sizes_of)} ({format_bytes(sum(sizes_of))}): {why}", markup=False)
    verb = "would be" if dry_run else "is"
    console.print(f"{root}: {format_bytes(plan.bytes_before)}, {verb} {format_bytes(plan.bytes_after)} now")
    if plan.over_quota:
        console.print(f"  {format_bytes(plan.over_quota)} over the quota: all of the rest is needed", markup=False)


def _forget(profiles: Sequence[str], dry_run: bool) -> None:
    names = {run.profile for run in read_runs(runs_directory()) if run.profile}
    for profile in profiles:
        if profile not in names:
            raise InvalidInput(
                "--forget", found=f"{profile!r}, of which no run is known", expected=suggest(profile, names)
            )
        if dry_run:
            raise InvalidInput("--forget", found="a dry run forgets nothing", remedy="leave one of the two away")
    for profile in profiles:
        forget_profile(runs_directory(), profile)


def _stage_size(stage: str, entries: Sequence[StoreEntry], needed: Mapping[EntryName, str]) -> _StageSize:
    needed_bytes = sum(entry.bytes for entry in entries if _why(entry, needed) != _NOT_NEEDED)
    return _StageSize(stage, len(entries), sum(entry.bytes for entry in entries), needed_bytes)


def _why(entry: StoreEntry, needed: Mapping[EntryName, str]) -> str:
    return needed.get(entry.made_by, _NOT_NEEDED) if entry.kind in ("artifact", "value", "unfinished") else _NOT_NEEDED


def _parts(plan: RetentionPlan) -> tuple[tuple[str, tuple[tuple[StoreEntry, str], ...]], ...]:
    return ("goes", plan.goes), ("stays", plan.stays)


def _plain(entry: StoreEntry, now: float) -> dict[str, object]:
    age = round(max(0.0, now - entry.used))
    return {"stage": entry.stage, "name": entry.name, "kind": entry.kind, "bytes": entry.bytes, "age_s": age}


def _age(seconds: float) -> str:
    days, hours = seconds / _DAY_S, seconds / 3600
    return f"{days:.0f} d" if days >= 1.95 else f"{hours:.0f} h" if hours >= 0.95 else f"{max(0, seconds / 60):.0f} min"


def _table(*columns: str) -> Table:
    """Return a table for users. A column whose title starts with ``>`` has numbers."""
    table = Table(box=None, pad_edge=False)
    for column in columns:
        table.add_column(column.lstrip(">"), justify="right" if column[0] == ">" else "left", no_wrap=True)
    return table

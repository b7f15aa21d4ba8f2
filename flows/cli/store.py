"""``mergegate store`` and ``doctor``: list and verify the store, remove unneeded artifacts, and repair the state.

::

    mergegate store ls                        # every artifact: size, age, reason to keep it
    mergegate store du                        # by stage
    mergegate store verify                    # compares every file with its recorded hash
    mergegate store gc --dry-run              # what would be removed; without --dry-run, it is removed
    mergegate store gc --quota 50GB           # the least recently used, until the store fits

Artifacts that a run, a release or the last runs of a profile need are never removed. If a user deletes a file, the next
run rebuilds it.

Runs work without ``mergegate doctor``, because they treat damage as a cache miss and rebuild the artifact. The command
reports all sizes and every file that is damaged, set aside or left over, and which tools with environments of their own
are installed. ``--repair`` removes damaged caches and leftover files, and sets damaged records aside.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, NamedTuple

import typer
from rich.table import Table

from mergegate.flows.cli.command import JsonOption, command_context
from mergegate.flows.operations.console import print_answer
from mergegate.merge_core.errors import InvalidInput, suggest
from mergegate.merge_core.files import ASIDE
from mergegate.merge_core.wording import format_bytes, parse_bytes
from mergegate.tasks.base.stage import home, runs_directory, store_quota
from mergegate.tasks.base.store import (
    EntryName,
    RetentionPlan,
    RetentionRule,
    StateFinding,
    StoreEntry,
    collect_garbage,
    damaged_finding,
    directory_bytes,
    examine_database,
    examine_store,
    explain_retention,
    forget_runs,
    leftover_finding,
    list_store,
    mend_state,
    read_runs,
    store_bytes,
)

_DAY_S = 86_400.0
_NOT_NEEDED = "not needed"


class _StageSize(NamedTuple):
    """Size of all entries of one stage: their number, their bytes, and the bytes that are needed."""

    stage: str
    entries: int
    bytes: int
    needed: int


def store_ls_command(as_json: JsonOption = False) -> None:
    """List every artifact and the reason to keep it."""
    with command_context(as_json) as console:
        needed, now = explain_retention(runs_directory()), time.time()
        subjects = {name: subject for run in read_runs(runs_directory()) for name, subject in run.used.items()}
        entries = sorted(list_store(home() / "store"), key=lambda entry: (entry.stage, -entry.used, entry.name))
        rows_by_entry = [(entry, subjects.get(entry.entry_name, ""), _reason(entry, needed)) for entry in entries]
        if as_json:
            rows = [{**_plain(entry, now), "subject": subject, "why": why} for entry, subject, why in rows_by_entry]
            print_answer("listed", f"{len(rows)} artifacts", {"home": str(home()), "entries": rows})
            return
        table = _table("stage", "key", "of", ">size", ">age", "kept because")
        for entry, subject, why in rows_by_entry:
            key = entry.key[:12] or entry.name
            label = key if entry.kind in ("artifact", "value") else f"{key} ({entry.kind})"
            seconds = max(0.0, now - entry.used)
            days, hours = seconds / _DAY_S, seconds / 3600
            age = f"{days:.0f} d" if days >= 1.95 else f"{hours:.0f} h" if hours >= 0.95 else f"{seconds / 60:.0f} min"
            table.add_row(entry.stage, label, subject, format_bytes(entry.bytes), age, why)
        console.print(table if rows_by_entry else "the store is empty")


def store_du_command(as_json: JsonOption = False) -> None:
    """Show the size of the store by stage."""
    with command_context(as_json) as console:
        needed, quota = explain_retention(runs_directory()), store_quota()
        total, by_stage = store_bytes(home() / "store"), defaultdict[str, list[StoreEntry]](list)
        for entry in list_store(home() / "store"):
            by_stage[entry.stage].append(entry)
        sizes = [
            _StageSize(
                stage,
                len(entries),
                sum(entry.bytes for entry in entries),
                sum(entry.bytes for entry in entries if _reason(entry, needed) != _NOT_NEEDED),
            )
            for stage, entries in by_stage.items()
        ]
        sizes.sort(key=lambda size: (-size.bytes, size.stage))
        if as_json:
            more = {"home": str(home()), "bytes": total, "quota": quota, "stages": [size._asdict() for size in sizes]}
            print_answer("listed", format_bytes(total), more)
            return
        table = _table("stage", ">entries", ">size", ">needed")
        for size in sizes:
            table.add_row(size.stage, str(size.entries), format_bytes(size.bytes), format_bytes(size.needed))
        rest = max(0, total - sum(size.bytes for size in sizes))
        table.add_row("tables, locks", "", format_bytes(rest), "")
        console.print(table)
        limit = f" of {format_bytes(quota)}" if quota is not None else ""
        needs = sum(size.needed for size in sizes)
        console.print(f"{home() / 'store'}: {format_bytes(total)}{limit}, {format_bytes(needs)} needed")


def store_verify_command(as_json: JsonOption = False) -> None:
    """Compare every file of the store with its recorded hash.

    The exit code is 3 if anything is damaged.
    """
    with command_context(as_json) as console:
        entries = [entry for entry in list_store(home() / "store") if entry.kind in ("artifact", "value")]
        with console.status(f"reading {format_bytes(sum(entry.bytes for entry in entries))}"):
            damaged = [finding for finding in examine_store(home() / "store", deep=True) if finding.kind == "damaged"]
        if as_json:
            rows = [
                {"path": str(finding.path), "what": finding.explanation, "bytes": finding.bytes} for finding in damaged
            ]
            message = f"{len(rows)} of {len(entries)} artifacts are damaged"
            print_answer("damaged" if damaged else "sound", message, {"read": len(entries), "damaged": rows})
        else:
            for finding in damaged:
                console.print(f"  damaged  {finding.path}: {finding.explanation}")
            if damaged:
                console.print("  the next run that needs them rebuilds them; mergegate doctor --repair removes them")
            else:
                console.print(f"{home() / 'store'}: {len(entries)} artifacts and values, none of them damaged")
        raise typer.Exit(3 if damaged else 0)


def store_gc_command(
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List the entries to remove, without removing them.")
    ] = False,
    older_than: Annotated[
        float | None,
        typer.Option(
            metavar="DAYS",
            min=0,
            help="Remove unneeded entries that were not used for this many days.",
            show_default="1, or with --quota only as much as necessary",
        ),
    ] = None,
    quota: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Maximum size of the store, for example 50GB. The least recently used entries are removed.",
        ),
    ] = None,
    forget: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PROFILE", help="Profile that is no longer run, so that its artifacts may be removed. Repeatable."
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Remove artifacts that nothing needs.

    Artifacts of active runs, of releases and of the last runs of each profile stay. This is safe while runs are active.
    """
    with command_context(as_json) as console:
        limit = parse_bytes(quota, "--quota") if quota is not None else None
        if older_than is None and limit is None:
            older_than = 1.0
        rule = RetentionRule(None if older_than is None else older_than * _DAY_S, limit)
        names = {run.profile for run in read_runs(runs_directory()) if run.profile}
        for profile in forget or ():
            if profile not in names:
                raise InvalidInput(
                    "--forget",
                    found=f"no recorded run of {profile!r}",
                    expected=suggest(profile, names) or "a profile that has already run here",
                )
            if dry_run:
                raise InvalidInput("--forget", found="it has no effect in a dry run", remedy="omit one of the options")
        for profile in forget or ():
            forget_runs(runs_directory(), profile)
        root, runs = home() / "store", runs_directory()
        if dry_run or root.is_dir():
            wait = partial(console.print, "another process is collecting garbage; waiting for it")
            collection = collect_garbage(root, runs, rule, on_wait=wait, dry_run=dry_run)
            plan, freed = collection.plan, collection.bytes_freed
        else:
            plan, freed = RetentionPlan((), (), 0, 0, limit), 0
        if as_json:
            now = time.time()
            removed = [{**_plain(entry, now), "why": why} for entry, why in plan.removals]
            kept = [{**_plain(entry, now), "why": why} for entry, why in plan.retained]
            sizes = {"before": plan.bytes_before, "after": plan.bytes_after, "over_quota": plan.over_quota}
            more = {"dry_run": dry_run, "bytes_freed": freed, **sizes, "goes": removed, "stays": kept}
            print_answer("planned" if dry_run else "collected", f"{format_bytes(freed)} freed", more)
            return
        for entry, why in plan.removals:
            name = f"{entry.stage}/{entry.name}" if entry.stage else entry.name
            verb = "would remove" if dry_run else "removed"
            console.print(f"  {verb}  {name} ({format_bytes(entry.bytes)}): {why}")
        reasons: dict[str, list[int]] = defaultdict(list)
        for entry, why in plan.retained:
            reasons[why].append(entry.bytes)
        for why, entry_sizes in sorted(reasons.items(), key=lambda item: -sum(item[1])):
            console.print(f"  kept  {len(entry_sizes)} ({format_bytes(sum(entry_sizes))}): {why}")
        change = "{} now, {} after mergegate store gc" if dry_run else "{} before, {} now"
        before_after = (format_bytes(plan.bytes_before), format_bytes(plan.bytes_after))
        console.print(f"{root}: {change.format(*before_after)}")
        if plan.over_quota:
            console.print(f"  {format_bytes(plan.over_quota)} over the quota, because the rest is needed")


def _reason(entry: StoreEntry, reasons: Mapping[EntryName, str]) -> str:
    """Return the reason to keep an entry."""
    return (
        reasons.get(entry.entry_name, _NOT_NEEDED) if entry.kind in ("artifact", "value", "unfinished") else _NOT_NEEDED
    )


def _plain(entry: StoreEntry, now: float) -> dict[str, object]:
    age = round(max(0.0, now - entry.used))
    return {"stage": entry.stage, "name": entry.name, "kind": entry.kind, "bytes": entry.bytes, "age_s": age}


def _table(*columns: str) -> Table:
    """Return an empty table. A column whose title starts with ``>`` aligns right."""
    table = Table(box=None, pad_edge=False)
    for column in columns:
        is_number = column[0] == ">"
        table.add_column(column.lstrip(">"), justify="right" if is_number else "left", no_wrap=is_number)
    return table


_FOLDERS = ("anchors", "logs", "prefect", "reports", "runs", "samples", "store", "sweeps")


def doctor_command(
    repair: Annotated[
        bool, typer.Option("--repair", help="Remove damaged and leftover files, and set damaged records aside.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Find damaged and leftover files of this project.

    The command also lists the tools that have environments of their own. The exit code is 3 if damage remains.
    """
    with command_context(as_json) as console:
        from mergegate.tasks.release.report import HISTORY, mend_history

        directory = home()
        findings = list(_examine(directory))
        actions = [""] * len(findings)
        for number, finding in enumerate(findings if repair else ()):
            if finding.path.name == HISTORY and finding.path.is_file():  # only its damaged lines are removed
                mend_history(finding.path.parent)
                actions[number] = "set aside; undamaged lines stay"
            else:
                actions[number] = mend_state(finding)
        pairs = list(zip(findings, actions, strict=True))
        is_damaged = any(finding.kind == "damaged" and not action for finding, action in pairs)
        sizes = {name: directory_bytes(directory / name) for name in _FOLDERS if (directory / name).exists()}
        if as_json:
            rows = [
                {
                    "kind": finding.kind,
                    "path": str(finding.path),
                    "what": finding.explanation,
                    "bytes": finding.bytes,
                    "done": action,
                }
                for finding, action in pairs
            ]
            tools = [dict(zip(("purpose", "tool", "remedy"), line, strict=True)) for line in _optional_tools()]
            more = {"home": str(directory), "sizes": sizes, "found": rows, "tools": tools}
            print_answer("damaged" if is_damaged else "sound", f"{len(rows)} findings", more)
        else:
            listed = ", ".join(f"{name} {format_bytes(size)}" for name, size in sizes.items())
            console.print(f"{directory}: {listed or 'empty'}")
            for finding, action in pairs:
                ending = f" → {action}" if action else ""
                details = f"{finding.path} ({format_bytes(finding.bytes)}): {finding.explanation}{ending}"
                console.print(f"  {finding.kind:<10}  {details}")
            if not findings:
                console.print("  no damaged and no leftover files")
            elif is_damaged:
                console.print("  the next run rebuilds what it needs; mergegate doctor --repair cleans up now")
            for purpose, tool, remedy in _optional_tools():
                console.print(f"  {purpose:<22} {tool or f'not installed: {remedy}'}")
        raise typer.Exit(3 if is_damaged else 0)


def _optional_tools() -> Iterator[tuple[str, str, str]]:
    """Yield the purpose of each tool that has an environment of its own, its name and version, and how to install it.

    The name is empty if the tool is not installed.
    """
    from mergegate.tasks.quality.serve import ServeSettings, find_server
    from mergegate.tasks.quality.variants import variant_formats

    formats, root = variant_formats(), Path()
    gguf = formats["gguf"].model_validate({"format": "gguf", "types": ("Q8_0",)})
    tensors = formats["compressed-tensors"].model_validate({"format": "compressed-tensors", "scheme": "FP8_DYNAMIC"})
    tools: dict[str, Callable[[], str]] = {
        "GGUF variants": lambda: gguf.check(root),
        "FP8 and INT8 variants": lambda: tensors.check(root),
        "serving with vLLM": lambda: find_server(ServeSettings(), root).label,
    }
    for purpose, find in tools.items():
        try:
            yield purpose, find(), ""
        except InvalidInput as missing:
            yield purpose, "", missing.remedy


def _examine(directory: Path) -> Iterator[StateFinding]:
    from mergegate.tasks.quality.gate import damaged_records
    from mergegate.tasks.release.report import HISTORY, read_history

    if not directory.is_dir():
        return
    for entry in sorted(directory.iterdir()):
        if ASIDE not in entry.name and entry.name in _FOLDERS and not entry.is_dir():
            yield damaged_finding(entry, "not a directory")
        elif (finding := leftover_finding(entry)) is not None:
            yield finding
    yield from examine_store(directory / "store")
    yield from examine_database(directory / "prefect" / "prefect.db")
    for damage in damaged_records():
        yield damaged_finding(damage.path, damage.reason)
    for folder in ("anchors", "prefect", "reports", "runs", "samples"):
        if (directory / folder).is_dir():
            for entry in sorted((directory / folder).iterdir()):
                if (finding := leftover_finding(entry)) is not None:
                    yield finding
                elif entry.suffix == ".html" and (entry.is_symlink() or not entry.is_file()):
                    yield damaged_finding(entry, "not a file")
    reports = directory / "reports"
    if not reports.is_dir():
        return
    if history_damage := read_history(reports).damage_sentence():
        yield damaged_finding(reports / HISTORY, history_damage.rstrip("."))
    for page in sorted(reports.glob("*/*")):
        if (finding := leftover_finding(page)) is not None:
            yield finding
        elif page.is_symlink() or not page.is_file():
            yield damaged_finding(page, "not a file")

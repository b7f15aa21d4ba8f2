"""``mergegate doctor``: examine this project's state and repair it.

A run needs no doctor, because it treats damage as a cache miss and rebuilds. This command reports files that are
damaged, set aside or left over, and all sizes. ``--mend`` sets damaged files aside and removes unused ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rich.console import Console

from mergegate.flows.cli.output import print_answer
from mergegate.merge_core.files import ASIDE
from mergegate.merge_core.wording import format_bytes
from mergegate.tasks.gate import damaged_anchor_records
from mergegate.tasks.report import HISTORY, mend_history, read_history
from mergegate.tasks.stage import home
from mergegate.tasks.store import (
    StateFinding,
    directory_bytes,
    examine_database,
    examine_store,
    is_leftover,
    mend_state,
    set_aside_count,
)

_FOLDERS = ("anchors", "logs", "prefect", "reports", "runs", "store", "sweeps")


def examine_project(console: Console, as_json: bool, *, mend: bool) -> int:
    """Print the findings, and return the exit code: 3 if damage remains, otherwise 0.

    Raises:
        OSError: The state cannot be read or repaired.
    """
    directory = home()
    findings = list(_examine(directory))
    actions = [_mend(finding) if mend else "" for finding in findings]
    is_damaged = any(
        finding.kind == "damaged" and not action for finding, action in zip(findings, actions, strict=True)
    )
    sizes = {name: directory_bytes(directory / name) for name in _FOLDERS if (directory / name).exists()}
    if as_json:
        rows = [
            {
                "kind": finding.kind,
                "path": str(finding.path),
                "what": finding.what,
                "bytes": finding.bytes,
                "done": action,
            }
            for finding, action in zip(findings, actions, strict=True)
        ]
        more = {"home": str(directory), "sizes": sizes, "found": rows}
        print_answer("damaged" if is_damaged else "sound", f"{len(rows)} things found", more)
        return 3 if is_damaged else 0
    listed = ", ".join(f"{name} {format_bytes(size)}" for name, size in sizes.items())
    console.print(f"{directory}: {listed or 'nothing here yet'}")
    for finding, action in zip(findings, actions, strict=True):
        ending = f" → {action}" if action else ""
        console.print(
            f"  {finding.kind:<10}  {finding.path} ({format_bytes(finding.bytes)}): {finding.what}{ending}",
            markup=False,
        )
    if not findings:
        console.print("  nothing is damaged, nothing is left over")
    elif is_damaged:
        console.print("  the next run makes again what it needs of it; mergegate doctor --mend tidies up now")
    return 3 if is_damaged else 0


def _mend(finding: StateFinding) -> str:
    """Repair a finding and return a description. In the history, only damaged lines are removed."""
    if finding.path.name != HISTORY or not finding.path.is_file():
        return mend_state(finding)
    mend_history(finding.path.parent)
    return "set aside; its whole lines are kept"


def _examine(directory: Path) -> Iterator[StateFinding]:
    if not directory.is_dir():
        return
    for entry in sorted(directory.iterdir()):
        if ASIDE not in entry.name and entry.name in _FOLDERS and not entry.is_dir():
            yield set_aside_count(entry, "no directory")
        elif (finding := is_leftover(entry)) is not None:
            yield finding
    yield from examine_store(directory / "store")
    yield from examine_database(directory / "prefect" / "prefect.db")
    for damage in damaged_anchor_records():
        yield set_aside_count(damage.path, damage.why)
    for folder in ("anchors", "prefect", "reports", "runs"):
        if (directory / folder).is_dir():
            for entry in sorted((directory / folder).iterdir()):
                if (finding := is_leftover(entry)) is not None:
                    yield finding
                elif entry.suffix == ".html" and (entry.is_symlink() or not entry.is_file()):
                    yield set_aside_count(entry, "no file")
    yield from _examine_reports(directory / "reports")


def _examine_reports(reports: Path) -> Iterator[StateFinding]:
    if not reports.is_dir():
        return
    if damage := read_history(reports).said_of_damage():
        yield set_aside_count(reports / HISTORY, damage.rstrip("."))
    for page in sorted(reports.glob("*/*")):
        if (finding := is_leftover(page)) is not None:
            yield finding
        elif page.is_symlink() or not page.is_file():
            yield set_aside_count(page, "no file")

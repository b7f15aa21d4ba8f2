"""``mergegate doctor``: examine this project's state and repair it.

Runs work without this command, because they treat damage as a cache miss and rebuild the artifact. The command reports
all sizes and every file that is damaged, set aside or left over, and which tools with environments of their own are
installed. ``--repair`` removes damaged caches and leftover files, and sets damaged records aside.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import typer

from mergegate.flows.cli.command import JsonOption, command_context
from mergegate.flows.cli.output import print_answer
from mergegate.merge_core.errors import InvalidInput
from mergegate.merge_core.files import ASIDE
from mergegate.merge_core.wording import format_bytes
from mergegate.tasks.gate import damaged_anchor_records, damaged_sample_records
from mergegate.tasks.report import HISTORY, mend_history, read_history
from mergegate.tasks.serve import ServeSettings, find_server
from mergegate.tasks.stage import home
from mergegate.tasks.store import (
    StateFinding,
    damaged_finding,
    directory_bytes,
    examine_database,
    examine_store,
    leftover_finding,
    mend_state,
)
from mergegate.tasks.variants import variant_formats

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
    if not directory.is_dir():
        return
    for entry in sorted(directory.iterdir()):
        if ASIDE not in entry.name and entry.name in _FOLDERS and not entry.is_dir():
            yield damaged_finding(entry, "not a directory")
        elif (finding := leftover_finding(entry)) is not None:
            yield finding
    yield from examine_store(directory / "store")
    yield from examine_database(directory / "prefect" / "prefect.db")
    for damage in (*damaged_anchor_records(), *damaged_sample_records()):
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

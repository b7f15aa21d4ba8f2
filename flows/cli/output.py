"""Print the ``--json`` object, findings, and paths in the same way for all commands.

The JSON object has a status, a message, findings, then other keys::

    {"status": "refused", "message": "…", "findings": [{"severity": "block", "where": "…", …}], …}

docs/reference/json.md describes it for users, docs/schema/answer.json for programs.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from rich.text import Text

from mergegate.merge_core.errors import Finding, FindingGroup, group_findings

if TYPE_CHECKING:
    from rich.console import Console

    from mergegate.tasks.stage import Outcome

_FINDING_STYLES = {"block": ("✗", "bold red"), "warn": ("!", "yellow"), "info": ("·", "dim")}
_TEXT_WIDTH = 100  # columns of a result as text
OUTCOME_STYLES: Mapping[Outcome | None, str] = {"pass": "green", "inconclusive": "yellow", "fail": "bold red", None: ""}


def print_answer(status: str, message: str, more: Mapping[str, Any], findings: Iterable[Finding] = ()) -> None:
    """Print the JSON object of a command.

    ``status`` is one or two words, such as ``released``, ``refused``, ``sound`` or ``listed``. ``message`` is for
    users. ``findings`` are sorted, worst first. ``more`` contains other keys, which cannot replace these three.
    """
    answer = {"status": status, "message": message, "findings": [asdict(finding) for finding in findings]}
    print(json.dumps({**answer, **{key: value for key, value in more.items() if key not in answer}}, default=str))


def print_created(record: dict[str, Any]) -> None:
    """Print the JSON object of a command that creates files.

    The status is ``made``, or ``nothing new`` if ``record["new"]`` is False.
    """
    status = "made" if record.pop("new", True) else "nothing new"
    print_answer(status, status, record)


def printed_text(draw: Callable[[Console], None]) -> str:
    """Return what ``draw`` prints on a console that is not a terminal, without blank lines around it."""
    from mergegate.flows.cli.console import FittingConsole

    console = FittingConsole(file=io.StringIO(), width=_TEXT_WIDTH, highlight=False, force_jupyter=False)
    with console.capture() as capture:
        draw(console)
    return capture.get().strip("\n")


def short_path(path: Path | str) -> str:
    """Return a path relative to the working directory. A URL or a path outside this directory stays as it is."""
    if isinstance(path, str):
        return path
    try:
        relative = os.path.relpath(path)
    except OSError:  # the working directory was deleted
        return str(path)
    return str(path) if relative.startswith("..") else relative


class CheckSummary(Protocol):
    """Result of checks, apart from their findings."""

    @property
    def summary(self) -> Sequence[str]:
        """One line per successful check."""

    @property
    def exit_code(self) -> int:
        """Exit code of a command that only checks."""


def print_findings(
    findings: Sequence[Finding], problems: CheckSummary, console: Console, *, verbose: bool = False
) -> None:
    """Print each finding with its remedy, worst first, then the lines about successful checks.

    Findings with the same cause are printed once, or separately with ``verbose``.
    """
    groups = tuple(map(FindingGroup, findings)) if verbose else group_findings(findings)
    for group in groups:
        finding = group.first
        glyph, style = _FINDING_STYLES[finding.severity]
        console.print(Text(f"{glyph} {finding}", style=style))
        for label, text in (("expected: ", finding.expected), ("remedy:   ", finding.remedy)):
            if text:
                console.print(Text(f"    {label}{text}"))
        if group.others:
            console.print(Text(f"    {group.others_line()} (-v lists them)", style="dim"))
    for line in dict.fromkeys(problems.summary):
        console.print(Text(f"✓ {line}" if problems.exit_code == 0 else f"· {line}"))

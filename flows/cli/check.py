"""``mergegate check``: everything that can be wrong, found before any weight is read; all at once, worst first."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict
from rich.console import Console
from rich.text import Text

from flows.cli.answer import print_answer
from flows.cli.sweep import swept_profile
from flows.preflight import Problems, check_recipe, preflight_profile
from flows.profile import is_recipe, load_profile
from merge_core import Finding, load_recipe

_STYLES = {"block": ("✗", "bold red"), "warn": ("!", "yellow"), "info": ("·", "dim")}


class CheckReport(BaseModel):
    """What a check found."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    file: str
    remarks: tuple[Finding, ...]
    summary: tuple[str, ...]


def check_file(file: Path, console: Console, as_json: bool) -> int:
    """Check a profile or a recipe, say what was found, and return the exit code.

    Raises:
        InvalidInput: for a file that cannot mean anything.
    """
    problems = Problems(stop_at_once=False)
    if is_recipe(file):
        check_recipe(load_recipe(file), file.parent, file.stem, problems)
    elif (profile := load_profile(swept_profile(file, console))).sweep is None:
        preflight_profile(profile, problems)
    else:
        from flows.sweep import all_candidates

        named = all_candidates(profile)
        preflight_profile(profile, problems, named.searched, named.by_hand)
    report = CheckReport(file=str(file), remarks=problems.worst_first(), summary=tuple(dict.fromkeys(problems.summary)))
    if as_json:
        status = {0: "sound", 2: "invalid"}.get(problems.exit_code, "refused")
        blocking = sum(one.severity == "block" for one in report.remarks)
        message = f"{blocking} of {len(report.remarks)} findings block" if blocking else "nothing is in the way"
        print_answer(status, message, report.model_dump(mode="json"), report.remarks)
        return problems.exit_code
    print_findings(report.remarks, problems, console)
    return problems.exit_code


def print_findings(findings: Sequence[Finding], problems: Problems, console: Console) -> None:
    """Each finding with what to do about it, worst first; then what is well."""
    for finding in findings:
        glyph, style = _STYLES[finding.severity]
        console.print(Text(f"{glyph} {finding}", style=style))
        if finding.expected:
            console.print(f"    expected: {finding.expected}")
        if finding.remedy:
            console.print(f"    remedy:   {finding.remedy}")
    for line in dict.fromkeys(problems.summary):
        console.print(Text(f"✓ {line}" if problems.exit_code == 0 else f"· {line}"))

"""``mergegate check``: everything that can be wrong, found before any weight is read; all at once, worst first."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict
from rich.console import Console
from rich.text import Text

from mergegate.flows.cli.output import print_answer
from mergegate.flows.cli.run_plan import plan_night
from mergegate.flows.cli.sweep import swept_profile
from mergegate.flows.preflight import Problems, TaskExample, check_recipe, preflight_profile
from mergegate.flows.profile import is_recipe, load_profile
from mergegate.merge_core import Finding, load_recipe
from mergegate.merge_core.errors import FindingGroup, group_findings, shown

_LONGEST = 2000  # characters of a prompt that are shown
_STYLES = {"block": ("✗", "bold red"), "warn": ("!", "yellow"), "info": ("·", "dim")}


class CheckReport(BaseModel):
    """What a check found."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    file: str
    remarks: tuple[Finding, ...]
    summary: tuple[str, ...]
    examples: tuple[TaskExample, ...] = ()  # a document of each task, as each parent reads it
    seconds: float | None = None  # that a run would take here, as far as that is known
    rough: bool = False  # whether that is a guess, from sizes and a short measurement


def check_file(file: Path, console: Console, as_json: bool, verbose: bool = False) -> int:
    """Check a profile or a recipe, say what was found, and return the exit code.

    Args:
        verbose: Say each finding, also those that have one cause, and what each parent is asked.

    Raises:
        InvalidInput: for a file that cannot mean anything.
    """
    problems, night = Problems(stop_at_once=False), None
    if is_recipe(file):
        check_recipe(load_recipe(file), file.parent, file.stem, problems)
    elif (profile := load_profile(swept_profile(file, console))).sweep is None:
        ready = preflight_profile(profile, problems)
        if (night := plan_night(profile, ready, problems.examples)) and night.left:
            problems.summary.append(f"time: {night.time()}")
    else:
        from mergegate.flows.attempt import sweep_candidates

        named = sweep_candidates(profile)
        preflight_profile(profile, problems, named.searched, named.by_hand)
    report = CheckReport(
        file=str(file),
        remarks=problems.worst_first(),
        summary=tuple(dict.fromkeys(problems.summary)),
        examples=tuple(problems.examples),
        seconds=night.seconds if night else None,
        rough=bool(night and night.rough),
    )
    if as_json:
        status = "sound" if problems.status == "passed" else problems.status
        blocking = sum(one.severity == "block" for one in report.remarks)
        message = f"{blocking} of {len(report.remarks)} findings block" if blocking else "nothing is in the way"
        print_answer(status, message, report.model_dump(mode="json"), report.remarks)
        return problems.exit_code
    print_findings(report.remarks, problems, console, verbose=verbose)
    if verbose:
        _print_examples(report.examples, console)
    return problems.exit_code


def print_findings(findings: Sequence[Finding], problems: Problems, console: Console, *, verbose: bool = False) -> None:
    """Each finding with what to do about it, worst first; then what is well.

    Args:
        verbose: Say each alone, also those that have one cause.
    """
    groups = tuple(map(FindingGroup, findings)) if verbose else group_findings(findings)
    for group in groups:
        finding = group.first
        glyph, style = _STYLES[finding.severity]
        console.print(Text(f"{glyph} {finding}", style=style))
        for label, text in (("expected: ", finding.expected), ("remedy:   ", finding.remedy)):
            if text:
                console.print(Text(f"    {label}{text}"))
        if group.others:
            console.print(Text(f"    {group.others_line()} (-v lists them)", style="dim"))
    for line in dict.fromkeys(problems.summary):
        console.print(Text(f"✓ {line}" if problems.exit_code == 0 else f"· {line}"))


def _print_examples(examples: Sequence[TaskExample], console: Console) -> None:
    """Each text once, with those who read it so, and in how many tokens."""
    readers: dict[tuple[str, str, str], list[str]] = {}
    for one in examples:
        reader = f"{one.parent} ({one.preview.summary()})"
        task = f"{one.task} ({one.asked})" if one.asked else one.task
        readers.setdefault((task, one.preview.prompt, one.preview.answer), []).append(reader)
    for (task, prompt, answer), who in readers.items():
        console.print(Text(f"\ntask {task}, the first document, as it is read by {', '.join(who)}", style="bold"))
        for text in shown(_cut(prompt)).split("\n"):
            console.print(Text(f"    {text}"))
        console.print(Text(f"    ▸ {shown(_cut(answer)).strip()}", style="green"))


def _cut(text: str) -> str:
    """The beginning and the end of a long text: examples stand first, the question last."""
    if len(text) <= _LONGEST:
        return text
    return f"{text[: _LONGEST // 2]} […] {text[-_LONGEST // 2 :]}"

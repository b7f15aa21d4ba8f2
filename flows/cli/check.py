"""``mergegate check``: find every problem before any weight is read, and list all findings, worst first."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from pydantic import BaseModel, ConfigDict
from rich.console import Console
from rich.text import Text

from mergegate.flows.attempt import sweep_candidates
from mergegate.flows.cli.command import JsonOption, command_context, local_path
from mergegate.flows.cli.output import print_answer, print_findings
from mergegate.flows.cli.run_plan import plan_run
from mergegate.flows.cli.sweep import convert_evolve
from mergegate.flows.preflight import Problems, TaskExample, check_recipe, preflight_profile
from mergegate.flows.profile import is_recipe, load_profile
from mergegate.merge_core import Finding, load_recipe
from mergegate.merge_core.errors import to_printable

_LONGEST = 2000  # characters of a prompt to show


class CheckReport(BaseModel):
    """Findings about a profile or recipe, as ``mergegate check`` prints them."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    file: str
    remarks: tuple[Finding, ...]
    summary: tuple[str, ...]
    examples: tuple[TaskExample, ...] = ()  # one document of each task, as each parent reads it
    seconds: float | None = None  # estimated duration of a run on this machine, if known
    rough: bool = False  # whether it is a guess from sizes and a short measurement


def check_command(
    file: Annotated[Path, typer.Argument(parser=local_path, help="Profile or recipe.")],
    verbose: Annotated[
        bool,
        typer.Option(
            "--verbose", "-v", help="List findings with the same cause separately, and show a prompt of each task."
        ),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Find every problem before any weight is read.

    The findings are listed with their remedies, the most severe first.
    """
    with command_context(as_json, with_state=True) as console:
        problems, planned = Problems(stop_at_once=False), None
        if is_recipe(file):
            check_recipe(load_recipe(file), file.parent, file.stem, problems)
        elif (profile := load_profile(convert_evolve(file, console))).sweep is None:
            preflight = preflight_profile(profile, problems)
            if (planned := plan_run(profile, preflight, problems.examples)) and planned.open_stages:
                problems.summary.append(f"time: {planned.time()}")
            if planned and (extension := planned.extension()):
                problems.summary.append(f"time: {extension[0].lower()}{extension[1:]}")
        else:
            candidates = sweep_candidates(profile)
            preflight_profile(profile, problems, candidates.searched, candidates.by_hand)
        report = CheckReport(
            file=str(file),
            remarks=problems.worst_first(),
            summary=tuple(dict.fromkeys(problems.summary)),
            examples=tuple(problems.examples),
            seconds=planned.seconds if planned else None,
            rough=bool(planned and planned.rough),
        )
        if as_json:
            status = "sound" if problems.status == "passed" else problems.status
            blocking = sum(finding.severity == "block" for finding in report.remarks)
            message = f"{blocking} of {len(report.remarks)} findings block" if blocking else "no finding blocks a run"
            print_answer(status, message, report.model_dump(mode="json"), report.remarks)
        else:
            print_findings(report.remarks, problems, console, verbose=verbose)
            if verbose:
                print_examples(report.examples, console)
        raise typer.Exit(problems.exit_code)


def print_examples(examples: Sequence[TaskExample], console: Console) -> None:
    """Print each distinct prompt once, with the models that read it and their numbers of tokens."""

    def shorten(text: str) -> str:
        """Shorten a long text to its beginning and end: examples come first, the question last."""
        return text if len(text) <= _LONGEST else f"{text[: _LONGEST // 2]} […] {text[-_LONGEST // 2 :]}"

    readers: dict[tuple[str, str, str], list[str]] = {}
    for example in examples:
        reader = f"{example.parent} ({example.preview.summary()})"
        task = f"{example.task} ({example.asked})" if example.asked else example.task
        readers.setdefault((task, example.preview.prompt, example.preview.answer), []).append(reader)
    for (task, prompt, answer), models in readers.items():
        console.print(Text(f"\ntask {task}: first document, as {', '.join(models)} would read it", style="bold"))
        for text in to_printable(shorten(prompt)).split("\n"):
            console.print(Text(f"    {text}"))
        console.print(Text(f"    ▸ {to_printable(shorten(answer)).strip()}", style="green"))

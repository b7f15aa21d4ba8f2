"""``mergegate check``: find every problem before any weight is read, and list all findings, worst first."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from pydantic import BaseModel, ConfigDict, Field
from rich.console import Console
from rich.text import Text

from mergegate.flows.attempt import sweep_candidates
from mergegate.flows.candidates import recipe_of_file
from mergegate.flows.cli.command import JsonOption, command_context
from mergegate.flows.cli.output import print_answer, print_findings, printed_text
from mergegate.flows.cli.run_plan import plan_run
from mergegate.flows.cli.sweep import convert_evolve
from mergegate.flows.preflight import Problems, TaskExample, check_recipe, preflight_profile
from mergegate.flows.profile import Profile, is_recipe, load_profile
from mergegate.merge_core import Finding
from mergegate.merge_core.errors import EXIT_CODES, Status, to_printable
from mergegate.tasks.publish.targets import CredentialUse

_LONGEST = 2000  # characters of a prompt to show


class CheckReport(BaseModel):
    """Findings about a profile or recipe, as ``mergegate check`` prints them.

    Attributes:
        status: ``passed`` if no finding blocks a run, ``invalid`` or ``refused`` if one does.
        file: Checked file, or the name of the profile.
        remarks: All findings, worst first. A finding with the severity ``block`` would end a run.
        summary: One line per successful check.
        examples: One document of each task, as each parent reads it.
        seconds: Estimated duration of a run on this machine. None if unknown.
        rough: Whether the duration is a guess from sizes and a short measurement.
        credentials: Credentials with which the release and its variants would be published, without any secret.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    status: Status = Field(exclude=True)
    file: str
    remarks: tuple[Finding, ...]
    summary: tuple[str, ...]
    examples: tuple[TaskExample, ...] = ()
    seconds: float | None = None
    rough: bool = False
    credentials: tuple[CredentialUse, ...] = ()

    @property
    def exit_code(self) -> int:
        """Exit code of ``mergegate check``: 0 if no finding blocks a run."""
        return EXIT_CODES[self.status]

    @property
    def passed(self) -> bool:
        """Whether no finding blocks a run."""
        return self.status == "passed"

    def __str__(self) -> str:
        return printed_text(lambda console: print_findings(self.remarks, self, console))


def check_command(
    file: Annotated[Path, typer.Argument(help="Profile or recipe.")],
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
        report = check_file(file, console)
        if as_json:
            status = "sound" if report.passed else report.status
            blocking = sum(finding.severity == "block" for finding in report.remarks)
            message = f"{blocking} of {len(report.remarks)} findings block" if blocking else "no finding blocks a run"
            print_answer(status, message, report.model_dump(mode="json"), report.remarks)
        else:
            print_findings(report.remarks, report, console, verbose=verbose)
            if verbose:
                print_examples(report.examples, console)
        raise typer.Exit(report.exit_code)


def check_file(file: Path | Profile, console: Console) -> CheckReport:
    """Check a profile, a recipe file or mergekit-evolve's YAML without reading any weight.

    Raises:
        InvalidInput: The file cannot be read or is not valid.
    """
    problems, planned = Problems(stop_at_once=False), None
    if isinstance(file, Path) and is_recipe(file):
        check_recipe(recipe_of_file(file), file.parent, file.stem, problems)
    elif (profile := load_profile(convert_evolve(file, console) if isinstance(file, Path) else file)).sweep is None:
        preflight = preflight_profile(profile, problems)
        if (planned := plan_run(profile, preflight, problems.examples)) and planned.open_stages:
            problems.summary.append(f"time: {planned.time()}")
        if planned and (extension := planned.extension()):
            problems.summary.append(f"time: {extension[0].lower()}{extension[1:]}")
    else:
        candidates = sweep_candidates(profile)
        preflight_profile(profile, problems, candidates.searched, candidates.by_hand)
    return CheckReport(
        status=problems.status,
        file=str(file) if isinstance(file, Path) else file.name,
        remarks=problems.worst_first(),
        summary=tuple(dict.fromkeys(problems.summary)),
        examples=tuple(problems.examples),
        seconds=planned.seconds if planned else None,
        rough=bool(planned and planned.rough),
        credentials=tuple(problems.credentials),
    )


def print_examples(examples: Sequence[TaskExample], console: Console) -> None:
    """Print each distinct prompt once, with the models that read it and their numbers of tokens."""

    def shorten(text: str) -> str:
        """Shorten a long text to its beginning and end: examples come first, the question last."""
        return text if len(text) <= _LONGEST else f"{text[: _LONGEST // 2]} […] {text[-_LONGEST // 2 :]}"

    readers: dict[tuple[str, str, str, str], list[str]] = {}
    for example in examples:
        reader = f"{example.parent} ({example.preview.summary()})"
        task = f"{example.task} ({example.asked})" if example.asked else example.task
        key = (task, example.preview.prompt, example.preview.answer, example.budget)
        readers.setdefault(key, []).append(reader)
    for (task, prompt, answer, budget), models in readers.items():
        console.print(
            Text(f"\ntask {task}: first sampled document, as {', '.join(models)} would read it", style="bold")
        )
        for text in to_printable(shorten(prompt)).split("\n"):
            console.print(Text(f"    {text}"))
        console.print(Text(f"    ▸ {to_printable(shorten(answer)).strip()}", style="green"))
        if budget:
            console.print(Text(f"    {budget}", style="dim"))

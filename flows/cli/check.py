"""``mergegate check`` and ``run --dry-run``: find problems and forecast a run, without reading any weight."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from mergegate.flows.cli.command import JsonOption, SetOption, command_context
from mergegate.flows.operations.check import check_file, plan_run
from mergegate.flows.operations.console import print_answer, print_findings
from mergegate.flows.operations.plan import PlanOptions, forecast_of, named_prices, print_forecast
from mergegate.flows.preflight import Problems, TaskExample, preflight_profile
from mergegate.flows.profile import Profile, override_profile
from mergegate.merge_core.errors import to_printable
from mergegate.merge_core.wording import format_duration, format_roughly
from mergegate.tasks.preflight import plan_cached

_LONGEST = 2000  # characters of a prompt to show


def check_command(
    file: Annotated[Path, typer.Argument(help="Profile or recipe.")],
    overrides: SetOption = None,
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
        report = check_file(override_profile(file, overrides), console)
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


def dry_run(profile: Profile, console: Console, as_json: bool, prices: Sequence[str]) -> int:
    """Print the findings, the stages of the run with their times and costs, and return the exit code of the checks.

    Raises:
        InvalidInput: The recipe is invalid.
    """
    prices_by_name = named_prices(prices)
    problems = Problems(stop_at_once=False)
    preflight = preflight_profile(profile, problems)
    planned = plan_run(profile, preflight, problems.examples)
    seconds = planned.seconds if planned else None
    cost = {name: seconds / 3600 * price for name, price in prices_by_name.items()} if seconds is not None else {}
    message = planned.sentence() if planned else "a check refuses the run; see the findings"
    findings = problems.worst_first()
    if as_json:
        status = "ready" if problems.status == "passed" else problems.status
        more = {
            "stages": [asdict(stage) for stage in planned.stages] if planned else [],
            "seconds": seconds,
            "further_documents": planned.further_documents if planned else 0,
            "rough": planned.rough if planned else False,
            "cost": cost,
            "attempts": len(profile.candidates()) + profile.max_further_attempts,
            "overrides": profile.overrides,
            "credentials": [credential.model_dump() for credential in problems.credentials],
        }
        print_answer(status, message, more, findings)
        return problems.exit_code
    print_findings(findings, problems, console)
    if planned:
        cleared = next(item for item in preflight.cleared if item.candidate is profile.candidates()[0])
        recipe, accepted = cleared.candidate.recipe, profile.checks.tokenizer.accepted
        merge_plan = plan_cached(recipe, cleared.parents, cleared.headers, accepted)[0].plan
        if merge_plan is not None:
            options = PlanOptions(Path(), "auto", prices_by_name, None)
            print_forecast(forecast_of(recipe, cleared.parents, merge_plan, options), console)
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
        for column in ("stage", "of", "in the store", "takes"):
            table.add_column(column)
        for stage in planned.stages:
            open_work = "must run" if stage.stage != "evaluate" else f"{stage.missing:,} documents to evaluate"
            state = Text("cached", "cyan") if stage.cached else Text(open_work, "yellow")
            duration = ""
            if stage.seconds is not None:
                rough, exact = f"roughly {format_roughly(stage.seconds)}", format_duration(stage.seconds)
                duration = rough if stage.rough else exact
            table.add_row(stage.stage, Text(stage.subject), state, duration)
        console.print()
        console.print(table)
        console.print()
    console.print(Text(f"dry run: {message}", style="bold"))
    # Each attempt that follows a refusal costs a merge and an evaluation of its own.
    written = len(profile.candidates()) - 1
    attempts = [f"{written} written {'remedy' if written == 1 else 'remedies'}"] if written else []
    attempts += ["a search for the scale"] if profile.scale_search else []
    if profile.max_proposed_remedies:
        attempts.append(f"up to {profile.max_proposed_remedies} proposed remedies")
    for number, attempt in enumerate(attempts):
        console.print(f"  {'then' if number else 'if the gate refuses:'} {attempt}, not counted above")
    for name, dollars in cost.items():
        console.print(f"  {name}: ${dollars:.2f}")
    return problems.exit_code

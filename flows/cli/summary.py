"""Print the last lines of a run: the final table, the outcome and the location of the results."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from mergegate.flows.candidates import has_searchable_scale
from mergegate.flows.cli.score_table import print_scores, print_table
from mergegate.flows.cli.styles import short_path
from mergegate.flows.cli.sweep_summary import sweep_summary
from mergegate.flows.outcome import RunOutcome
from mergegate.tasks.report import CostTable, costs, cut_off_answers, final_table
from mergegate.tasks.stage import Section

_LABEL = 9  # columns of 'release', 'report' and 'next'
_WHERE_IT_GOES = "in the profile (where it has 'remedies', only the item), or run with --remedy auto"


def print_summary(console: Console, outcome: RunOutcome) -> None:
    """Print the evidence as a table, then the outcome. A sweep starts with its own results."""
    if outcome.sweep is not None:
        console.print()
        # If nothing was released, the message is already the sweep's own verdict.
        for piece in sweep_summary(outcome.sweep, with_verdict=outcome.content is not None):
            console.print(piece, soft_wrap=False)
    if outcome.content is not None:
        console.print()
        print_scores(console, final_table(outcome.content))
        for warning in cut_off_answers(outcome.content):
            console.print(Text(f"! {warning}", style="yellow"), soft_wrap=not console.is_terminal)
        _print_costs(console, costs(outcome.content))
        for section in outcome.content.sections:
            _print_section(console, section)
    console.print()
    first, *rest = outcome.message.splitlines()
    if f" {outcome.status}" not in f" {first}":  # the same word as in history, report and Prefect
        first = f"{outcome.status}: {first}"
    style = "bold green" if outcome.exit_code == 0 else "bold red"
    console.print(Text(first, style=style), soft_wrap=not console.is_terminal)
    for line in rest:
        _print_below(console, line.strip())
    if (remedy := outcome.to_try) is not None:
        for line in (f"to try: {remedy.reason}", f"{_WHERE_IT_GOES}:"):
            _print_below(console, line)
        console.print(Text(remedy.block(), style="bold"))  # starts in the first column, so that it can be pasted
    result = "recipe" if outcome.sweep is not None and outcome.status == "passed" else "release"
    for label, location in ((result, outcome.location), ("report", outcome.report)):
        if location is not None:
            console.print(Text(f"  {label:<{_LABEL}}", style="dim"), Text(short_path(location)), sep="")


def print_next(console: Console, outcome: RunOutcome, profile: Path) -> None:
    """Print the next command for the user, below the outcome."""
    _print_below(console, next_command(outcome, profile), "next")


def _print_below(console: Console, line: str, label: str = "") -> None:
    """Print a line in full to a log. On a terminal, wrap a long one below its beginning."""
    margin = "  " + (f"{label:<{_LABEL}}" if label else "")
    if not console.is_terminal:
        console.print(Text.assemble((margin, "dim"), line), soft_wrap=True)
        return
    grid = Table.grid()
    grid.add_column(width=len(margin), no_wrap=True)
    grid.add_column()
    grid.add_row(Text(margin, style="dim"), Text(line))
    console.print(grid, soft_wrap=False)


def next_command(outcome: RunOutcome, profile: Path) -> str:
    """Return the next command for the user."""
    if outcome.status in ("released", "nothing new") and outcome.location is not None:
        return f"mergegate verify {short_path(outcome.location)}"
    if outcome.status == "passed":
        return f"mergegate run {profile}, which also publishes it where the profile says 'publish'"
    if outcome.status == "refused" and outcome.content is not None:
        offer = "add what is under 'to try' to the profile, then run again; " if outcome.to_try else ""
        if outcome.content.scoring and has_searchable_scale(outcome.content.recipe):
            offer += f"mergegate tune {profile} looks for the scale of this merge that is best; "
        return f"{offer}mergegate open {outcome.content.name} shows the report"
    return f"mergegate check {profile}"


def _print_costs(console: Console, drawn: CostTable) -> None:
    """Print the serving costs of the merge and of the measured parents."""
    if not drawn.rows:
        return
    rows = [
        (
            row.name,
            *(row.cells or ("",) * len(drawn.columns)),
            f"not measured: {row.problem}" if row.problem else row.occasion,
        )
        for row in drawn.rows
    ]
    console.print()
    print_table(console, ("served", *map(str.lower, drawn.columns), ""), rows, numbers=True)
    console.print(Text(f"measured {drawn.occasion}", style="dim"))


def _print_section(console: Console, section: Section) -> None:
    """Print a verdict that has no drawing of its own."""
    console.print()
    console.print(Text(section.title, style="bold"))
    for sentence in section.sentences:
        console.print(Text(f"  {sentence}"))
    if section.rows:
        print_table(console, section.columns, section.rows, numbers=False)

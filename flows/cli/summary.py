"""The last lines of a run: the final table, what came out, and where to look."""

from __future__ import annotations

import os
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from flows.cli.sweep_summary import sweep_summary
from flows.outcome import RunOutcome
from tasks.report import CostTable, costs, final_table
from tasks.stage import Section

_STYLES = {"pass": "green", "inconclusive": "yellow", "fail": "bold red", None: ""}


def print_summary(console: Console, outcome: RunOutcome) -> None:
    """The evidence as a table, then the outcome in words; of a sweep first what was found."""
    if outcome.sweep is not None:
        console.print()
        # Where nothing was released, the message is the sweep's own verdict.
        for piece in sweep_summary(outcome.sweep, with_verdict=outcome.content is not None):
            console.print(piece, soft_wrap=False)
    if outcome.content is not None:
        drawn = final_table(outcome.content)
        table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
        for position, column in enumerate(drawn.columns):
            # What is text may take several lines: where the terminal is narrow, no number and no name is lost.
            is_text = position in (0, len(drawn.columns) - 1)
            table.add_column(column, justify="left" if is_text else "right", no_wrap=not is_text)
        for row in drawn.rows:
            *cells, verdict = row.cells
            table.add_row(*(_cell(cell) for cell in cells), Text(verdict, style=_STYLES[row.outcome]))
        console.print()
        console.print(table)
        _print_costs(console, costs(outcome.content))
        for section in outcome.content.sections:
            _print_section(console, section)
    console.print()
    first, *rest = outcome.message.splitlines()
    if outcome.status not in first:  # the word that history, report and Prefect have, too
        first = f"{outcome.status}: {first}"
    console.print(Text(first, style="bold green" if outcome.exit_code == 0 else "bold red"))
    explained = outcome.content.explanation if outcome.content and outcome.status == "refused" else None
    remedies = explained.remedies if explained else ()
    for line in rest:
        if not (remedies and line.startswith("to try: ")):
            console.print(Text(f"  {line.strip()}"))
    for remedy in remedies[:1]:
        console.print(Text(f"  to try: {remedy.reason}"))
        console.print(Text("  in the profile (where it has 'remedies', only the item), or run with --remedy auto:"))
        console.print(Text(remedy.block(), style="bold"))  # from the first column on, as it can be pasted
    made = "recipe" if outcome.sweep is not None and outcome.status == "passed" else "release"
    for label, place in ((made, outcome.location), ("report", outcome.report)):
        if place is not None:
            console.print(Text(f"  {label:<8}", style="dim"), Text(_short(place)), sep="")


def next_step(outcome: RunOutcome, profile: Path) -> str:
    """What a person does next, as a command."""
    if outcome.status in ("released", "nothing new") and outcome.location is not None:
        return f"mergegate verify {_short(outcome.location)}"
    if outcome.status == "passed":
        return f"mergegate run {profile}, which also publishes it where the profile says 'publish'"
    if outcome.status == "refused" and outcome.content is not None:
        explained = outcome.content.explanation
        offer = (
            "add what is under 'to try' to the profile, then run again; " if explained and explained.remedies else ""
        )
        return f"{offer}mergegate open {outcome.content.name} shows the report"
    return f"mergegate check {profile}"


def _print_costs(console: Console, drawn: CostTable) -> None:
    """What serving took, of the merge and of the parents that were measured too."""
    if not drawn.rows:
        return
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    table.add_column("served")
    for column in drawn.columns:
        table.add_column(column.lower(), justify="right", no_wrap=True)
    table.add_column("")
    for row in drawn.rows:
        note = f"not measured: {row.problem}" if row.problem else row.occasion
        table.add_row(Text(row.name), *row.cells, Text(note, style="dim"))
    console.print()
    console.print(table)
    console.print(Text(f"measured {drawn.occasion}", style="dim"))


def _print_section(console: Console, section: Section) -> None:
    """A verdict that has a drawing of its own nowhere."""
    console.print()
    console.print(Text(section.title, style="bold"))
    for sentence in section.sentences:
        console.print(Text(f"  {sentence}"))
    if section.rows:
        table = Table(*section.columns, box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
        for row in section.rows:
            table.add_row(*map(Text, row))
        console.print(table)


def _cell(text: str) -> Text:
    """A cell; the best parent, which plain tables mark with a star, in bold."""
    return Text(text.removesuffix(" *"), style="bold" if text.endswith(" *") else "")


def _short(path: Path | str) -> str:
    """The path as a person in this directory would type it; an address as it is."""
    if isinstance(path, str):
        return path
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative

"""``mergegate history``: list how the runs of this project ended, newest first.

::

    mergegate history                     # all profiles
    mergegate history support-assistant   # one of them
    mergegate history --json              # all recorded facts, as one JSON object
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from mergegate.flows.cli.command import JsonOption, command_context
from mergegate.flows.cli.output import OUTCOME_STYLES, print_answer, short_path
from mergegate.merge_core.errors import InvalidInput, suggest
from mergegate.merge_core.wording import format_duration
from mergegate.tasks.report import RunRecord, format_run_time, outcome_of_status, read_history, worst_drop
from mergegate.tasks.stage import home


def history_command(
    profile: Annotated[str | None, typer.Argument(help="Name of a profile. Default: all profiles.")] = None,
    last: Annotated[int, typer.Option("--last", min=1, help="Maximum number of runs.")] = 30,
    as_json: JsonOption = False,
) -> None:
    """List how the runs of this project ended, newest first."""
    with command_context(as_json) as console:
        reports = home() / "reports"
        history = read_history(reports)
        runs = [run for run in reversed(history.records) if profile in (None, run.profile)]
        if profile is not None and not runs:
            names = {run.profile for run in history.records}
            raise InvalidInput(
                "mergegate history",
                found=f"no recorded run of {profile!r}",
                expected=suggest(profile, names) or "a profile that has already run here",
            )
        if as_json:
            rows = [run.model_dump(mode="json") for run in runs[:last]]
            more = {"home": str(home()), "damaged": history.damaged, "known": len(runs), "runs": rows}
            print_answer("listed", f"{len(runs)} recorded runs", more)
            return
        if runs:
            console.print(_table(runs[:last], with_profile=profile is None), soft_wrap=False)
        else:
            console.print("no run has finished here yet")
        if len(runs) > last:
            console.print(f"{len(runs) - last} older runs: mergegate history --last {len(runs)}")
        if damage := history.damage_sentence():
            console.print(Text(damage, style="yellow"))
        if runs and (reports / "index.html").is_file():
            console.print(Text(f"all runs: {short_path(reports / 'index.html')}", style="dim"))


def _published_variants(run: RunRecord) -> str:
    """Return the number of variants that may be published, of all: '2 of 3'."""
    return f"{sum(variant.published for variant in run.variants)} of {len(run.variants)}" if run.variants else ""


def _table(runs: Sequence[RunRecord], *, with_profile: bool) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    with_variants = any(run.variants for run in runs)
    titles = ("ended", *(["profile"] if with_profile else []), "outcome", "version", "largest drop")
    for title in (*titles, *(["variants"] if with_variants else [])):
        table.add_column(title)
    table.add_column("took", justify="right", no_wrap=True)
    for run in runs:
        worst = worst_drop(run)
        table.add_row(
            format_run_time(run),
            *([Text(run.profile)] if with_profile else []),
            Text(run.status, style=OUTCOME_STYLES[outcome_of_status(run.status)]),
            Text((run.version or "")[:12]),
            Text(f"{worst.drop:.1f} {worst.task}" if worst else ""),
            *([Text(_published_variants(run))] if with_variants else []),
            format_duration(run.seconds),
        )
    return table

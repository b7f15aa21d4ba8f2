"""``mergegate history``, ``explain`` and ``open``: show the past runs of a project."""

from __future__ import annotations

import os
import sys
import webbrowser
from collections.abc import Sequence
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from mergegate.flows.cli.command import JsonOption, command_context
from mergegate.flows.operations.console import OUTCOME_STYLES, print_answer, short_path
from mergegate.merge_core.errors import InvalidInput, suggest
from mergegate.merge_core.wording import format_duration
from mergegate.tasks.base.stage import home
from mergegate.tasks.release.report import (
    RunRecord,
    file_name,
    format_run_time,
    outcome_of_status,
    read_history,
    worst_drop,
)


def open_command(
    profile: Annotated[
        str | None, typer.Argument(help="Profile whose last report to open.", show_default="the page of all runs")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Open a report in a browser, or print its path."""
    with command_context(as_json) as console:
        reports = home() / "reports"
        page = reports / (f"{file_name(profile)}.html" if profile else "index.html")
        if not page.is_file():
            names = sorted({record.profile for record in read_history(reports).records})
            raise InvalidInput(
                "mergegate open",
                found=f"no report of a profile called {profile!r}" if profile else "no report yet",
                expected="a profile that has finished a run here",
                remedy=suggest(profile or "", names) or "mergegate run PROFILE",
            )
        # Remote shells and containers have no graphical browser.
        has_display = any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER"))
        is_remote = bool(os.environ.get("SSH_CONNECTION"))
        has_browser = (has_display and not is_remote) or sys.platform in ("darwin", "win32")
        if as_json:
            print_answer("found", str(page), {"report": str(page)})
        elif has_browser and webbrowser.open(page.absolute().as_uri()):
            console.print(f"opened {page}")
        else:
            console.print(str(page))


def explain_command(
    run: Annotated[str, typer.Argument(metavar="RUN", help="ID of a run or its beginning, a version, or a profile.")],
    as_json: JsonOption = False,
) -> None:
    """Explain the decision of a past run.

    For a profile, this is its last run.
    """
    with command_context(as_json) as console:
        records = read_history(home() / "reports").records
        matches = [record for record in records if record.profile == run]
        if not matches:
            matches = [record for record in records if run and (record.run.startswith(run) or record.version == run)]
            # The beginning of an ID must match one run only. A version may have several runs, and the last one counts.
            if len({record.run for record in matches}) != 1 and not (matches and matches[-1].version == run):
                raise InvalidInput(
                    "mergegate explain",
                    found=f"{len(matches)} runs whose ID begins with {run!r}"
                    if matches
                    else f"no run, version or profile called {run!r}",
                    expected="the ID of a run, a version or a profile",
                    remedy=suggest(run, {record.profile for record in records})
                    or "list all runs with mergegate history",
                )
        record = matches[-1]
        if as_json:
            print_answer(record.status, record.message, {"run": record.model_dump(mode="json")})
            return
        style = OUTCOME_STYLES[outcome_of_status(record.status)]
        ended = f" {format_run_time(record)}, {format_duration(record.seconds)}"
        console.print(Text(f"{record.profile}: {record.status}", style=style), ended, sep="")
        if record.method:
            console.print(f"  merged    {record.method}: {', '.join(parent.name for parent in record.parents)}")
        for override in record.overrides:
            console.print(Text(f"  override  --set {override}"))
        for line in record.message.splitlines():
            console.print(Text(f"  decided   {line.strip()}"))
        for score in record.scores:
            drop = f"drop {score.drop:.1f} [{score.low:.1f}, {score.high:.1f}] points against {score.reference}"
            limits = f"max_drop {score.max_drop:g}, margin {score.margin:g}"
            console.print(Text(f"  {score.outcome:<9} {score.task}: {drop}, {limits}"))
        if record.perplexity is not None:
            limit = f", limit {record.perplexity_limit:.3f}" if record.perplexity_limit is not None else ""
            ratio = f"{record.perplexity:.3f} times that of the better parent"
            console.print(f"  text      perplexity {ratio}{limit}")
        for stage in record.stages:
            state = f"{stage.cached} of {stage.calls} cached" if stage.cached else stage.status
            console.print(f"  stage     {stage.name}: {state}, {format_duration(stage.seconds)}")
        if record.report:
            console.print(f"  report    {short_path(home() / 'reports' / record.report)}")


def history_command(
    profile: Annotated[str | None, typer.Argument(help="Name of a profile.", show_default="all profiles")] = None,
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

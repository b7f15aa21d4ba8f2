"""``mergegate status``: what runs now, what is due, how each profile ended last, how large the store is.

It needs no server.

``mergegate open`` shows a report, ``mergegate explain`` says what a past run decided and why.
"""

from __future__ import annotations

import os
import sys
import time
import webbrowser
from pathlib import Path

from rich.console import Console
from rich.text import Text

from mergegate.flows.cli.output import print_answer
from mergegate.flows.cli.styles import OUTCOME_STYLES, short_path
from mergegate.flows.prefect_api import NIGHTS, load_schedules
from mergegate.merge_core.errors import InvalidInput, suggest
from mergegate.merge_core.wording import format_bytes, format_duration
from mergegate.tasks.report import RunRecord, file_name, format_run_time, outcome_of_status, read_history
from mergegate.tasks.stage import home, runs_directory
from mergegate.tasks.store import read_runs, store_bytes


def print_status(console: Console, as_json: bool) -> None:
    """Now, next, last.

    Raises:
        InvalidInput: for a file of nights that says nothing sensible.
    """
    now = time.time()
    running = [run for run in read_runs(runs_directory()) if run.live]
    last = {one.profile: one for one in read_history(home() / "reports").records}
    nights = Path(NIGHTS)
    due = (
        [(str(one.profile), one.schedule or "when triggered") for one in load_schedules(nights).profiles]
        if nights.is_file()
        else []
    )
    size = store_bytes(home() / "store")
    message = f"{len(running)} running, {len(due)} deployed, {format_bytes(size)} in the store"
    if as_json:
        more = {
            "home": str(home()),
            "running": [{"run": run.run, "profile": run.profile, "seconds": now - run.started} for run in running],
            "due": [{"profile": profile, "schedule": schedule} for profile, schedule in due],
            "last": [_brief(one) for one in last.values()],
            "store_bytes": size,
        }
        print_answer("running" if running else "idle", message, more)
        return
    for run in running:
        console.print(
            f"running  {run.profile or run.flow}  since {format_duration(max(0.0, now - run.started))}  ({run.run})"
        )
    if not running:
        console.print("running  nothing")
    for profile, schedule in due:
        console.print(f"due      {profile}  {schedule}")
    if not due:
        console.print(f"due      nothing: no {NIGHTS} here")
    for one in last.values():
        style = OUTCOME_STYLES[outcome_of_status(one.status)]
        first = one.why
        console.print(
            "last     ",
            Text(one.profile),
            "  ",
            format_run_time(one),
            "  ",
            Text(one.status, style=style),
            f"  {first}",
            sep="",
        )
    if not last:
        console.print("last     no run has ended here yet")
    console.print(f"store    {format_bytes(size)}")


def open_report(console: Console, profile: str | None, as_json: bool, *, browser: bool = True) -> None:
    """Show the report of a profile, else that of all runs, in a browser; where there is none, say where it lies.

    Raises:
        InvalidInput: where there is no such report.
    """
    reports = home() / "reports"
    page = reports / (f"{file_name(profile)}.html" if profile else "index.html")
    if not page.is_file():
        known = sorted({one.profile for one in read_history(reports).records})
        expected = (
            (suggest(profile, known) or f"one of {', '.join(known)}")
            if profile and known
            else "a run that has ended here"
        )
        raise InvalidInput(
            "mergegate open", found=f"no report {page}", expected=expected, remedy="mergegate run PROFILE"
        )
    shown = browser and not as_json and _has_browser() and webbrowser.open(page.absolute().as_uri())
    if as_json:
        print_answer("found", str(page), {"report": str(page)})
    elif shown:
        console.print(f"opened {page}")
    else:
        console.print(str(page))


def explain_run(console: Console, wanted: str, as_json: bool) -> None:
    """What a run decided, and why.

    Args:
        wanted: The beginning of a run's id, a version, or a profile: then its last run.

    Raises:
        InvalidInput: for a run that nobody knows, and for one of several.
    """
    records = read_history(home() / "reports").records
    one = _found(records, wanted)
    if as_json:
        print_answer(one.status, one.message, {"run": one.model_dump(mode="json")})
        return
    style = OUTCOME_STYLES[outcome_of_status(one.status)]
    console.print(
        Text(f"{one.profile}: {one.status}", style=style),
        f" {format_run_time(one)}, {format_duration(one.seconds)}",
        sep="",
    )
    if one.method:
        console.print(f"  merged    {one.method}: {', '.join(parent.name for parent in one.parents)}")
    for override in one.overrides:
        console.print(Text(f"  told      --set {override}"))
    for line in one.message.splitlines():
        console.print(Text(f"  decided   {line.strip()}"))
    for score in one.scores:
        scale = f"[{score.low:.1f}, {score.high:.1f}]"
        console.print(
            f"  {score.outcome:<9} {score.task}: {score.drop:+.1f} points lost "
            f"against {score.reference} {scale}, limit {score.limit}"
        )
    if one.perplexity is not None:
        limit = f", limit {one.perplexity_limit:.3f}" if one.perplexity_limit is not None else ""
        console.print(f"  text      perplexity {one.perplexity:.3f} times the better parent's{limit}")
    for stage in one.stages:
        made = f"{stage.cached} of {stage.calls} cached" if stage.cached else stage.status
        console.print(f"  stage     {stage.name}: {made}, {format_duration(stage.seconds)}")
    if one.report:
        console.print(f"  report    {short_path(home() / 'reports' / one.report)}")


def _found(records: tuple[RunRecord, ...], wanted: str) -> RunRecord:
    by_profile = [one for one in records if one.profile == wanted]
    if by_profile:
        return by_profile[-1]
    by_id = [one for one in records if wanted and (one.run.startswith(wanted) or one.version == wanted)]
    if len({one.run for one in by_id}) == 1 or (by_id and by_id[-1].version == wanted):
        return by_id[-1]
    found = f"{wanted!r}, which {len(by_id)} runs begin with" if by_id else f"{wanted!r}, of which no run is known"
    known = {one.profile for one in records}
    raise InvalidInput(
        "mergegate explain",
        found=found,
        expected="a run's id, a version or a profile",
        remedy=suggest(wanted, known) or "mergegate history lists them",
    )


def _brief(one: RunRecord) -> dict[str, object]:
    return one.model_dump(mode="json", include={"run", "profile", "status", "message", "ended", "version"})


def _has_browser() -> bool:
    """Not over a remote shell or in a container, where a browser would be one in the terminal, or none."""
    if os.environ.get("SSH_CONNECTION") or not (
        os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY") or os.environ.get("BROWSER")
    ):
        return sys.platform in ("darwin", "win32")
    return True

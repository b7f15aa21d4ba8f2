"""``mergegate status``: show active runs, schedules, the last result of each profile and the size of the store.

It needs no server.

``mergegate open`` shows a report. ``mergegate explain`` explains the decision of a past run.
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
from mergegate.flows.prefect_api import SCHEDULES_FILE, load_schedules
from mergegate.merge_core.errors import InvalidInput, suggest
from mergegate.merge_core.wording import format_bytes, format_duration
from mergegate.tasks.report import RunRecord, file_name, format_run_time, outcome_of_status, read_history
from mergegate.tasks.stage import home, runs_directory
from mergegate.tasks.store import read_runs, store_bytes


def print_status(console: Console, as_json: bool) -> None:
    """Print active runs, schedules and last results.

    Raises:
        InvalidInput: ``schedules.yaml`` is invalid.
    """
    now = time.time()
    running = [run for run in read_runs(runs_directory()) if run.live]
    last = {record.profile: record for record in read_history(home() / "reports").records}
    schedule_file = Path(SCHEDULES_FILE)
    due = (
        [
            (str(scheduled.profile), scheduled.schedule or "when triggered")
            for scheduled in load_schedules(schedule_file).profiles
        ]
        if schedule_file.is_file()
        else []
    )
    size = store_bytes(home() / "store")
    message = f"{len(running)} running, {len(due)} deployed, {format_bytes(size)} in the store"
    if as_json:
        more = {
            "home": str(home()),
            "running": [{"run": run.run, "profile": run.profile, "seconds": now - run.started} for run in running],
            "due": [{"profile": profile, "schedule": schedule} for profile, schedule in due],
            "last": [_brief(record) for record in last.values()],
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
        console.print(f"due      nothing: no {SCHEDULES_FILE} here")
    for record in last.values():
        style = OUTCOME_STYLES[outcome_of_status(record.status)]
        reason = record.why
        console.print(
            "last     ",
            Text(record.profile),
            "  ",
            format_run_time(record),
            "  ",
            Text(record.status, style=style),
            f"  {reason}",
            sep="",
        )
    if not last:
        console.print("last     no run has ended here yet")
    console.print(f"store    {format_bytes(size)}")


def open_report(console: Console, profile: str | None, as_json: bool, *, browser: bool = True) -> None:
    """Show the report of a profile, or of all runs, in a browser. Without a browser, print its path.

    Raises:
        InvalidInput: The report does not exist.
    """
    reports = home() / "reports"
    page = reports / (f"{file_name(profile)}.html" if profile else "index.html")
    if not page.is_file():
        names = sorted({record.profile for record in read_history(reports).records})
        expected = (
            (suggest(profile, names) or f"one of {', '.join(names)}")
            if profile and names
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


def explain_run(console: Console, query: str, as_json: bool) -> None:
    """Explain the decision of a run.

    Args:
        wanted: Beginning of a run's id, a version, or a profile for its last run.

    Raises:
        InvalidInput: No run matches, or several do.
    """
    records = read_history(home() / "reports").records
    record = _find_run(records, query)
    if as_json:
        print_answer(record.status, record.message, {"run": record.model_dump(mode="json")})
        return
    style = OUTCOME_STYLES[outcome_of_status(record.status)]
    console.print(
        Text(f"{record.profile}: {record.status}", style=style),
        f" {format_run_time(record)}, {format_duration(record.seconds)}",
        sep="",
    )
    if record.method:
        console.print(f"  merged    {record.method}: {', '.join(parent.name for parent in record.parents)}")
    for override in record.overrides:
        console.print(Text(f"  told      --set {override}"))
    for line in record.message.splitlines():
        console.print(Text(f"  decided   {line.strip()}"))
    for score in record.scores:
        scale = f"[{score.low:.1f}, {score.high:.1f}]"
        console.print(
            f"  {score.outcome:<9} {score.task}: {score.drop:+.1f} points lost "
            f"against {score.reference} {scale}, limit {score.limit}"
        )
    if record.perplexity is not None:
        limit = f", limit {record.perplexity_limit:.3f}" if record.perplexity_limit is not None else ""
        console.print(f"  text      perplexity {record.perplexity:.3f} times the better parent's{limit}")
    for stage in record.stages:
        state = f"{stage.cached} of {stage.calls} cached" if stage.cached else stage.status
        console.print(f"  stage     {stage.name}: {state}, {format_duration(stage.seconds)}")
    if record.report:
        console.print(f"  report    {short_path(home() / 'reports' / record.report)}")


def _find_run(records: tuple[RunRecord, ...], query: str) -> RunRecord:
    by_profile = [record for record in records if record.profile == query]
    if by_profile:
        return by_profile[-1]
    by_id = [record for record in records if query and (record.run.startswith(query) or record.version == query)]
    if len({record.run for record in by_id}) == 1 or (by_id and by_id[-1].version == query):
        return by_id[-1]
    found = f"{query!r}, which {len(by_id)} runs begin with" if by_id else f"{query!r}, of which no run is known"
    names = {record.profile for record in records}
    raise InvalidInput(
        "mergegate explain",
        found=found,
        expected="a run's id, a version or a profile",
        remedy=suggest(query, names) or "mergegate history lists them",
    )


def _brief(record: RunRecord) -> dict[str, object]:
    return record.model_dump(mode="json", include={"run", "profile", "status", "message", "ended", "version"})


def _has_browser() -> bool:
    """Return whether a graphical browser is available. Remote shells and containers have none."""
    if os.environ.get("SSH_CONNECTION") or not (
        os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY") or os.environ.get("BROWSER")
    ):
        return sys.platform in ("darwin", "win32")
    return True

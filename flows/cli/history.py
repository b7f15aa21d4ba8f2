"""``mergegate history``: how the runs of this project ended, the newest first.

::

    mergegate history                     # all profiles
    mergegate history support-assistant   # one of them
    mergegate history --json              # everything that is known, as one JSON object
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from mergegate.flows.cli.output import print_answer
from mergegate.flows.cli.styles import OUTCOME_STYLES, short_path
from mergegate.merge_core.errors import InvalidInput, suggest
from mergegate.merge_core.wording import format_duration
from mergegate.tasks.report import RunRecord, format_run_time, outcome_of_status, read_history, worst_drop
from mergegate.tasks.stage import home


def print_history(console: Console, as_json: bool, profile: str | None = None, most: int = 30) -> None:
    """A line for each run, in at most 80 columns, the newest first.

    Args:
        profile: Whose; absent: of all.
        most: Runs that are shown.

    Raises:
        InvalidInput: for a profile of which no run is known.
    """
    reports = home() / "reports"
    history = read_history(reports)
    runs = [one for one in reversed(history.records) if profile in (None, one.profile)]
    if profile is not None and not runs:
        known = {one.profile for one in history.records}
        raise InvalidInput(
            "mergegate history",
            found=f"{profile!r}, of which no run is known",
            expected=suggest(profile, known) if known else "a profile that has run here",
        )
    if as_json:
        told = [one.model_dump(mode="json") for one in runs[:most]]
        more = {"home": str(home()), "damaged": history.damaged, "known": len(runs), "runs": told}
        print_answer("listed", f"{len(runs)} runs are known", more)
        return
    if runs:
        console.print(_table(runs[:most], with_profile=profile is None), soft_wrap=False)
    else:
        console.print("no run has ended here yet")
    if len(runs) > most:
        console.print(f"{len(runs) - most} older ones: mergegate history --last {len(runs)}")
    if damage := history.said_of_damage():
        console.print(Text(damage, style="yellow"))
    if runs and (reports / "index.html").is_file():
        console.print(Text(f"all of it: {short_path(reports / 'index.html')}", style="dim"))


def _table(runs: Sequence[RunRecord], *, with_profile: bool) -> Table:
    """All columns have a width of their own: together they have 80 characters or less."""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    names, tasks = (17, 11) if with_profile else (0, 28)
    for title, width in (("ended", 16), ("profile", names), ("outcome", 11), ("version", 12), ("lost most", tasks)):
        if width:
            table.add_column(title, width=width, no_wrap=True, overflow="ellipsis")
    table.add_column("took", width=8, justify="right", no_wrap=True)
    for one in runs:
        lost = worst_drop(one)
        table.add_row(
            format_run_time(one),
            *([Text(one.profile)] if with_profile else []),
            Text(one.status, style=OUTCOME_STYLES[outcome_of_status(one.status)]),
            Text(one.version or ""),
            Text(f"{lost.drop:.1f} {lost.task}" if lost else ""),
            format_duration(one.seconds),
        )
    return table

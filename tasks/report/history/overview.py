"""Render ``index.html``, one page with all runs of all profiles, without scripts or external resources.

It has the design of the reports. For each profile, it shows the status, scores and drops over runs as lines, the
durations of the stages, and the last runs with links to the reports that still exist.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import quote

from mergegate.merge_core.wording import format_bytes, format_duration
from mergegate.tasks.report import wording
from mergegate.tasks.report.history.changes import changes_since, format_run_time
from mergegate.tasks.report.history.ledger import History
from mergegate.tasks.report.history.lines import (
    MAX_COLORS,
    MAX_SERIES,
    NARROW,
    WIDE,
    LimitLine,
    Series,
    draw_bars,
    draw_key,
    draw_lines,
)
from mergegate.tasks.report.history.record import RunRecord, RunScore
from mergegate.tasks.report.page import page_style, page_template
from mergegate.tasks.report.svg import Ink
from mergegate.tasks.stage import Outcome, worst_verdict

if TYPE_CHECKING:
    from markupsafe import Markup

# Runs per profile that are drawn and that are listed, and number of profiles with details.
MAX_DRAWN, MAX_LISTED, MAX_DETAILED = 120, 30, 40
_STAGES = 5  # number of stages with drawn durations, the slowest first
_MAX_NAMED = 3  # profiles that the first sentence names
_GOOD_STATUSES = ("released", "nothing new", "passed", "promoted")
_BAD_STATUSES = ("refused", "invalid", "failed", "rolled back", "killed")


@dataclass(frozen=True)
class Curves:
    """A plot in a wide and a narrow version, with the legend of its lines and a sentence about how to read it."""

    title: str
    explanation: str
    plots: tuple[Markup, ...]
    keys: tuple[tuple[Markup, str], ...]
    left_out: int


@dataclass(frozen=True)
class ProfileRuns:
    """Runs of one profile and one flow, as the page shows them."""

    anchor: str
    profile: str
    flow: str
    records: tuple[RunRecord, ...]  # newest first
    changes: tuple[str, ...]
    curves: tuple[Curves, ...]

    @property
    def last(self) -> RunRecord:
        return self.records[0]


def render_history(history: History, pages: Collection[str] = ()) -> str:
    """Return ``index.html`` as text.

    Args:
        history: All runs.
        pages: Reports that still exist, relative to the directory of the page.
    """
    groups: dict[tuple[str, str], list[RunRecord]] = {}
    for record in reversed(history.records):
        groups.setdefault((record.profile, record.flow), []).append(record)
    shown = []
    for number, ((profile, flow), records) in enumerate(groups.items()):
        changes: tuple[str, ...] = ()
        curves: tuple[Curves, ...] = ()
        if number < MAX_DETAILED:
            changes = changes_since(history.runs_of(profile, flow)[:-1], records[0])
            curves = _curves(records[:MAX_DRAWN][::-1])
        shown.append(ProfileRuns(f"profile-{number}", profile, flow, tuple(records), changes, curves))
    return page_template("history/history.html").render(
        profiles=shown,
        count=len(history.records),
        damage=history.damage_sentence(),
        pages=frozenset(pages),
        glyphs=wording.GLYPHS,
        listed=MAX_LISTED,
        kind=outcome_of_status,
        worst_of_all=worst_verdict(outcome_of_status(runs.last.status) for runs in shown),
        lead=_lead(shown),
        status_of=status_word,
        when=format_run_time,
        day=_day,
        address=quote,
        duration=format_duration,
        size=format_bytes,
        lost_most=worst_drop,
        number=wording.number,
        style=page_style("reading.css", "history/history.css"),
    )


def outcome_of_status(status: str) -> Outcome:
    """Return the outcome that a status stands for. An unknown status, from a newer mergegate, is inconclusive."""
    return "pass" if status in _GOOD_STATUSES else "fail" if status in _BAD_STATUSES else "inconclusive"


def status_word(status: str) -> str:
    """Return a status as pages show it. ``failed`` is an error of the program or its environment, not a verdict."""
    return "error" if status == "failed" else status


def _lead(profiles: Sequence[ProfileRuns]) -> str:
    """Return a sentence about the latest run of each profile, with the names of failed ones."""
    count = len(profiles)
    bad = [runs for runs in profiles if outcome_of_status(runs.last.status) != "pass"]
    if not bad:
        return "The latest run succeeded." if count == 1 else f"All {count} profiles succeeded in their latest run."
    named = [f"{runs.profile} ({status_word(runs.last.status)})" for runs in bad[:_MAX_NAMED]]
    if len(bad) > _MAX_NAMED:
        named.append(f"{len(bad) - _MAX_NAMED} more")
    names = f"{', '.join(named[:-1])} and {named[-1]}" if len(named) > 1 else named[0]
    if count == 1:
        return f"The latest run did not succeed: {status_word(bad[0].last.status)}."
    return f"{count - len(bad)} of {count} profiles succeeded in their latest run. Check {names}."


def worst_drop(record: RunRecord) -> RunScore | None:
    """Return the score of the guard with the largest drop, or None without scores."""
    return max(record.scores, key=lambda score: score.drop, default=None)


def _curves(runs: Sequence[RunRecord]) -> tuple[Curves, ...]:
    """Return plots of the scores, drops and durations of runs, which are given in the order in which they ended."""
    # A run that a check refused measured nothing. It has no scores and leaves no gap in the lines.
    scored = [run for run in runs if run.scores]
    tasks = dict.fromkeys(item.task for run in reversed(scored) for item in run.scores if item.merge is not None)
    guards = dict.fromkeys((item.task, item.reference) for run in reversed(scored) for item in run.scores)
    by_task = [{item.task: item.merge for item in run.scores} for run in scored]
    by_guard = [{(item.task, item.reference): item.drop for item in run.scores} for run in scored]
    # A task has the same color in both charts. If it has several references, their lines have different dashes.
    numbers = {task: number for number, task in enumerate(dict.fromkeys([*tasks, *(task for task, _ in guards)]))}
    references = {task: [guard[1] for guard in guards if guard[0] == task] for task in numbers}
    scores = [
        Series(task, tuple(run.get(task) for run in by_task), numbers[task], numbers[task] // MAX_COLORS)
        for task in tasks
    ]
    drops = [
        Series(
            f"{task}, reference {reference}",
            tuple(run.get((task, reference)) for run in by_guard),
            numbers[task],
            numbers[task] // MAX_COLORS + references[task].index(reference),
        )
        for task, reference in guards
    ]
    decisions = {(item.max_drop, item.margin) for run in scored[-1:] for item in run.scores}
    limits: tuple[LimitLine, ...] = ()
    explanation = "A positive drop is a loss. The limits differ between the guards, so they are not drawn."
    if len(decisions) == 1:
        max_drop, margin = decisions.pop()
        explanation = "A positive drop is a loss. A dashed line shows a limit of the latest run."
        if max_drop == margin:
            limits = (LimitLine(f"max_drop and margin {wording.plain(margin)}", margin, Ink.FAIL),)
        else:
            margin_line = LimitLine(f"margin {wording.plain(margin)}", margin, Ink.INCONCLUSIVE)
            limits = (LimitLine(f"max_drop {wording.plain(max_drop)}", max_drop, Ink.FAIL), margin_line)
    days = [_day(run) for run in scored]
    score_plots = [draw_lines(scores, days, chart, "points") for chart in (WIDE, NARROW)]
    drop_plots = [
        draw_lines(drops, days, chart, "points of drop", from_zero=True, limits=limits) for chart in (WIDE, NARROW)
    ]

    # Durations are stacked bars of all runs, in a unit that suits the longest.
    seconds_by_run = [{stage.name: stage.seconds for stage in run.stages} for run in runs]
    names = dict.fromkeys(name for run in seconds_by_run for name in run)
    total = {name: sum(run.get(name, 0.0) for run in seconds_by_run) for name in names}
    longest = sorted(total, key=lambda name: -total[name])[:_STAGES]
    longest_run = max((sum(run.values()) for run in seconds_by_run), default=0.0)
    unit, factor = (
        ("seconds", 1.0) if longest_run < 180 else ("minutes", 60.0) if longest_run < 3 * 3600 else ("hours", 3600.0)
    )
    series = [
        Series(name, tuple(run.get(name, 0.0) / factor for run in seconds_by_run), shade)
        for shade, name in enumerate(longest)
    ]
    if len(total) > len(longest):
        remaining = (sum(seconds for name, seconds in run.items() if name not in longest) for run in seconds_by_run)
        series.append(Series("all other stages", tuple(seconds / factor for seconds in remaining), len(longest)))
    duration_plots = [draw_bars(series, [_day(run) for run in runs], chart, unit) for chart in (WIDE, NARROW)]
    pictures = (
        _picture("Score of the merge, in points", "", scores, score_plots),
        _picture("Drop from the reference, in points", explanation, drops, drop_plots, limits=limits),
        _picture(f"Time per stage, in {unit}", "", series, duration_plots, bars=True),
    )
    return tuple(picture for picture in pictures if picture is not None)


def _picture(
    title: str,
    explanation: str,
    series: Sequence[Series],
    plots: Sequence[str],
    *,
    limits: Sequence[LimitLine] = (),
    bars: bool = False,
) -> Curves | None:
    """Return a plot that ``lines`` has drawn, which escapes the names in it. None for fewer than two runs."""
    from markupsafe import Markup

    if not all(plots) or len(series[0].values) < 2:
        return None
    drawn: list[Series | LimitLine] = [*series[:MAX_SERIES], *limits]
    keys = tuple((Markup(draw_key(item, bar=bars)), item.name) for item in drawn)
    return Curves(title, explanation, tuple(map(Markup, plots)), keys, max(0, len(series) - MAX_SERIES))


def _day(record: RunRecord) -> str:
    try:
        return time.strftime("%d %b", time.localtime(record.ended)).lstrip("0")
    except (OverflowError, ValueError, OSError):
        return "?"

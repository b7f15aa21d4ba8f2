"""``index.html``: all runs of all profiles on one page, in the look of the reports, without scripts, nothing to load.

Of each profile: how it stands, scores and drops over runs as lines, what its stages took, and its last runs with a link
to each report that is still kept.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from mergegate.merge_core.wording import format_bytes, format_duration
from mergegate.tasks.report import wording
from mergegate.tasks.report.history.changes import changes_since, format_run_time
from mergegate.tasks.report.history.ledger import History
from mergegate.tasks.report.history.lines import MOST_SERIES, NARROW, WIDE, Series, draw_bars, draw_key, draw_lines
from mergegate.tasks.report.history.record import RunRecord, RunScore
from mergegate.tasks.report.page import page_environment
from mergegate.tasks.stage import Outcome, worst_verdict

if TYPE_CHECKING:
    from jinja2 import Template
    from markupsafe import Markup

HERE = Path(__file__).parent
# Of each profile: runs that are drawn, and runs that are listed. And profiles that are told at length.
DRAWN, LISTED, AT_LENGTH = 120, 30, 40
_STAGES = 6  # whose durations are drawn: those that took longest
_WELL = ("released", "nothing new", "passed", "promoted")
_BADLY = ("refused", "invalid", "failed", "rolled back", "killed")


@dataclass(frozen=True)
class Curves:
    """A picture: wide and narrow, and what its lines are."""

    title: str
    plots: tuple[Markup, ...]
    keys: tuple[tuple[Markup, str], ...]
    left_out: int


@dataclass(frozen=True)
class ProfileRuns:
    """What the page says of one profile by one flow."""

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
    """The page as text.

    Args:
        pages: Reports that are still kept, relative to the directory of the page.
    """
    from markupsafe import Markup

    groups: dict[tuple[str, str], list[RunRecord]] = {}
    for one in reversed(history.records):
        groups.setdefault((one.profile, one.flow), []).append(one)
    shown = [
        _told(number, history, profile, flow, records, at_length=number < AT_LENGTH)
        for number, ((profile, flow), records) in enumerate(groups.items())
    ]
    return _template().render(
        profiles=shown,
        count=len(history.records),
        damage=history.said_of_damage(),
        pages=frozenset(pages),
        glyphs=wording.GLYPHS,
        listed=LISTED,
        kind=outcome_of_status,
        worst_of_all=worst_verdict(outcome_of_status(one.last.status) for one in shown),
        well=sum(outcome_of_status(one.last.status) == "pass" for one in shown),
        when=format_run_time,
        day=_day,
        address=quote,
        duration=format_duration,
        size=format_bytes,
        lost_most=worst_drop,
        number=wording.number,
        style=Markup(
            "\n".join((file).read_text(encoding="utf-8") for file in (HERE.parent / "style.css", HERE / "history.css"))
        ),
    )


def outcome_of_status(status: str) -> Outcome:
    """Whether a run ended well; of a word that only a newer program knows nobody can say."""
    return "pass" if status in _WELL else "fail" if status in _BADLY else "inconclusive"


def worst_drop(record: RunRecord) -> RunScore | None:
    """The guard whose task has lost most."""
    return max(record.scores, key=lambda score: score.drop, default=None)


@cache
def _template() -> Template:
    return page_environment(HERE).get_template("history.html")


def _told(
    number: int, history: History, profile: str, flow: str, records: list[RunRecord], *, at_length: bool
) -> ProfileRuns:
    drawn = records[:DRAWN][::-1]
    curves = _curves(drawn) if at_length and len(drawn) > 1 else ()
    changes = changes_since(history.of(profile, flow)[:-1], records[0]) if at_length else ()
    return ProfileRuns(f"profile-{number}", profile, flow, tuple(records), changes, curves)


def _curves(runs: Sequence[RunRecord]) -> tuple[Curves, ...]:
    """Scores, drops and durations of runs, in the order in which they ended."""
    # A run that a check refused has no scores: no gap in a line, since nothing was measured that night.
    scored = [run for run in runs if run.scores]
    tasks = dict.fromkeys(one.task for run in reversed(scored) for one in run.scores if one.merge is not None)
    guards = dict.fromkeys((one.task, one.reference) for run in reversed(scored) for one in run.scores)
    by_task = [{one.task: one.merge for one in run.scores} for run in scored]
    by_guard = [{(one.task, one.reference): one.drop for one in run.scores} for run in scored]
    scores = [Series(task, tuple(run.get(task) for run in by_task)) for task in tasks]
    drops = [
        Series(f"{task} against {whom}", tuple(run.get((task, whom)) for run in by_guard)) for task, whom in guards
    ]
    limits = {one.max_drop for run in scored[-1:] for one in run.scores}
    limit = limits.pop() if len(limits) == 1 else None
    days = [_day(run) for run in scored]
    allowed = f"; {wording.plain(limit)} are allowed" if limit else ""
    charts = (WIDE, NARROW)
    found = (
        _drawn("Scores of the merge, points", scores, [draw_lines(scores, days, one, "points") for one in charts]),
        _drawn(
            f"Drops against the reference, points lost{allowed}",
            drops,
            [draw_lines(drops, days, one, "points lost", from_zero=True, limit=limit) for one in charts],
        ),
        _durations(runs),
    )
    return tuple(one for one in found if one is not None)


def _durations(runs: Sequence[RunRecord]) -> Curves | None:
    took = [{stage.name: stage.seconds for stage in run.stages} for run in runs]
    names = dict.fromkeys(name for run in took for name in run)
    total = {name: sum(run.get(name, 0.0) for run in took) for name in names}
    longest = sorted(total, key=lambda name: -total[name])[:_STAGES]
    unit, factor = _unit_of(max((sum(run.values()) for run in took), default=0.0))
    series = [Series(name, tuple(run.get(name, 0.0) / factor for run in took)) for name in longest]
    if len(total) > len(longest):
        others = (sum(seconds for name, seconds in run.items() if name not in longest) for run in took)
        series.append(Series("all others", tuple(seconds / factor for seconds in others)))
    days = [_day(run) for run in runs]
    plots = [draw_bars(series, days, chart, unit) for chart in (WIDE, NARROW)]
    return _drawn(f"What its stages took, {unit}", series, plots, bars=True)


def _drawn(title: str, series: Sequence[Series], plots: Sequence[str], *, bars: bool = False) -> Curves | None:
    """A picture of more than one run, which ``lines`` has drawn; it escapes the names in it."""
    from markupsafe import Markup

    if not all(plots) or len(series[0].values) < 2:
        return None
    keys = tuple((Markup(draw_key(at, bar=bars)), one.name) for at, one in enumerate(series[:MOST_SERIES]))
    return Curves(title, tuple(map(Markup, plots)), keys, max(0, len(series) - MOST_SERIES))


def _unit_of(longest: float) -> tuple[str, float]:
    return ("seconds", 1.0) if longest < 180 else ("minutes", 60.0) if longest < 3 * 3600 else ("hours", 3600.0)


def _day(record: RunRecord) -> str:
    try:
        return time.strftime("%d %b", time.localtime(record.ended)).lstrip("0")
    except (OverflowError, ValueError, OSError):
        return "?"

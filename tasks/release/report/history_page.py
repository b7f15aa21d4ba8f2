"""Render ``index.html``, one page with all runs of all profiles, without scripts or external resources.

It has the design of the reports. For each profile, it shows the status, scores and drops over runs as lines, the
durations of the stages, and the last runs with links to the reports that still exist.

Every run draws all charts at its end, so the template composes them as SVG, which is a hundred times faster than
matplotlib. ``history.css`` defines the colors of the lines, which differ from the colors of the verdicts. Bars are
shades of gray, because their parts are not the series of the lines. The horizontal axis counts runs, not hours, so the
distance between runs does not depend on clocks.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property

from mergegate.tasks.base.stage import worst_verdict
from mergegate.tasks.release.report import wording
from mergegate.tasks.release.report.history import (
    History,
    RunRecord,
    changes_since,
    format_run_time,
    outcome_of_status,
    status_word,
    worst_drop,
)
from mergegate.tasks.release.report.page import render_page
from mergegate.tasks.release.report.plots import NARROW, WIDE, Layout

# Runs per profile that are drawn and that are listed, and number of profiles with details.
MAX_DRAWN, MAX_LISTED, MAX_DETAILED = 120, 30, 40
MAX_COLORS, MAX_SERIES = 6, 12
_STAGES = 5  # number of stages with drawn durations, the slowest first
_MAX_NAMED = 3  # profiles that the first sentence names
_DASHES = ("", "7 3", "2 3", "9 3 2 3")
_SHADES = (1.0, 0.7, 0.48, 0.32, 0.2, 0.12)  # opacities of the parts of a bar, from its foot
_LEFT, _RIGHT, _HEAD, _FOOT = 44, 6, 12, 24  # margins around the values of a chart, in pixels


@dataclass(frozen=True)
class Series:
    """One line in a chart, or one part of all bars."""

    name: str  # name in the legend
    style: str  # CSS of the line or of the part
    # Value of each run. None means that the run has no value. A single value is a limit for all runs.
    values: tuple[float | None, ...]


@dataclass(frozen=True)
class Chart:
    """A chart over runs: lines, or one bar per run that is stacked from the values of all series."""

    title: str  # title, which names the unit
    days: tuple[str, ...]  # short time of each run
    series: tuple[Series, ...]  # Series with one value per run. Only the first ``MAX_SERIES`` are drawn.
    limits: tuple[Series, ...] = ()  # dashed lines at values that the series are compared with
    explanation: str = ""  # sentence about how to read the chart
    bars: bool = False  # Whether the chart has bars. Negative values are not supported then.
    from_zero: bool = False

    @cached_property
    def drawn_series(self) -> tuple[Series, ...]:
        drawn = self.series[:MAX_SERIES]
        return drawn if self.bars else tuple(item for item in drawn if any(value is not None for value in item.values))

    @cached_property
    def axis(self) -> tuple[float, float, float]:
        """Round ends of the axis, and a round step that gives three to six rules."""
        if self.bars:
            values = [
                0.0,
                *(sum(item.values[run] or 0.0 for item in self.drawn_series) for run in range(len(self.days))),
            ]
        else:
            values = [
                value for item in (*self.drawn_series, *self.limits) for value in item.values if value is not None
            ]
            values += [0.0] if self.from_zero else []
        low, high = min(values), max(values)
        raw = max(high - low, 1e-6 * max(abs(high), abs(low)), 1e-9) / 4
        power = 10.0 ** math.floor(math.log10(raw))
        step = power * next(factor for factor in (1, 2, 5, 10) if factor * power >= raw * 0.999)
        bottom, top = math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step
        return bottom, max(top, bottom + step), step

    @property
    def rules(self) -> list[float]:
        low, high, step = self.axis
        return [low + number * step for number in range(round((high - low) / step) + 1)]

    @property
    def alt_text(self) -> str:
        sentences = [f"{self.title}, over runs."]
        for item in self.drawn_series:
            values = [value for value in item.values if value is not None]
            first, last = (wording.plain(round(value, 2)) for value in (values[0], values[-1]))
            sentences.append(f"{item.name}: from {first} to {last}.")
        return " ".join(sentences)

    def labels(self, layout: Layout) -> list[int]:
        """Return the runs whose day is displayed: the first, the last, and evenly spaced ones between them."""
        last, count = len(self.days) - 1, min(len(self.days), 4 if layout.narrow else 8)
        return [round(number * last / max(1, count - 1)) for number in range(count)]

    def x(self, run: int, layout: Layout) -> float:
        return _LEFT + (layout.width - _LEFT - _RIGHT) * (run + 0.5) / len(self.days)

    def y(self, value: float, layout: Layout) -> float:
        low, high, _ = self.axis
        return _HEAD + (height_of(layout) - _HEAD - _FOOT) * (high - value) / (high - low)

    def bar_paths(self, layout: Layout) -> list[str]:
        """Return an SVG path for each drawn series, with its part of every bar."""
        width = min(24.0, 0.78 * (layout.width - _LEFT - _RIGHT) / len(self.days))
        foot, paths = [0.0] * len(self.days), []
        for item in self.drawn_series:
            pieces = []
            for run, value in enumerate(item.values):
                bottom, top = (self.y(end, layout) for end in (foot[run], foot[run] + (value or 0.0)))
                foot[run] += value or 0.0
                if bottom - top >= 0.05:
                    left = self.x(run, layout) - width / 2
                    pieces.append(f"M{left:.1f} {bottom:.1f}V{top:.1f}h{width:.1f}V{bottom:.1f}z")
            paths.append("".join(pieces))
        return paths

    def line_pieces(self, item: Series, layout: Layout) -> list[list[tuple[float, float]]]:
        """Return the points of a series, in pieces between its gaps."""
        pieces: list[list[tuple[float, float]]] = [[]]
        for run, value in enumerate(item.values):
            if value is None:
                pieces.append([])
            else:
                pieces[-1].append((round(self.x(run, layout), 1), round(self.y(value, layout), 1)))
        return [piece for piece in pieces if piece]


def height_of(layout: Layout) -> int:
    return 190 if layout.narrow else 210


@dataclass(frozen=True)
class ProfileRuns:
    """Runs of one profile and one flow, as the page shows them."""

    anchor: str
    profile: str
    flow: str
    records: tuple[RunRecord, ...]  # newest first
    changes: tuple[str, ...]
    charts: tuple[Chart, ...]

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
        is_detailed = number < MAX_DETAILED
        changes = changes_since(history.runs_of(profile, flow)[:-1], records[0]) if is_detailed else ()
        charts = _charts(records[:MAX_DRAWN][::-1]) if is_detailed else ()
        shown.append(ProfileRuns(f"profile-{number}", profile, flow, tuple(records), changes, charts))
    worst = worst_verdict(outcome_of_status(runs.last.status) for runs in shown)
    return render_page(
        "history.html",
        "reading.css",
        "history.css",
        profiles=shown,
        count=len(history.records),
        damage=history.damage_sentence(),
        pages=frozenset(pages),
        listed=MAX_LISTED,
        detailed=MAX_DETAILED,
        kind=outcome_of_status,
        page_outcome=worst if shown else "inconclusive",
        lead=_lead(shown),
        status_of=status_word,
        when=format_run_time,
        lost_most=worst_drop,
        layouts=(WIDE, NARROW),
        height_of=height_of,
        max_series=MAX_SERIES,
    )


def _lead(profiles: Sequence[ProfileRuns]) -> str:
    """Return a sentence about the latest run of each profile, with the names of failed ones."""
    count = len(profiles)
    bad = [runs for runs in profiles if outcome_of_status(runs.last.status) != "pass"]
    if not bad:
        return "The latest run succeeded." if count == 1 else f"All {count} profiles succeeded in their latest run."
    if count == 1:
        return f"The latest run did not succeed: {status_word(bad[0].last.status)}."
    named = [f"{runs.profile} ({status_word(runs.last.status)})" for runs in bad[:_MAX_NAMED]]
    if len(bad) > _MAX_NAMED:
        named.append(f"{len(bad) - _MAX_NAMED} more")
    names = f"{', '.join(named[:-1])} and {named[-1]}" if len(named) > 1 else named[0]
    return f"{count - len(bad)} of {count} profiles succeeded in their latest run. Check {names}."


def _charts(runs: Sequence[RunRecord]) -> tuple[Chart, ...]:
    """Return charts of the scores, drops and durations of runs, which are given in the order in which they ended.

    A chart with fewer than two runs, or without values, is left out.
    """
    # A run that a check refused measured nothing. It has no scores and leaves no gap in the lines.
    scored = [run for run in runs if run.scores]
    tasks = dict.fromkeys(item.task for run in reversed(scored) for item in run.scores if item.merge is not None)
    guards = dict.fromkeys((item.task, item.reference) for run in reversed(scored) for item in run.scores)
    by_task = [{item.task: item.merge for item in run.scores} for run in scored]
    by_guard = [{(item.task, item.reference): item.drop for item in run.scores} for run in scored]
    # A task has the same color in both charts. If it has several references, their lines have different dashes.
    numbers = {task: number for number, task in enumerate(dict.fromkeys([*tasks, *(task for task, _ in guards)]))}
    references = {task: [guard[1] for guard in guards if guard[0] == task] for task in numbers}

    def stroke(task: str, reference: int = 0) -> str:
        color, dashes = (
            numbers[task] % MAX_COLORS + 1,
            _DASHES[(numbers[task] // MAX_COLORS + reference) % len(_DASHES)],
        )
        return f"stroke:var(--series-{color});stroke-width:1.8;stroke-dasharray:{dashes or 'none'}"

    scores = [Series(task, stroke(task), tuple(run.get(task) for run in by_task)) for task in tasks]
    drops = [
        Series(
            f"{task}, reference {reference}",
            stroke(task, references[task].index(reference)),
            tuple(run.get((task, reference)) for run in by_guard),
        )
        for task, reference in guards
    ]
    decisions = {(item.max_drop, item.margin) for run in scored[-1:] for item in run.scores}
    limits: tuple[Series, ...] = ()
    explanation = "A positive drop is a loss. The limits differ between the guards, so they are not drawn."
    if len(decisions) == 1:
        max_drop, margin = decisions.pop()
        explanation = "A positive drop is a loss. A dashed line shows a limit of the latest run."
        named = {"max_drop": max_drop, "margin": margin} if max_drop != margin else {"max_drop and margin": margin}
        inks = ("fail", "inconclusive")
        limits = tuple(
            Series(
                f"{name} {wording.plain(value)}",
                f"stroke:var(--{ink});stroke-width:1.4;stroke-dasharray:4 3",
                (value,),
            )
            for (name, value), ink in zip(named.items(), inks, strict=False)
        )

    # Durations are stacked bars of all runs, in a unit that suits the longest.
    seconds_by_run = [{stage.name: stage.seconds for stage in run.stages} for run in runs]
    names = dict.fromkeys(name for run in seconds_by_run for name in run)
    total = {name: sum(run.get(name, 0.0) for run in seconds_by_run) for name in names}
    longest = sorted(total, key=lambda name: -total[name])[:_STAGES]
    longest_run = max((sum(run.values()) for run in seconds_by_run), default=0.0)
    unit, factor = (
        ("seconds", 1.0) if longest_run < 180 else ("minutes", 60.0) if longest_run < 3 * 3600 else ("hours", 3600.0)
    )
    parts = {name: [run.get(name, 0.0) for run in seconds_by_run] for name in longest}
    if len(total) > len(longest):
        others = [sum(seconds for name, seconds in run.items() if name not in longest) for run in seconds_by_run]
        parts["all other stages"] = others
    durations = [
        Series(name, f"fill:var(--muted);fill-opacity:{_SHADES[shade]}", tuple(value / factor for value in seconds))
        for shade, (name, seconds) in enumerate(parts.items())
    ]
    days, all_days = (tuple(map(_day, each)) for each in (scored, runs))
    charts = (
        Chart("Score of the merge, in points", days, tuple(scores)),
        Chart("Drop from the reference, in points", days, tuple(drops), limits, explanation, from_zero=True),
        Chart(f"Time per stage, in {unit}", all_days, tuple(durations), bars=True),
    )
    return tuple(
        chart
        for chart in charts
        if len(chart.days) > 1 and any(value or not chart.bars for item in chart.drawn_series for value in item.values)
    )


def _day(record: RunRecord) -> str:
    try:
        return time.strftime("%d %b", time.localtime(record.ended)).lstrip("0")
    except (OverflowError, ValueError, OSError):
        return "?"

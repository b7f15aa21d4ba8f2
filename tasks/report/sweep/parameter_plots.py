"""Plot the parameters of a search: scores against each value (slices), or the best candidates as lines (parallel).

A slice shows one parameter while all others vary. A ridge means that the parameter matters, but a cloud does not mean
that it is irrelevant. In the parallel plot, each parameter is a row from its low to its high end, and a candidate is a
line through all rows. Rows keep the names readable and suit tall phones.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mergegate.tasks.report.rows import shorten
from mergegate.tasks.report.svg import Ink, TextStyle, drawing, inline, write
from mergegate.tasks.report.sweep.canvas import (
    DASHED,
    NARROW,
    WIDE,
    Axis,
    Drawing,
    Key,
    Mark,
    blank,
    legend,
    mark_trials,
    mark_winner,
    panel,
    score_axis,
    ticks,
    trial_keys,
    winner_key,
)
from mergegate.tasks.report.sweep.content import ParameterValue, ReportedParameter, SweepContent
from mergegate.tasks.report.sweep.study_facts import HAND_WRITTEN, score_in, state_of, trial_numbered
from mergegate.tasks.report.sweep.wording import value_text, winner_word
from mergegate.tasks.sweep import Trial

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAX_SLICES = 9
_CHARACTER = 7.0  # width of a character in a choice's name, in pixels


def share_of(parameter: ReportedParameter, value: ParameterValue | None) -> float:
    """Return the position of a value in its range, from 0 to 1, or NaN if it is missing or not a choice."""
    if parameter.type == "category":
        # Compare types too, because True equals 1 in Python.
        choices: list[tuple[type, ParameterValue | None]] = [(type(choice), choice) for choice in parameter.among]
        if (type(value), value) not in choices:
            return math.nan
        return (choices.index((type(value), value)) + 0.5) / len(choices)
    if value is None or isinstance(value, str):
        return math.nan
    low, high, position = float(parameter.low), float(parameter.high), float(value)
    if parameter.type == "log" and low > 0:
        low, high, position = math.log(low), math.log(high), math.log(max(position, low))
    return (position - low) / (high - low) if high > low else 0.5


def slices_plot(content: SweepContent, objective: int) -> tuple[str, ...]:
    """Return plots with one panel per parameter, wide and narrow.

    The result is empty if fewer than two trials have a score, or with more than ``MAX_SLICES`` parameters.
    """
    scored = [trial for trial in content.trials if state_of(trial) != "failed"]
    if len(scored) < 2 or not 0 < len(content.parameters) <= MAX_SLICES:
        return ()
    axis, plots = score_axis(content, objective), []
    for layout in (WIDE, NARROW):
        plot = f"slices-{objective}-{layout.name}"
        keys = trial_keys(content, [trial for trial in scored if trial.point], objective, axis)
        if content.winner is not None:
            keys.append(winner_key(content))
        if any(parameter.start is not None for parameter in content.parameters):
            keys.append(Key.style_key("start", color=Ink.INCONCLUSIVE.value, **DASHED))
        columns = min(len(content.parameters), 2 if layout.narrow else 3)
        rows = math.ceil(len(content.parameters) / columns)
        legend_columns = 2 if layout.narrow else len(keys)
        head = 14 + 19 * math.ceil(len(keys) / legend_columns)
        left, gap, panel_height, title, foot = (44, 16, 120, 28, 26) if layout.narrow else (66, 34, 170, 32, 30)
        panel_width = (layout.width - left - gap * (columns - 1) - 4) / columns
        if len(content.parameters) < columns + 1 and not layout.narrow:
            panel_width = min(panel_width, 400)
        height = head + rows * (title + panel_height + foot)
        with drawing(plot):
            figure = blank(layout, height)
            for index, parameter in enumerate(content.parameters):
                row, column = divmod(index, columns)
                box = (
                    left + column * (panel_width + gap),
                    head + row * (title + panel_height + foot) + title,
                    panel_width,
                    panel_height,
                )
                axes = panel(figure, layout, height, box)
                axes.set_ylim(axis.low, axis.high)
                ticks(axes, "y", 4)
                if column:
                    axes.set_yticklabels([])
                name = shorten(parameter.name, 17 if layout.narrow else 34)
                write(axes, (0, 1), name, TextStyle(size=12 if layout.narrow else 13, bold=True), shift=(0, -13))
                _draw_slice(axes, content, parameter, objective, axis, panel_width)
            legend(figure, layout, keys, 0 if layout.narrow else left - 6, legend_columns)
            plots.append(inline(figure, plot, spoken_values(content)))
    return tuple(plots)


def _draw_slice(
    axes: Axes, content: SweepContent, parameter: ReportedParameter, objective: int, axis: Axis, width: float
) -> None:
    # Label the ends and the middle of a range, or the choices of a category.
    if parameter.type == "category":
        room = int(width / len(parameter.among) / _CHARACTER)
        positions = [share_of(parameter, choice) for choice in parameter.among]
        names = [shorten(value_text(choice), max(3, room)) for choice in parameter.among]
    else:
        low, high = float(parameter.low), float(parameter.high)
        middle = (low + high) / 2
        if parameter.type == "log" and low > 0:
            middle = float(f"{math.sqrt(low * high):.1g}")
        if parameter.type == "integer":
            middle = round(middle)
        positions = [0.0, share_of(parameter, middle), 1.0]
        names = [value_text(low), value_text(middle), value_text(high)]
        if len(set(names)) < 3:
            positions, names = [0.0, 1.0], [value_text(low), value_text(high)]
    axes.set_xticks(positions, names)

    axes.set_xlim(-0.03, 1.03)
    start = share_of(parameter, parameter.start)
    if math.isfinite(start):
        axes.axvline(start, color=Ink.INCONCLUSIVE.value, zorder=2, **DASHED)
    factor = content.objectives[objective].factor
    step, marks = 0.03 * (axis.high - axis.low), []
    for trial in content.trials:
        x, y = share_of(parameter, trial.point.get(parameter.name)), factor * score_in(trial, objective)
        if state_of(trial) == "failed" or not math.isfinite(x):
            continue
        if parameter.type == "category" and trial.origin != HAND_WRITTEN:
            # Spread the trials of one choice. The golden ratio fills a line evenly, the same way every time.
            x += ((trial.number * 0.6180339887) % 1 - 0.5) * 0.5 / len(parameter.among)
        if trial.number == content.winner:
            mark_winner(axes, x, axis.clip(y))
        else:
            marks.append(Mark(x, max(y, axis.low + step), trial, "v" if axis.is_below(y) else ""))
    mark_trials(axes, marks)


def spoken_values(content: SweepContent) -> str:
    """Return a text alternative to the plots for screen readers: start and winner of each parameter."""
    winner = trial_numbered(content, content.winner)
    sentences = [
        f"{parameter.name}: start {value_text(parameter.start)}, winner {value_text(winner.point.get(parameter.name))}."
        for parameter in content.parameters
        if winner is not None
    ]
    return " ".join(["Scores against the values of the parameters.", *sentences])


_MARGINS = {"wide": (236, 132), "narrow": (2, 2)}  # left and right, in pixels
_BEST_SHARE = 0.25  # share of the trials that are drawn as lines
_MARKS: dict[str, Any] = {"linestyle": "none", "marker": "|", "markersize": 7, "markeredgewidth": 1.2}
_OTHERS: dict[str, Any] = {"color": Ink.MUTED.value, "alpha": 0.35, "zorder": 2, **_MARKS}
_LINES: dict[str, Any] = {"color": Ink.ACCENT.value, "linewidth": 1.1, "alpha": 0.5, "zorder": 3}
_WINNERS_LINE: dict[str, Any] = {"color": Ink.PASS.value, "linewidth": 2.6}
# On a narrow page, names are above their rows, where lines would cross them. All trials are marks there.
_BETTER: dict[str, Any] = {**_LINES, **_MARKS, "alpha": 0.9, "markersize": 10, "markeredgewidth": 1.6}
_START: dict[str, Any] = {**_MARKS, "markersize": 15, "markeredgewidth": 1.8}
_WINNER: dict[str, Any] = {"color": Ink.PASS.value, "linestyle": "none", "marker": "o", "markersize": 9}


def parallel_plot(content: SweepContent, objective: int) -> tuple[str, ...]:
    """Return plots with one line per candidate, wide and narrow. Empty if fewer than two trials have a score."""
    scored = [trial for trial in content.trials if state_of(trial) != "failed"]
    if len(scored) < 2:
        return ()
    ranked = sorted(scored, key=lambda trial: -score_in(trial, objective))
    better = {trial.number for trial in ranked[: max(1, round(_BEST_SHARE * len(ranked)))]}
    start = {parameter.name: parameter.start for parameter in content.parameters}
    plots = []
    for layout in (WIDE, NARROW):
        plot = f"parallel-{objective}-{layout.name}"
        better_style = _BETTER if layout.narrow else _LINES
        keys = [Key.style_key("the best quarter", **better_style), Key.style_key("all others", **_OTHERS)]
        if any(value is not None for value in start.values()):
            keys.append(Key.style_key("start", color=Ink.INCONCLUSIVE.value, **(_START if layout.narrow else DASHED)))
        if content.winner is not None:
            keys.append(Key.style_key(winner_word(content), **(_WINNER if layout.narrow else _WINNERS_LINE)))
        columns = 2 if layout.narrow else len(keys)
        head, row, foot = 16 + 19 * math.ceil(len(keys) / columns), 38 if layout.narrow else 30, 8
        left, right = _MARGINS[layout.name]
        count = len(content.parameters)
        height = head + count * row + foot
        with drawing(plot):
            figure = blank(layout, height)
            axes = panel(figure, layout, height, (left, head, layout.width - left - right, count * row))
            axes.spines["bottom"].set_visible(False)
            axes.grid(visible=False)
            axes.set_xticks([])
            axes.set_yticks([])
            axes.set_xlim(-0.01, 1.01)
            axes.set_ylim(count - 0.5, -0.5)
            below = 0.22 if layout.narrow else 0.0  # names are above their line
            for trial in ranked:
                style = better_style if trial.number in better else _OTHERS
                _path(axes, content, trial.point, below, **style)
            starts_style = _START if layout.narrow else DASHED
            _path(axes, content, start, below, color=Ink.INCONCLUSIVE.value, zorder=4, **starts_style)
            winner = trial_numbered(content, content.winner)
            if winner is not None:
                _path(axes, content, winner.point, below, zorder=5, **(_WINNER if layout.narrow else _WINNERS_LINE))
            for index, parameter in enumerate(content.parameters):
                axes.plot([0, 1], [index + below] * 2, color=Ink.RULE.value, linewidth=1.2, zorder=1)
                _write_names(axes, parameter, index, winner, layout)
            legend(figure, layout, keys, 0 if layout.narrow else left - 6, columns)
            plots.append(inline(figure, plot, spoken_values(content)))
    return tuple(plots)


def _path(
    axes: Axes, content: SweepContent, point: Mapping[str, ParameterValue | None], below: float, **style: Any
) -> None:
    """Draw the line of one candidate through all rows. A category that is not among the choices leaves a gap."""
    positions = [share_of(parameter, point.get(parameter.name)) for parameter in content.parameters]
    axes.plot(positions, [index + below for index in range(len(positions))], clip_on=False, **style)


def _write_names(axes: Axes, parameter: ReportedParameter, row: int, winner: Trial | None, layout: Drawing) -> None:
    """Write the name of a parameter, the ends of its range and the winner's value next to its row."""
    value = value_text(winner.point.get(parameter.name)) if winner is not None else ""
    ends = (value_text(parameter.low), value_text(parameter.high))
    if parameter.type == "category":
        ends = (f"{len(parameter.among)} choices", "")

    def put_text(end: int, text: str, shift: float, style: TextStyle) -> None:
        offset = (shift, -7 if layout.narrow else 0)
        write(axes, (end, row), text, style, shift=offset, coordinates=axes.get_yaxis_transform())

    size = 11.5 if layout.narrow else 12
    winner_style = TextStyle(size=size, bold=True, ink=Ink.PASS, align="right")
    if layout.narrow:
        put_text(0, shorten(parameter.name, 24), 2, TextStyle(size=size))
        span = f"{ends[0]} to {ends[1]}" if ends[1] else ends[0]
        put_text(1, span, -62, TextStyle(size=10.5, ink=Ink.MUTED, align="right"))
        put_text(1, value, -2, winner_style)
    else:
        left, right = _MARGINS[layout.name]
        put_text(0, shorten(parameter.name, 26), -left, TextStyle(size=size))
        put_text(0, ends[0], -10, TextStyle(size=11, ink=Ink.MUTED, align="right"))
        put_text(1, ends[1], 10, TextStyle(size=11, ink=Ink.MUTED))
        put_text(1, shorten(value, 11), right, winner_style)

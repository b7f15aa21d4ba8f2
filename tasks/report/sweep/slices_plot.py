"""Plot scores against the values of the parameters, with one slice per parameter.

A slice shows one parameter while all others vary. A ridge means that the parameter matters, but a cloud does not mean
that it does not matter.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from mergegate.tasks.report.rows import shortened
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
from mergegate.tasks.report.sweep.wording import value_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_SLICES = 9
_CHARACTER = 7.0  # width of a character in a choice's name, in pixels


def share_of(parameter: ReportedParameter, value: ParameterValue | None) -> float:
    """Return the position of a value in its range, from 0 to 1, or NaN if it has none."""
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
    """Return the plots, wide and narrow.

    The result is empty if fewer than two trials have a score, or with more than ``MOST_SLICES`` parameters.
    """
    scored = sum(state_of(trial) != "failed" for trial in content.trials)
    if scored < 2 or not 0 < len(content.parameters) <= MOST_SLICES:
        return ()
    return tuple(_slices(content, objective, layout, f"slices-{objective}-{layout.name}") for layout in (WIDE, NARROW))


def _slices(content: SweepContent, objective: int, layout: Drawing, plot: str) -> str:
    axis = score_axis(content, objective)
    scored = [trial for trial in content.trials if state_of(trial) != "failed" and trial.point]
    keys = trial_keys(content, scored, objective, axis)
    if content.winner is not None:
        keys.append(winner_key(content))
    if any(parameter.start is not None for parameter in content.parameters):
        keys.append(Key.styled("start", color=Ink.INCONCLUSIVE.value, **DASHED))
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
            name = shortened(parameter.name, 17 if layout.narrow else 34)
            write(axes, (0, 1), name, TextStyle(size=12 if layout.narrow else 13, bold=True), shift=(0, -13))
            _label_range(axes, parameter, panel_width)
            _mark_slice(axes, content, parameter, objective, axis)
        legend(figure, layout, keys, 0 if layout.narrow else left - 6, legend_columns)
        return inline(figure, plot, spoken_values(content))


def _mark_slice(axes: Axes, content: SweepContent, parameter: ReportedParameter, objective: int, axis: Axis) -> None:
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


def _label_range(axes: Axes, parameter: ReportedParameter, width: float) -> None:
    """Label the ends and the middle of a range, or the choices of a category."""
    if parameter.type == "category":
        room = int(width / len(parameter.among) / _CHARACTER)
        positions = [share_of(parameter, choice) for choice in parameter.among]
        names = [shortened(value_text(choice), max(3, room)) for choice in parameter.among]
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


def spoken_values(content: SweepContent) -> str:
    """Return the text alternative for screen readers."""
    winner = trial_numbered(content, content.winner)
    sentences = [
        f"{parameter.name}: start {value_text(parameter.start)}, winner {value_text(winner.point.get(parameter.name))}."
        for parameter in content.parameters
        if winner is not None
    ]
    return " ".join(["Scores against the values of the parameters.", *sentences])

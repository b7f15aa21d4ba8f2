"""Plot many parameters: each is a row from its low to its high end, and the best candidates are lines through all rows.

Rows are used instead of columns because names stay readable and phones are tall.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mergegate.tasks.report.rows import shortened
from mergegate.tasks.report.svg import Ink, TextStyle, drawing, inline, write
from mergegate.tasks.report.sweep.canvas import DASHED, NARROW, WIDE, Drawing, Key, blank, legend, panel
from mergegate.tasks.report.sweep.content import ParameterValue, ReportedParameter, SweepContent
from mergegate.tasks.report.sweep.slices_plot import share_of, spoken_values
from mergegate.tasks.report.sweep.study_facts import score_in, state_of, trial_numbered
from mergegate.tasks.report.sweep.wording import value_text, winner_word
from mergegate.tasks.sweep import Trial

if TYPE_CHECKING:
    from matplotlib.axes import Axes

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
    """Return the plots, wide and narrow. The result is empty if fewer than two trials have a score."""
    if sum(state_of(trial) != "failed" for trial in content.trials) < 2:
        return ()
    plots = ((layout, f"parallel-{objective}-{layout.name}") for layout in (WIDE, NARROW))
    return tuple(_draw(content, objective, layout, plot) for layout, plot in plots)


def _draw(content: SweepContent, objective: int, layout: Drawing, plot: str) -> str:
    scored = [trial for trial in content.trials if state_of(trial) != "failed"]
    ranked = sorted(scored, key=lambda trial: -score_in(trial, objective))
    better = {trial.number for trial in ranked[: max(1, round(_BEST_SHARE * len(ranked)))]}
    start = {parameter.name: parameter.start for parameter in content.parameters}
    better_style = _BETTER if layout.narrow else _LINES
    keys = [Key.styled("the best quarter", **better_style), Key.styled("all others", **_OTHERS)]
    if any(value is not None for value in start.values()):
        keys.append(Key.styled("start", color=Ink.INCONCLUSIVE.value, **(_START if layout.narrow else DASHED)))
    if content.winner is not None:
        keys.append(Key.styled(winner_word(content), **(_WINNER if layout.narrow else _WINNERS_LINE)))
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
        return inline(figure, plot, spoken_values(content))


def _path(
    axes: Axes, content: SweepContent, point: Mapping[str, ParameterValue | None], below: float, **style: Any
) -> None:
    """Draw one point through all rows. A category that is not among the choices leaves a gap."""
    positions = [share_of(parameter, point.get(parameter.name)) for parameter in content.parameters]
    axes.plot(positions, [index + below for index in range(len(positions))], clip_on=False, **style)


def _write_names(axes: Axes, parameter: ReportedParameter, row: int, winner: Trial | None, layout: Drawing) -> None:
    """Write the name of a parameter, the ends of its range and the winner's value next to its row."""
    value = value_text(winner.point.get(parameter.name)) if winner is not None else ""
    ends = (value_text(parameter.low), value_text(parameter.high))
    if parameter.type == "category":
        ends = (f"{len(parameter.among)} choices", "")

    def put(end: int, text: str, shift: float, style: TextStyle) -> None:
        offset = (shift, -7 if layout.narrow else 0)
        write(axes, (end, row), text, style, shift=offset, coordinates=axes.get_yaxis_transform())

    size = 11.5 if layout.narrow else 12
    winner_style = TextStyle(size=size, bold=True, ink=Ink.PASS, align="right")
    if layout.narrow:
        put(0, shortened(parameter.name, 24), 2, TextStyle(size=size))
        span = f"{ends[0]} to {ends[1]}" if ends[1] else ends[0]
        put(1, span, -62, TextStyle(size=10.5, ink=Ink.MUTED, align="right"))
        put(1, value, -2, winner_style)
    else:
        left, right = _MARGINS[layout.name]
        put(0, shortened(parameter.name, 26), -left, TextStyle(size=size))
        put(0, ends[0], -10, TextStyle(size=11, ink=Ink.MUTED, align="right"))
        put(1, ends[1], 10, TextStyle(size=11, ink=Ink.MUTED))
        put(1, shortened(value, 11), right, winner_style)

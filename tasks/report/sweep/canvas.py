"""Provide the shared parts of the sweep plots: panels in pixels, marks for trials, and an axis that resists outliers.

The shape and color of a mark show the origin of a trial. Its fill shows the state of the trial: filled if it was scored
on all documents, hollow if it was dropped, a cross if it violates a constraint. No information depends on color alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from mergegate.tasks.report import wording
from mergegate.tasks.report.svg import Ink
from mergegate.tasks.report.sweep.content import SweepContent
from mergegate.tasks.report.sweep.study_facts import BASELINE, HAND_WRITTEN, SAMPLER, score_in, state_of
from mergegate.tasks.report.sweep.wording import SAMPLERS, winner_word
from mergegate.tasks.sweep import Trial

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK: dict[str, Ink] = {HAND_WRITTEN: Ink.INCONCLUSIVE, SAMPLER: Ink.TEXT, BASELINE: Ink.ACCENT}
SHAPE = {HAND_WRITTEN: "s", SAMPLER: "o", BASELINE: "D"}
SIZE = {HAND_WRITTEN: 6.5, SAMPLER: 6.0, BASELINE: 5.2}
FAINT = 0.55  # opacity of all trials except the best
DASHED: dict[str, Any] = {"linewidth": 1.4, "linestyle": (0, (4, 3))}


@dataclass(frozen=True)
class Drawing:
    """Name and width of a drawing, in pixels."""

    name: str
    width: int
    narrow: bool


WIDE = Drawing("wide", 920, narrow=False)
NARROW = Drawing("narrow", 350, narrow=True)


@dataclass(frozen=True)
class Axis:
    """Scores from ``low`` to ``high``, in the displayed unit. Lower scores are drawn on the lower edge."""

    low: float
    high: float

    def clip(self, value: float) -> float:
        return max(value, self.low)

    def is_below(self, value: float) -> bool:
        return value < self.low


def blank(layout: Drawing, height: float) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(layout.width / 72, height / 72), dpi=72)
    figure.patch.set_visible(False)
    return figure


def panel(figure: Figure, layout: Drawing, height: float, box: tuple[float, float, float, float]) -> Axes:
    """Return axes at ``box``: left, top, width and height in pixels from the upper left corner."""
    left, top, width, box_height = box
    axes = figure.add_axes(
        (left / layout.width, (height - top - box_height) / height, width / layout.width, box_height / height)
    )
    axes.patch.set_visible(False)
    for side in ("left", "right", "top"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(Ink.RULE.value)
    axes.tick_params(axis="both", length=0, pad=6, labelsize=12, labelcolor=Ink.MUTED.value)
    axes.grid(axis="y", color=Ink.RULE.value, linewidth=0.7)
    axes.set_axisbelow(True)
    return axes


def ticks(axes: Axes, side: Literal["x", "y"], count: int, *, integer: bool = False) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axis = axes.xaxis if side == "x" else axes.yaxis
    axis.set_major_locator(MaxNLocator(count, steps=[1, 2, 5, 10], integer=integer))
    axis.set_major_formatter(FuncFormatter(lambda value, _: wording.plain(round(float(value), 9) + 0.0)))


def score_axis(content: SweepContent, objective: int) -> Axis:
    """Return an axis that covers the better half of the scores and a little more. Outliers would compress the rest."""
    factor = content.objectives[objective].factor
    scores = sorted(factor * score_in(trial, objective) for trial in content.trials if state_of(trial) != "failed")
    if not scores:
        return Axis(0.0, 1.0)
    levels = [
        factor * score_in(trial, objective)
        for trial in content.trials
        if trial.origin == HAND_WRITTEN and state_of(trial) != "failed"
    ]
    top, median = scores[-1], scores[len(scores) // 2]
    bottom = max(scores[0], top - 2.2 * (top - median)) if top > median else scores[0]
    # The front and the best hand-written recipe are always visible. Hopeless hand-written recipes may be cut off.
    shown = [factor * score_in(trial, objective) for trial in content.trials if trial.number in content.front]
    bottom = min([bottom, *shown, *([max(levels)] if levels else [])])
    span = top - bottom or abs(top) or 1.0
    return Axis(bottom - 0.06 * span, top + 0.08 * span)


@dataclass(frozen=True)
class Mark:
    """A trial at its position. ``beyond`` is 'v' if the score is below the plot and '<' if it is to the left of it."""

    x: float
    y: float
    trial: Trial
    beyond: str = ""
    strong: bool = False


def mark_trials(axes: Axes, marks: Iterable[Mark]) -> None:
    """Draw the marks, with one call for all marks of the same style so that a thousand trials are as fast as ten."""
    groups: dict[tuple[str, str, str, bool], list[Mark]] = {}
    for mark in marks:
        groups.setdefault((mark.trial.origin, state_of(mark.trial), mark.beyond, mark.strong), []).append(mark)
    for (origin, state, beyond, strong), group in groups.items():
        ink = INK[origin].value
        style: dict[str, Any] = {"markersize": SIZE[origin], "alpha": 1.0 if strong else FAINT, "zorder": 4}
        style |= {"linestyle": "none", "marker": SHAPE[origin]}
        if beyond:
            style |= {"marker": beyond, "markerfacecolor": "none", "markeredgecolor": ink, "clip_on": False}
        elif state == "infeasible":
            style |= {"marker": "+", "color": ink, "markeredgewidth": 1.4, "markersize": 8}
        elif state == "dropped":
            style |= {"markerfacecolor": "none", "markeredgecolor": ink}
        else:
            style |= {"markerfacecolor": ink, "markeredgewidth": 0}
        axes.plot([mark.x for mark in group], [mark.y for mark in group], **style)


def mark_winner(axes: Axes, x: float, y: float) -> None:
    edge: dict[str, Any] = {"markeredgecolor": Ink.PAPER.value, "markeredgewidth": 1.4}
    axes.plot([x], [y], "o", markersize=12, color=Ink.PASS.value, zorder=7, clip_on=False, **edge)


@dataclass(frozen=True)
class Key:
    """An entry in a legend."""

    text: str
    style: tuple[tuple[str, Any], ...]

    @staticmethod
    def style_key(text: str, **style: Any) -> Key:
        return Key(text, tuple(style.items()))


def trial_keys(content: SweepContent, trials: Sequence[Trial], objective: int, axis: Axis) -> list[Key]:
    """Return legend entries for the kinds of marks that occur in a plot."""
    keys = []
    sampler = SAMPLERS.get(content.sampler, content.sampler)
    factor = content.objectives[objective].factor
    origins = {trial.origin for trial in trials}
    names = ((SAMPLER, sampler), (BASELINE, "random baseline"), (HAND_WRITTEN, "hand-written"))
    for origin, text in names:
        if origin in origins:
            face = {"markerfacecolor": INK[origin].value, "markeredgewidth": 0, "linestyle": "none"}
            keys.append(Key.style_key(text, marker=SHAPE[origin], markersize=SIZE[origin], **face))
    states = {state_of(trial) for trial in trials}
    hollow = {"markerfacecolor": "none", "markeredgecolor": Ink.MUTED.value, "linestyle": "none"}
    if "dropped" in states:
        keys.append(Key.style_key("dropped early", marker="o", markersize=6, **hollow))
    if "infeasible" in states:
        keys.append(
            Key.style_key("violates a constraint", marker="+", markersize=8, **{**hollow, "markeredgewidth": 1.4})
        )
    if any(axis.is_below(factor * score_in(trial, objective)) for trial in trials if state_of(trial) != "failed"):
        keys.append(Key.style_key("below the chart", marker="v", markersize=6, **hollow))
    return keys


def winner_key(content: SweepContent) -> Key:
    return Key.style_key(winner_word(content), marker="o", markersize=9, color=Ink.PASS.value, linestyle="none")


def legend(figure: Figure, layout: Drawing, keys: Sequence[Key], left_margin: float, columns: int) -> None:
    """Draw the legend above the plot, starting ``left_margin`` pixels from the left."""
    from matplotlib.lines import Line2D

    # Matplotlib fills columns first. Reorder the entries so that they run along the rows.
    rows = math.ceil(len(keys) / columns)
    order = [row * columns + column for column in range(columns) for row in range(rows)]
    handles = [
        Line2D([], [], label=keys[index].text, **dict(keys[index].style)) for index in order if index < len(keys)
    ]
    figure.legend(
        handles=handles,
        loc="upper left",
        bbox_to_anchor=(left_margin / layout.width, 1),
        ncols=columns,
        frameon=False,
        fontsize=12,
        labelcolor=Ink.MUTED.value,
        borderaxespad=0,
        borderpad=0.3,
        handlelength=1.4,
        handletextpad=0.5,
        columnspacing=1.4,
        labelspacing=0.35,
    )

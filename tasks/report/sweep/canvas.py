"""What the plots of a sweep have in common: panels in pixels, how a trial is marked, an axis that outliers cannot ruin.

A trial is marked by where it comes from (shape and colour) and by what became of it (filled: asked everything; hollow:
dropped; a cross: outside a constraint). So nothing is told by colour alone.
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
from mergegate.tasks.report.sweep.wording import winner_word
from mergegate.tasks.sweep import Trial

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK: dict[str, Ink] = {HAND_WRITTEN: Ink.INCONCLUSIVE, SAMPLER: Ink.TEXT, BASELINE: Ink.ACCENT}
SHAPE = {HAND_WRITTEN: "s", SAMPLER: "o", BASELINE: "D"}
SIZE = {HAND_WRITTEN: 6.5, SAMPLER: 6.0, BASELINE: 5.2}
FAINT = 0.55  # of all trials but the best ones
DASHED: dict[str, Any] = {"linewidth": 1.4, "linestyle": (0, (4, 3))}


@dataclass(frozen=True)
class Drawing:
    """A drawing in pixels."""

    name: str
    width: int
    narrow: bool


WIDE = Drawing("wide", 920, narrow=False)
NARROW = Drawing("narrow", 350, narrow=True)


@dataclass(frozen=True)
class Axis:
    """Scores from ``low`` to ``high``, in the unit that is shown. What is below is drawn on the lower edge."""

    low: float
    high: float

    def held(self, value: float) -> float:
        return max(value, self.low)

    def is_below(self, value: float) -> bool:
        return value < self.low


def blank(drawn: Drawing, height: float) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(drawn.width / 72, height / 72), dpi=72)
    figure.patch.set_visible(False)
    return figure


def panel(figure: Figure, drawn: Drawing, height: float, box: tuple[float, float, float, float]) -> Axes:
    """Axes at ``box``: left, top, width, height in pixels from the upper left corner."""
    left, top, width, tall = box
    axes = figure.add_axes((left / drawn.width, (height - top - tall) / height, width / drawn.width, tall / height))
    axes.patch.set_visible(False)
    for side in ("left", "right", "top"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(Ink.RULE.value)
    axes.tick_params(axis="both", length=0, pad=6, labelsize=12, labelcolor=Ink.MUTED.value)
    axes.grid(axis="y", color=Ink.RULE.value, linewidth=0.7)
    axes.set_axisbelow(True)
    return axes


def ticks(axes: Axes, which: Literal["x", "y"], count: int, *, integer: bool = False) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axis = axes.xaxis if which == "x" else axes.yaxis
    axis.set_major_locator(MaxNLocator(count, steps=[1, 2, 5, 10], integer=integer))
    axis.set_major_formatter(FuncFormatter(lambda value, _: wording.plain(round(float(value), 9) + 0.0)))


def score_axis(content: SweepContent, objective: int) -> Axis:
    """Where the better half is, and a little more: far outliers would squeeze all others into a line."""
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
    # The reference and a front are always in the picture; of several hand-written recipes those that are not hopeless.
    shown = [factor * score_in(trial, objective) for trial in content.trials if trial.number in content.front]
    bottom = min([bottom, *shown, *([max(levels)] if levels else [])])
    span = top - bottom or abs(top) or 1.0
    return Axis(bottom - 0.06 * span, top + 0.08 * span)


@dataclass(frozen=True)
class Mark:
    """A trial at its place. ``beyond``: 'v' or '<', of one whose score is outside of the picture, under it or left."""

    x: float
    y: float
    trial: Trial
    beyond: str = ""
    strong: bool = False


def mark_trials(axes: Axes, marks: Iterable[Mark]) -> None:
    """Those that look alike in one stroke: a thousand trials are drawn as fast as ten."""
    alike: dict[tuple[str, str, str, bool], list[Mark]] = {}
    for one in marks:
        alike.setdefault((one.trial.origin, state_of(one.trial), one.beyond, one.strong), []).append(one)
    for (origin, state, beyond, strong), group in alike.items():
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
        axes.plot([one.x for one in group], [one.y for one in group], **style)


def mark_winner(axes: Axes, x: float, y: float) -> None:
    edge: dict[str, Any] = {"markeredgecolor": Ink.PAPER.value, "markeredgewidth": 1.4}
    axes.plot([x], [y], "o", markersize=12, color=Ink.PASS.value, zorder=7, clip_on=False, **edge)


def write(
    axes: Axes,
    at: tuple[float, float],
    text: str,
    *,
    shift: tuple[float, float] = (0, 0),
    coordinates: Any = "data",
    align: Literal["left", "center", "right"] = "left",
    size: float = 12,
    bold: bool = False,
    ink: Ink = Ink.TEXT,
) -> None:
    """``text`` at a point, ``shift`` pixels right of and below it."""
    axes.annotate(
        text,
        at,
        xycoords=coordinates,
        xytext=(shift[0], -shift[1]),
        textcoords="offset points",
        ha=align,
        va="center_baseline",
        fontsize=size,
        fontweight="bold" if bold else "normal",
        color=ink.value,
        annotation_clip=False,
        zorder=9,
    )


@dataclass(frozen=True)
class Key:
    """An entry of a legend."""

    text: str
    style: tuple[tuple[str, Any], ...]

    @staticmethod
    def of(text: str, **style: Any) -> Key:
        return Key(text, tuple(style.items()))


def keys_of_trials(trials: Sequence[Trial], *, sampler: str, objective: int, axis: Axis, factor: float) -> list[Key]:
    """What the marks mean, of those that occur."""
    found = []
    origins = {trial.origin for trial in trials}
    names = ((SAMPLER, sampler), (BASELINE, "random baseline"), (HAND_WRITTEN, "hand-written"))
    for origin, text in names:
        if origin in origins:
            face = {"markerfacecolor": INK[origin].value, "markeredgewidth": 0, "linestyle": "none"}
            found.append(Key.of(text, marker=SHAPE[origin], markersize=SIZE[origin], **face))
    states = {state_of(trial) for trial in trials}
    hollow = {"markerfacecolor": "none", "markeredgecolor": Ink.MUTED.value, "linestyle": "none"}
    if "dropped" in states:
        found.append(Key.of("dropped", marker="o", markersize=6, **hollow))
    if "infeasible" in states:
        found.append(Key.of("outside a constraint", marker="+", markersize=8, **{**hollow, "markeredgewidth": 1.4}))
    if any(axis.is_below(factor * score_in(trial, objective)) for trial in trials if state_of(trial) != "failed"):
        found.append(Key.of("farther down", marker="v", markersize=6, **hollow))
    return found


def key_of_winner(content: SweepContent) -> Key:
    return Key.of(winner_word(content), marker="o", markersize=9, color=Ink.PASS.value, linestyle="none")


def legend(figure: Figure, drawn: Drawing, keys: Sequence[Key], left: float, columns: int) -> None:
    """Above everything, from ``left`` pixels on."""
    from matplotlib.lines import Line2D

    # Along the rows, although matplotlib fills columns.
    rows = math.ceil(len(keys) / columns)
    order = [row * columns + column for column in range(columns) for row in range(rows)]
    handles = [Line2D([], [], label=keys[at].text, **dict(keys[at].style)) for at in order if at < len(keys)]
    figure.legend(
        handles=handles,
        loc="upper left",
        bbox_to_anchor=(left / drawn.width, 1),
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

"""Draw plots with one row per value: its interval against its limits.

Matplotlib draws them. One unit of a drawing is one pixel of the page at its natural width.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from mergegate.merge_core.errors import to_printable
from mergegate.tasks.report import wording
from mergegate.tasks.report.svg import Ink, TextStyle, drawing, inline, write
from mergegate.tasks.stage import Outcome

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

OUTCOME_INK: dict[Outcome, Ink] = {"pass": Ink.PASS, "fail": Ink.FAIL, "inconclusive": Ink.INCONCLUSIVE}
OUTCOME_MARKER: dict[Outcome, tuple[str, float]] = {"pass": ("o", 10), "fail": ("X", 12), "inconclusive": ("D", 9)}


@dataclass(frozen=True)
class Format:
    """Layout of a plot, in pixels.

    A wide plot has the name on the left, the interval in the middle and the numbers on the right, all on one line. A
    narrow plot has the name and the numbers above the interval.
    """

    name: str
    width: int
    row: int
    left: int
    right: int
    label_length: int  # number of characters that fit
    band: tuple[float, float]  # vertical extent of the interval; row i spans i - 0.5 to i + 0.5, downward
    stacked: bool


WIDE = Format("wide", width=920, row=42, left=236, right=300, label_length=30, band=(-0.5, 0.5), stacked=False)
NARROW = Format("narrow", width=350, row=82, left=2, right=2, label_length=26, band=(0.04, 0.36), stacked=True)


@dataclass(frozen=True)
class Line:
    """One row of an interval plot: an estimate with its interval, and the two limits that it is compared with."""

    label: str
    detail: str
    numbers: str
    outcome: Outcome
    word: str
    estimate: float | None  # None: not finite
    low: float | None
    high: float | None
    fail_limit: float
    soft_limit: float  # margin or warning


def draw_intervals(
    plot: str, lines: Sequence[Line], neutral: float, names: tuple[str, ...], unit: str, label: str
) -> tuple[str, ...]:
    """Return a plot of ``lines`` against ``neutral`` and their limits, as a wide and a narrow ``<svg>`` element.

    Args:
        plot: Name of the plot, unique in the page.
        lines: Rows of the plot.
        neutral: Value that means no difference: 0 for a drop, 1 for a ratio.
        names: Legend entries for the strokes at the neutral value, the limit and the soft limit.
        unit: Unit of the axis.
        label: Text alternative for screen readers.
    """
    from matplotlib.lines import Line2D

    limits = [limit for line in lines for limit in (line.fail_limit, line.soft_limit)]
    shown = [x for line in lines for x in (line.estimate, line.low, line.high) if x is not None and math.isfinite(x)]
    # A ratio that is far from 1 needs a logarithmic axis.
    is_far = neutral > 0 and max([neutral, *shown]) > 2 * neutral
    low, high, logarithmic = _padded([neutral, *shown, *limits], logarithmic=is_far)
    strokes: tuple[dict[str, Any], ...] = (
        {"color": Ink.TEXT.value, "linewidth": 1},
        {"color": Ink.FAIL.value, "linewidth": 1.6},
        {"color": Ink.MUTED.value, **_DASHED},
    )
    plots = []
    for form in (WIDE, NARROW):
        with drawing(f"{plot}-{form.name}"):
            figure, axes = _canvas(form, len(lines), head=36)
            _ruler(axes, form, (low, high), logarithmic, unit, suffix=wording.TIMES if neutral == 1 else "")
            for row, line in enumerate(lines):
                top, bottom = row + form.band[0], row + form.band[1]
                _limits(axes, top, bottom, line, high)
                axes.plot([neutral] * 2, [top, bottom], color=Ink.TEXT.value, linewidth=1, zorder=2)
                _interval(axes, row + sum(form.band) / 2, line, high)
                _names(axes, form, row, line)
            handles = [Line2D([], [], label=name, **stroke) for name, stroke in zip(names, strokes, strict=False)]
            figure.legend(
                handles=handles,
                loc="upper left",
                bbox_to_anchor=(form.left / form.width, 1),
                ncols=len(handles),
                frameon=False,
                fontsize=12,
                labelcolor=Ink.MUTED.value,
                borderaxespad=0,
                borderpad=0.3,
                handlelength=1.6,
                handletextpad=0.5,
                columnspacing=1.6,
            )
            plots.append(inline(figure, f"{plot}-{form.name}", label))
    return tuple(plots)


def _canvas(form: Format, rows: int, head: int) -> tuple[Figure, Axes]:
    """Return a figure with one pair of axes, on which row ``i`` is centered at ``y = i``."""
    from matplotlib.figure import Figure

    foot = 32
    height = head + rows * form.row + foot
    figure = Figure(figsize=(form.width / 72, height / 72), dpi=72)
    figure.patch.set_visible(False)
    width = form.width - form.left - form.right
    axes = figure.add_axes((form.left / form.width, foot / height, width / form.width, rows * form.row / height))
    axes.patch.set_visible(False)
    axes.set_ylim(rows - 0.5, -0.5)
    axes.set_yticks([])
    for side in ("left", "right", "top"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(Ink.RULE.value)
    return figure, axes


def _padded(values: Sequence[float], *, logarithmic: bool) -> tuple[float, float, bool]:
    low, high = min(values), max(values)
    if logarithmic and low > 0:
        span = math.log(high / low)
        return low / math.exp(0.06 * span), high * math.exp(0.08 * span), True
    span = high - low or abs(high) or 1.0
    return low - 0.06 * span, high + 0.08 * span, False


def _ruler(axes: Axes, form: Format, ends: tuple[float, float], logarithmic: bool, unit: str, suffix: str = "") -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

    if logarithmic:
        axes.set_xscale("log")
        # Within one decade, powers of ten alone would leave the axis nearly without labels.
        steps = (1.0,) if ends[1] / ends[0] > 100 else (1.0, 2.0, 5.0)
        axes.xaxis.set_major_locator(LogLocator(subs=steps, numticks=5 if form.stacked else 8))
    else:
        axes.xaxis.set_major_locator(MaxNLocator(5 if form.stacked else 7, steps=[1, 2, 5, 10]))
    axes.xaxis.set_minor_locator(NullLocator())

    axes.xaxis.set_major_formatter(
        FuncFormatter(
            lambda x, _: (
                (wording.format_magnitude(x) if abs(x) >= 1e4 else wording.plain(round(float(x), 6) + 0.0)) + suffix
            )
        )
    )
    axes.set_xlim(*ends)
    axes.tick_params(axis="x", length=0, pad=7, labelsize=12, labelcolor=Ink.MUTED.value)
    if not form.stacked:
        axes.grid(axis="x", color=Ink.RULE.value, linewidth=0.7)
        axes.set_axisbelow(True)
        axes.annotate(
            unit,
            (0, 0),
            xycoords="axes fraction",
            xytext=(-form.left, -13),
            textcoords="offset points",
            va="center_baseline",
            fontsize=12,
            color=Ink.MUTED.value,
        )


def _limits(axes: Axes, top: float, bottom: float, line: Line, end: float) -> None:
    """Draw the limits of one row. Equal limits of neighboring rows join into one line."""
    axes.fill_betweenx([top, bottom], line.fail_limit, end, color=Ink.FAIL.value, alpha=0.08, linewidth=0, zorder=1)
    axes.plot([line.fail_limit] * 2, [top, bottom], color=Ink.FAIL.value, linewidth=1.6, zorder=2)
    if line.soft_limit != line.fail_limit:
        axes.plot([line.soft_limit] * 2, [top, bottom], color=Ink.MUTED.value, zorder=2, **_DASHED)


_DASHED: dict[str, Any] = {"linewidth": 1.4, "linestyle": (0, (4, 3))}


def _interval(axes: Axes, y: float, line: Line, end: float) -> None:
    ink = OUTCOME_INK[line.outcome].value
    if line.estimate is None:
        # A value that is not finite is drawn as an arrow that leaves the picture.
        axes.plot([line.fail_limit, end], [y, y], color=ink, linewidth=2.2, zorder=4)
        axes.plot([end], [y], marker=">", markersize=11, color=ink, clip_on=False, zorder=5)
        return
    if line.low is not None and line.high is not None:
        axes.plot([line.low, line.high], [y, y], color=ink, linewidth=2.2, solid_capstyle="butt", zorder=4)
        axes.plot([line.low, line.high], [y, y], "|", markersize=9, markeredgewidth=2.2, color=ink, zorder=4)
    marker, size = OUTCOME_MARKER[line.outcome]
    edge: dict[str, Any] = {"markeredgecolor": Ink.PAPER.value, "markeredgewidth": 1.2}
    axes.plot([line.estimate], [y], marker, markersize=size, color=ink, zorder=5, **edge)


def _names(axes: Axes, form: Format, row: int, line: Line) -> None:
    """Write the name, numbers and outcome of a row, next to its interval or (stacked) above it."""
    label = shorten(line.label, form.label_length)
    detail = shorten(line.detail, form.label_length + 5)
    verdict = f"{wording.GLYPHS[line.outcome]} {line.word}"
    ink = OUTCOME_INK[line.outcome]
    bold, small = TextStyle(size=13, bold=True), TextStyle(size=11.5, ink=Ink.MUTED)
    if form.stacked:
        _write(axes, (0, row), (0, -28), label, bold)
        _write(axes, (0, row), (0, -11), detail, small)
        _write(axes, (1, row), (0, -28), verdict, replace(bold, align="right", ink=ink))
        _write(axes, (1, row), (0, -11), line.numbers, replace(small, align="right"))
    else:
        _write(axes, (0, row), (-form.left, -8), label, bold)
        _write(axes, (0, row), (-form.left, 9), detail, small)
        _write(axes, (1, row), (form.right - 132, 0), line.numbers, TextStyle(size=13, align="right"))
        _write(axes, (1, row), (form.right - 118, 0), verdict, replace(bold, ink=ink))


def _write(axes: Axes, point: tuple[float, float], shift: tuple[float, float], text: str, style: TextStyle) -> None:
    """Write ``text`` in a row. The first coordinate of ``point`` is the left (0) or right (1) end of the axis."""
    write(axes, point, text, style, shift=shift, coordinates=axes.get_yaxis_transform(), zorder=3)


def shorten(text: str, length: int) -> str:
    """Return ``text`` as one printable line of at most ``length`` characters, cut in the middle.

    Both ends of a name help to distinguish it.
    """
    text = to_printable(" ".join(text.split()))
    if len(text) <= length:
        return text
    tail = (length - 1) // 2
    return f"{text[: length - 1 - tail]}…{text[-tail:]}"

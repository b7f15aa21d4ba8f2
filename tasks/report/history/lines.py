"""Draw lines and bars over runs as inline SVG, composed as plain text because every run draws them at its end.

``history.css`` defines the colors of the lines, which differ from the colors of the verdicts. Bars are shades of gray,
because their parts are not the series of the lines. The horizontal axis counts runs, not hours, so the distance between
runs does not depend on clocks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from mergegate.tasks.report import wording
from mergegate.tasks.report.svg import Ink

MAX_COLORS, MAX_SERIES = 6, 12
_DASHES = ("", "7 3", "2 3", "9 3 2 3")
_LIMIT_DASHES = "4 3"
_SHADES = (1.0, 0.7, 0.48, 0.32, 0.2, 0.12)  # opacities of the parts of a bar, from its foot


@dataclass(frozen=True)
class Series:
    """One line in a chart, or one part of all bars, with one value per run.

    Args:
        name: Name in the legend.
        values: Value of each run. None means that the run has no value.
        color: Number of the line's color, or of the shade of a bar.
        dashes: Number of the line's pattern of dashes. 0 is solid.
    """

    name: str
    values: tuple[float | None, ...]
    color: int = 0
    dashes: int = 0


@dataclass(frozen=True)
class LimitLine:
    """A horizontal line that the values are compared with, in the color of the verdict behind it."""

    name: str
    value: float
    ink: Ink


@dataclass(frozen=True)
class Chart:
    """Size of a drawing in pixels. Text keeps its size, so wide pages and phones have separate drawings."""

    name: str
    width: int
    height: int


WIDE, NARROW = Chart("wide", 920, 210), Chart("narrow", 350, 190)
_LEFT, _RIGHT, _HEAD, _FOOT = 44, 6, 12, 24  # margins around the values, in pixels


@dataclass(frozen=True)
class _Canvas:
    """Mapping from values to positions on a chart."""

    chart: Chart
    count: int
    low: float
    high: float
    step: float

    @property
    def wide(self) -> float:
        return self.chart.width - _LEFT - _RIGHT

    def x(self, at: int) -> float:
        return _LEFT + self.wide * (at + 0.5) / self.count

    def y(self, value: float) -> float:
        return _HEAD + (self.chart.height - _HEAD - _FOOT) * (self.high - value) / (self.high - self.low)


def draw_lines(
    series: Sequence[Series],
    labels: Sequence[str],
    chart: Chart,
    unit: str,
    *,
    from_zero: bool = False,
    limits: Sequence[LimitLine] = (),
) -> str:
    """Return the lines with their axes as SVG. The result is empty if no series has a value.

    Args:
        series: Series with one value per label. Only the first ``MAX_SERIES`` are drawn.
        labels: Short time of each run. The first, the last and some in between are displayed.
        chart: Size of the drawing.
        unit: Unit of the values.
        from_zero: Whether the axis includes zero.
        limits: Values to compare with, drawn as dashed lines.
    """
    series = [line for line in series[:MAX_SERIES] if any(value is not None for value in line.values)]
    if not series:
        return ""
    values = [value for line in series for value in line.values if value is not None]
    values += [0.0] * from_zero + [limit.value for limit in limits]
    canvas = _Canvas(chart, len(labels), *_axis(min(values), max(values)))
    parts = _frame(canvas, labels)
    parts += [
        f'<path d="M{_LEFT} {canvas.y(limit.value):.1f}h{canvas.wide:.0f}" style="{_limit_stroke(limit)}"/>'
        for limit in limits
    ]
    parts += [_line(line, canvas) for line in series]
    return _svg(parts, "lines", chart, _alt_text(series, unit))


def draw_bars(series: Sequence[Series], labels: Sequence[str], chart: Chart, unit: str) -> str:
    """Return one bar per run as SVG, stacked from the values of all series, the first at the bottom.

    The parameters are those of :func:`draw_lines`. Negative values are not supported.
    """
    series = series[:MAX_SERIES]
    totals = [sum(item.values[index] or 0.0 for item in series) for index in range(len(labels))]
    if not any(totals):
        return ""
    canvas = _Canvas(chart, len(labels), *_axis(0.0, max(totals)))
    parts, width = _frame(canvas, labels), min(24.0, 0.78 * canvas.wide / len(labels))
    foot = [0.0] * len(labels)
    for item in series:
        pieces = []
        for index, value in enumerate(item.values):
            if value:
                top, bottom = canvas.y(foot[index] + value), canvas.y(foot[index])
                foot[index] += value
                if bottom - top >= 0.05:
                    pieces.append(
                        f"M{canvas.x(index) - width / 2:.1f} {bottom:.1f}V{top:.1f}h{width:.1f}V{bottom:.1f}z"
                    )
        parts.append(f'<path d="{"".join(pieces)}" style="{_fill(item)}"/>')
    return _svg(parts, "bars", chart, _alt_text(series, unit))


def _frame(canvas: _Canvas, labels: Sequence[str]) -> list[str]:
    """Return the horizontal rules with their values, and the labels of the runs."""
    parts = []
    for number in range(round((canvas.high - canvas.low) / canvas.step) + 1):
        value = canvas.low + number * canvas.step
        rule = f"M{_LEFT} {canvas.y(value):.1f}h{canvas.wide:.0f}"
        parts.append(f'<path d="{rule}" style="stroke:{Ink.RULE.variable}"/>')
        parts.append(_text(_LEFT - 8, canvas.y(value) + 4, wording.plain(round(value, 9) + 0.0), "end"))
    last = len(labels) - 1
    # Label the first run, the last, and evenly spaced ones between them.
    count = min(len(labels), 4 if canvas.chart is NARROW else 8)
    for index in [round(number * last / max(1, count - 1)) for number in range(count)]:
        anchor = "start" if index == 0 and last else "end" if index == last and index else "middle"
        parts.append(_text(canvas.x(index), canvas.chart.height - 6, labels[index], anchor))
    return parts


def _svg(parts: Sequence[str], kind: str, chart: Chart, alt_text: str) -> str:
    return (
        f'<svg class="plot {kind}-{chart.name}" viewBox="0 0 {chart.width} {chart.height}" role="img" '
        f'aria-label="{escape(alt_text)}">{"".join(parts)}</svg>'
    )


def draw_key(item: Series | LimitLine, *, bar: bool = False) -> str:
    """Return a sample of a line or of a part of a bar for a legend."""
    if isinstance(item, LimitLine):
        sample = f'<path d="M0 4H26" style="{_limit_stroke(item)}"/>'
    elif bar:
        sample = f'<rect width="12" height="8" x="7" style="{_fill(item)}"/>'
    else:
        sample = f'<path d="M0 4H26" style="{_stroke(item)}"/>'
    return f'<svg class="key" viewBox="0 0 26 8" aria-hidden="true">{sample}</svg>'


def _line(series: Series, canvas: _Canvas) -> str:
    """Return a series as SVG. A run without a value is a gap, and a value between two gaps is a dot."""
    pieces: list[list[tuple[float, float]]] = [[]]
    for index, value in enumerate(series.values):
        if value is None:
            pieces.append([])
        else:
            pieces[-1].append((canvas.x(index), canvas.y(value)))
    path = "".join("M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in piece) for piece in pieces if len(piece) > 1)
    line = f'<path d="{path}" style="{_stroke(series)}"/>' if path else ""
    dots = (piece[0] for piece in pieces if len(piece) == 1)
    return line + "".join(
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.6" style="fill:{_css_color(series)}"/>' for x, y in dots
    )


def _css_color(series: Series) -> str:
    return f"var(--series-{series.color % MAX_COLORS + 1})"


def _stroke(series: Series) -> str:
    dashes = _DASHES[series.dashes % len(_DASHES)]
    dashed = f";stroke-dasharray:{dashes}" if dashes else ""
    return f"stroke:{_css_color(series)};stroke-width:1.8;fill:none{dashed}"


def _limit_stroke(limit: LimitLine) -> str:
    return f"stroke:{limit.ink.variable};stroke-width:1.4;stroke-dasharray:{_LIMIT_DASHES}"


def _fill(series: Series) -> str:
    return f"fill:{Ink.MUTED.variable};fill-opacity:{_SHADES[min(series.color, len(_SHADES) - 1)]}"


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" style="font-size:12px;fill:{Ink.MUTED.variable}">'
        f"{escape(text)}</text>"
    )


def _axis(low: float, high: float) -> tuple[float, float, float]:
    """Return the round ends of the axis, and a round step that gives three to six rules."""
    span = max(high - low, 1e-6 * max(abs(high), abs(low)), 1e-9)
    raw = span / 4
    power = 10.0 ** math.floor(math.log10(raw))
    step = power * next(factor for factor in (1, 2, 5, 10) if factor * power >= raw * 0.999)
    bottom = math.floor(low / step + 1e-9) * step
    top = math.ceil(high / step - 1e-9) * step
    return bottom, top if top > bottom else bottom + step, step


def _alt_text(series: Sequence[Series], unit: str) -> str:
    sentences = [f"Over runs, in {unit}."]
    for item in series:
        values = [value for value in item.values if value is not None]
        first, last = (wording.plain(round(value, 2)) for value in (values[0], values[-1]))
        sentences.append(f"{item.name}: from {first} to {last}.")
    return " ".join(sentences)

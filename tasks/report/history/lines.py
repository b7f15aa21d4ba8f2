"""Lines and bars over runs, as inline SVG made of plain text: drawn at the end of every run, so it costs milliseconds.

The page's own style says what the colours are; a series is told apart by its dashes and its name, too. The horizontal
axis counts runs, not hours: nights are as far apart as runs are, whatever clocks said.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from mergegate.tasks.report import wording
from mergegate.tasks.report.svg import Ink

_INKS = (Ink.ACCENT, Ink.TEXT, Ink.INCONCLUSIVE, Ink.PASS, Ink.FAIL, Ink.MUTED)
_DASHES = ("", "7 3", "2 3", "9 3 2 3")
MOST_SERIES = 12


@dataclass(frozen=True)
class Series:
    """One line: a value for each run, None where that has none."""

    name: str
    values: tuple[float | None, ...]


@dataclass(frozen=True)
class Chart:
    """A drawing in pixels: its letters keep their size, so there is one for a wide page and one for a phone."""

    name: str
    width: int
    height: int


WIDE, NARROW = Chart("wide", 920, 210), Chart("narrow", 350, 190)
_LEFT, _RIGHT, _HEAD, _FOOT = 44, 6, 12, 24  # pixels around the values


@dataclass(frozen=True)
class _Canvas:
    """Where values are on a chart."""

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
    limit: float | None = None,
) -> str:
    """The lines with their axes; empty where no series has a value.

    Args:
        series: With as many values each as there are labels; the first ``MOST_SERIES`` are drawn.
        labels: When each run was, short: the first, the last and some between are written.
        unit: Of the values.
        from_zero: Whether zero is on the axis.
        limit: What is allowed, as a line of its own.
    """
    series = [one for one in series[:MOST_SERIES] if any(value is not None for value in one.values)]
    if not series:
        return ""
    known = [value for one in series for value in one.values if value is not None]
    known += [0.0] * from_zero + ([limit] if limit is not None else [])
    canvas = _Canvas(chart, len(labels), *_axis(min(known), max(known)))
    parts = _frame(canvas, labels)
    if limit is not None:
        style = f"stroke:{Ink.FAIL.variable};stroke-width:1.4;stroke-dasharray:4 3"
        parts.append(f'<path d="M{_LEFT} {canvas.y(limit):.1f}h{canvas.wide:.0f}" style="{style}"/>')
    parts += [_line(one, canvas, number) for number, one in enumerate(series)]
    return _svg(parts, "lines", chart, _spoken(series, unit))


def draw_bars(series: Sequence[Series], labels: Sequence[str], chart: Chart, unit: str) -> str:
    """A bar for each run, made of the values of all series, the first at the bottom; none is below zero.

    Args: as of :func:`draw_lines`.
    """
    series = series[:MOST_SERIES]
    totals = [sum(one.values[at] or 0.0 for one in series) for at in range(len(labels))]
    if not any(totals):
        return ""
    canvas = _Canvas(chart, len(labels), *_axis(0.0, max(totals)))
    parts, width = _frame(canvas, labels), min(24.0, 0.78 * canvas.wide / len(labels))
    foot = [0.0] * len(labels)
    for number, one in enumerate(series):
        pieces = []
        for at, value in enumerate(one.values):
            if value:
                top, bottom = canvas.y(foot[at] + value), canvas.y(foot[at])
                foot[at] += value
                if bottom - top >= 0.05:
                    pieces.append(f"M{canvas.x(at) - width / 2:.1f} {bottom:.1f}V{top:.1f}h{width:.1f}V{bottom:.1f}z")
        parts.append(f'<path d="{"".join(pieces)}" style="fill:{_ink(number)};fill-opacity:{_weight(number)}"/>')
    return _svg(parts, "bars", chart, _spoken(series, unit))


def _frame(canvas: _Canvas, labels: Sequence[str]) -> list[str]:
    """Rules with their values, and when the runs were."""
    parts = []
    for number in range(round((canvas.high - canvas.low) / canvas.step) + 1):
        value = canvas.low + number * canvas.step
        rule = f"M{_LEFT} {canvas.y(value):.1f}h{canvas.wide:.0f}"
        parts.append(f'<path d="{rule}" style="stroke:{Ink.RULE.variable}"/>')
        parts.append(_text(_LEFT - 8, canvas.y(value) + 4, wording.plain(round(value, 9) + 0.0), "end"))
    last = len(labels) - 1
    for at in _labelled(len(labels), 4 if canvas.chart is NARROW else 8):
        anchor = "start" if at == 0 and last else "end" if at == last and at else "middle"
        parts.append(_text(canvas.x(at), canvas.chart.height - 6, labels[at], anchor))
    return parts


def _svg(parts: Sequence[str], kind: str, chart: Chart, spoken: str) -> str:
    return (
        f'<svg class="plot {kind}-{chart.name}" viewBox="0 0 {chart.width} {chart.height}" role="img" '
        f'aria-label="{escape(spoken)}">{"".join(parts)}</svg>'
    )


def draw_key(number: int, *, bar: bool = False) -> str:
    """A piece of the line or the bar with that number, for a legend."""
    line = f'<path d="M0 4H26" style="{_stroke(number)}"/>'
    box = f'<rect width="12" height="8" x="7" style="fill:{_ink(number)};fill-opacity:{_weight(number)}"/>'
    return f'<svg class="key" viewBox="0 0 26 8" aria-hidden="true">{box if bar else line}</svg>'


def _line(one: Series, canvas: _Canvas, number: int) -> str:
    """Points that follow each other are joined; a run without a value is a gap, a value between two gaps a dot."""
    pieces: list[list[tuple[float, float]]] = [[]]
    for at, value in enumerate(one.values):
        if value is None:
            pieces.append([])
        else:
            pieces[-1].append((canvas.x(at), canvas.y(value)))
    path = "".join("M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in piece) for piece in pieces if len(piece) > 1)
    drawn = f'<path d="{path}" style="{_stroke(number)}"/>' if path else ""
    dots = (piece[0] for piece in pieces if len(piece) == 1)
    return drawn + "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.6" style="fill:{_ink(number)}"/>' for x, y in dots)


def _ink(number: int) -> str:
    return _INKS[number % len(_INKS)].variable


def _weight(number: int) -> float:
    """Of the fill: the second round of colours is paler."""
    return 1.0 if number < len(_INKS) else 0.45


def _stroke(number: int) -> str:
    dashes = _DASHES[number // len(_INKS) % len(_DASHES)]
    dashed = f";stroke-dasharray:{dashes}" if dashes else ""
    return f"stroke:{_ink(number)};stroke-width:1.8;fill:none{dashed}"


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" style="font-size:12px;fill:{Ink.MUTED.variable}">'
        f"{escape(text)}</text>"
    )


def _axis(low: float, high: float) -> tuple[float, float, float]:
    """Round ends and a round step, with three to six rules from end to end."""
    span = max(high - low, 1e-6 * max(abs(high), abs(low)), 1e-9)
    raw = span / 4
    power = 10.0 ** math.floor(math.log10(raw))
    step = power * next(one for one in (1, 2, 5, 10) if one * power >= raw * 0.999)
    bottom = math.floor(low / step + 1e-9) * step
    top = math.ceil(high / step - 1e-9) * step
    return bottom, top if top > bottom else bottom + step, step


def _labelled(count: int, most: int) -> list[int]:
    """Which runs have their date written: the first, the last, and evenly between."""
    if count <= most:
        return list(range(count))
    return [round(number * (count - 1) / (most - 1)) for number in range(most)]


def _spoken(series: Sequence[Series], unit: str) -> str:
    said = [f"Over runs, in {unit}."]
    for one in series:
        values = [value for value in one.values if value is not None]
        first, last = (wording.plain(round(value, 2)) for value in (values[0], values[-1]))
        said.append(f"{one.name}: from {first} to {last}.")
    return " ".join(said)

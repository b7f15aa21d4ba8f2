"""Plot the win rate with its interval over time, and the evidence for and against the candidate over pairs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from mergegate.tasks.report import wording
from mergegate.tasks.report.shadow.content import ShadowContent, ShadowPoint
from mergegate.tasks.report.shadow.wording import e_value, power_of_ten
from mergegate.tasks.report.svg import Ink, drawing, inline
from mergegate.tasks.report.sweep.canvas import DASHED, NARROW, WIDE, Drawing, Key, blank, legend, panel, ticks, write

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_HOUR = 3600.0
_LOWEST_E = math.log(0.01)  # lower evidence is drawn at this value
_ROOM = 4.0  # margin above and below, in points


def win_rate_plot(content: ShadowContent) -> tuple[str, ...]:
    """Return the plots, wide and narrow. The result is empty with fewer than two points."""
    return tuple(_win_rate(content, layout) for layout in (WIDE, NARROW)) if len(content.points) > 1 else ()


def evidence_plot(content: ShadowContent) -> tuple[str, ...]:
    """Return the plots, wide and narrow. The result is empty with fewer than two points."""
    return tuple(_evidence(content, layout) for layout in (WIDE, NARROW)) if len(content.points) > 1 else ()


def _win_rate(content: ShadowContent, layout: Drawing) -> str:
    plot, points = f"win-rate-{layout.name}", content.points
    hours, unit = _times(points)
    bound = 50 - content.margin
    # Leave out the first pairs. Their interval covers the full range and would hide the later ones.
    late = points[len(points) // 4 :]
    low = min(bound, *(100 * point.low for point in late)) - _ROOM
    high = max(50.0, *(100 * point.high for point in late)) + _ROOM
    keys = [
        Key.of("win rate", color=Ink.TEXT.value, linewidth=2.4),
        Key.of(
            f"{100 * content.confidence:g} % each way, at all looks", color=Ink.ACCENT.value, linewidth=6, alpha=0.3
        ),
        Key.of(f"to be shown: above {wording.plain(bound)} %", color=Ink.INCONCLUSIVE.value, **DASHED),
    ]
    with drawing(plot):
        axes, finish = _panel(layout, plot, keys)
        axes.set_xlim(0, max(hours[-1], 1e-6) * 1.01)
        axes.set_ylim(max(0.0, low), min(100.0, high))
        ticks(axes, "x", 5 if layout.narrow else 8)
        ticks(axes, "y", 5)
        band: dict[str, Any] = {"color": Ink.ACCENT.value, "alpha": 0.22, "linewidth": 0, "step": "post"}
        axes.fill_between(hours, [100 * point.low for point in points], [100 * point.high for point in points], **band)
        axes.axhline(50, color=Ink.MUTED.value, linewidth=1)
        axes.axhline(bound, color=Ink.INCONCLUSIVE.value, **DASHED)
        axes.plot(
            hours,
            [100 * point.win_rate for point in points],
            color=Ink.TEXT.value,
            linewidth=2.4,
            drawstyle="steps-post",
        )
        start = datetime.fromtimestamp(points[0].at, UTC).strftime("%Y-%m-%d %H:%M")
        _write_unit(axes, f"{unit} since {start} UTC")
        last = points[-1]
        result = f"{100 * last.win_rate:.1f} %, between {100 * last.low:.1f} and {100 * last.high:.1f}"
        return finish(f"Win rate of the candidate over time: after {last.pairs} pairs {result}.")


def _evidence(content: ShadowContent, layout: Drawing) -> str:
    plot, points = f"evidence-{layout.name}", content.points
    threshold = -math.log1p(-content.confidence)
    pairs = [point.pairs for point in points]
    keys = [
        Key.of("for the candidate", color=Ink.PASS.value, linewidth=2.4),
        Key.of("against it", color=Ink.FAIL.value, linewidth=2.0, linestyle=(0, (5, 2))),
        Key.of(f"{e_value(threshold)}: decided", color=Ink.INCONCLUSIVE.value, **DASHED),
    ]
    with drawing(plot):
        axes, finish = _panel(layout, plot, keys)
        top = max(threshold, *(max(point.log_e_promote, point.log_e_rollback) for point in points))
        axes.set_xlim(0, pairs[-1] * 1.01)
        axes.set_ylim(_LOWEST_E - 0.3, top + 0.08 * (top - _LOWEST_E))
        ticks(axes, "x", 5 if layout.narrow else 8, integer=True)
        powers = [power for power in _powers(top) if power * math.log(10) >= _LOWEST_E]
        axes.set_yticks([power * math.log(10) for power in powers], [_power(power) for power in powers])
        axes.axhline(threshold, color=Ink.INCONCLUSIVE.value, **DASHED)
        for values, ink, style in (
            ([point.log_e_promote for point in points], Ink.PASS, {"linewidth": 2.4}),
            ([point.log_e_rollback for point in points], Ink.FAIL, {"linewidth": 2.0, "linestyle": (0, (5, 2))}),
        ):
            drawing_style: dict[str, Any] = style
            axes.plot(pairs, [max(value, _LOWEST_E) for value in values], color=ink.value, **drawing_style)
        _write_unit(axes, "judged pairs")
        last = points[-1]
        return finish(
            f"Evidence over pairs: for the candidate {e_value(last.log_e_promote)}, against it "
            f"{e_value(last.log_e_rollback)}, decided at {e_value(threshold)}."
        )


def _panel(layout: Drawing, plot: str, keys: Sequence[Key]) -> tuple[Axes, Callable[[str], str]]:
    left, right = (48, 6) if layout.narrow else (58, 12)
    columns = 1 if layout.narrow else len(keys)
    head, panel_height, foot = 18 + 19 * math.ceil(len(keys) / columns), 210 if layout.narrow else 260, 48
    height = head + panel_height + foot
    figure = blank(layout, height)
    axes = panel(figure, layout, height, (left, head, layout.width - left - right, panel_height))
    legend(figure, layout, keys, 0 if layout.narrow else left - 6, columns)
    return axes, lambda alt_text: inline(figure, plot, alt_text)


def _write_unit(axes: Axes, text: str) -> None:
    write(axes, (1, 0), text, shift=(0, 36), coordinates="axes fraction", align="right", ink=Ink.MUTED)


def _times(points: Sequence[ShadowPoint]) -> tuple[list[float], str]:
    """Return the time since the first point and its unit: hours, or minutes for less than two hours."""
    in_hours = points[-1].at - points[0].at >= 2 * _HOUR
    return [
        (point.at - points[0].at) / (_HOUR if in_hours else 60) for point in points
    ], "hours" if in_hours else "minutes"


def _powers(top: float) -> list[int]:
    """Return a handful of powers of ten up to ``top``."""
    most = max(1, math.ceil(top / math.log(10)))
    step = max(1, math.ceil((most + 2) / 6))
    return [power for power in range(-2, most + 1) if power % step == 0]


def _power(power: int) -> str:
    return f"{10.0**power:g}" if -3 < power < 4 else power_of_ten(power)

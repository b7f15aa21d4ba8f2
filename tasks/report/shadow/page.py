"""Render the page of a watched release, in the design of a release's report.

Its plots show the win rate with its interval over time, and the evidence for and against the candidate over pairs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from mergegate.tasks.report import wording
from mergegate.tasks.report.page import page_style, page_template
from mergegate.tasks.report.shadow import wording as words
from mergegate.tasks.report.shadow.content import ShadowContent
from mergegate.tasks.report.shadow.wording import e_value, power_of_ten
from mergegate.tasks.report.svg import Ink, TextStyle, drawing, inline, write
from mergegate.tasks.report.sweep.canvas import DASHED, NARROW, WIDE, Drawing, Key, blank, legend, panel, ticks

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_HOUR = 3600.0
_LOWEST_E = math.log(0.01)  # lower evidence is drawn at this value
_ROOM = 4.0  # margin above and below, in points
# Explanation on the page of each row that describes the state.
_TERMS = {
    "win rate": "how-win-rate",
    "pairs": "how-win-rate",
    "watched": "how-decision",
    "judge agreement": "how-judge",
    "control pairs": "how-controls",
    "promote e-value": "how-e-value",
    "rollback e-value": "how-e-value",
}


def render_shadow(content: ShadowContent) -> str:
    """Return the page of the release as HTML, without scripts or external resources. Equal content gives equal text."""
    from markupsafe import Markup

    layouts = (WIDE, NARROW) if len(content.points) > 1 else ()
    return page_template("shadow/shadow.html").render(
        content=content,
        wording=wording,
        words=words,
        terms=_TERMS,
        round=round,
        outcome=words.shadow_outcome(content),
        style=page_style("reading.css", "shadow/shadow.css"),
        # Matplotlib draws these plots and escapes the text in them.
        win_rate=[Markup(_win_rate_plot(content, layout)) for layout in layouts],
        evidence=[Markup(_evidence_plot(content, layout)) for layout in layouts],
        when=lambda at: datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M UTC"),
        arms=[("parent", content.parent_arm), ("candidate", content.candidate_arm)],
    )


def _win_rate_plot(content: ShadowContent, layout: Drawing) -> str:
    plot, points = f"win-rate-{layout.name}", content.points
    in_hours = points[-1].at - points[0].at >= 2 * _HOUR
    unit = "hours" if in_hours else "minutes"
    times = [(point.at - points[0].at) / (_HOUR if in_hours else 60) for point in points]
    bound = 50 - content.margin
    # Leave out the first pairs. Their interval covers the full range and would hide the later ones.
    late = points[len(points) // 4 :]
    low = min(bound, *(100 * point.low for point in late)) - _ROOM
    high = max(50.0, *(100 * point.high for point in late)) + _ROOM
    keys = [
        Key.style_key("win rate", color=Ink.TEXT.value, linewidth=2.4),
        Key.style_key(
            f"interval, {100 * content.confidence:g} % on each side", color=Ink.ACCENT.value, linewidth=6, alpha=0.3
        ),
        Key.style_key(f"promotion: interval above {wording.plain(bound)} %", color=Ink.INCONCLUSIVE.value, **DASHED),
    ]
    with drawing(plot):
        axes, finish = _panel(layout, plot, keys)
        axes.set_xlim(0, max(times[-1], 1e-6) * 1.01)
        axes.set_ylim(max(0.0, low), min(100.0, high))
        ticks(axes, "x", 5 if layout.narrow else 8)
        ticks(axes, "y", 5)
        band: dict[str, Any] = {"color": Ink.ACCENT.value, "alpha": 0.22, "linewidth": 0, "step": "post"}
        axes.fill_between(times, [100 * point.low for point in points], [100 * point.high for point in points], **band)
        axes.axhline(50, color=Ink.MUTED.value, linewidth=1)
        axes.axhline(bound, color=Ink.INCONCLUSIVE.value, **DASHED)
        axes.plot(
            times,
            [100 * point.win_rate for point in points],
            color=Ink.TEXT.value,
            linewidth=2.4,
            drawstyle="steps-post",
        )
        start = datetime.fromtimestamp(points[0].at, UTC).strftime("%Y-%m-%d %H:%M")
        _write_unit(axes, f"{unit} since {start} UTC")
        last = points[-1]
        result = f"{100 * last.win_rate:.1f} %, interval {100 * last.low:.1f} to {100 * last.high:.1f} %"
        return finish(f"Win rate of the candidate over time: after {last.pairs} pairs {result}.")


def _evidence_plot(content: ShadowContent, layout: Drawing) -> str:
    plot, points = f"evidence-{layout.name}", content.points
    threshold = -math.log1p(-content.confidence)
    pairs = [point.pairs for point in points]
    keys = [
        Key.style_key("for promotion", color=Ink.PASS.value, linewidth=2.4),
        Key.style_key("for rollback", color=Ink.FAIL.value, linewidth=2.0, linestyle=(0, (5, 2))),
        Key.style_key(f"decides at {e_value(threshold)}", color=Ink.INCONCLUSIVE.value, **DASHED),
    ]
    with drawing(plot):
        axes, finish = _panel(layout, plot, keys)
        top = max(threshold, *(max(point.log_e_promote, point.log_e_rollback) for point in points))
        axes.set_xlim(0, pairs[-1] * 1.01)
        axes.set_ylim(_LOWEST_E - 0.3, top + 0.08 * (top - _LOWEST_E))
        ticks(axes, "x", 5 if layout.narrow else 8, integer=True)
        # Label a handful of powers of ten.
        highest = max(1, math.ceil(top / math.log(10)))
        step = max(1, math.ceil((highest + 2) / 6))
        powers = [power for power in range(-2, highest + 1) if power % step == 0 and power * math.log(10) >= _LOWEST_E]
        labels = [f"{10.0**power:g}" if -3 < power < 4 else power_of_ten(power) for power in powers]
        axes.set_yticks([power * math.log(10) for power in powers], labels)
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
            f"E-values over judged pairs: for promotion {e_value(last.log_e_promote)}, for rollback "
            f"{e_value(last.log_e_rollback)}. The test decides at {e_value(threshold)}."
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
    write(axes, (1, 0), text, TextStyle(align="right", ink=Ink.MUTED), shift=(0, 36))

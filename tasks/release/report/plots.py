"""Draw the plots of the reports with matplotlib, as inline SVG that is identical on every machine.

Figures are drawn in the colors of ``Ink``. Each color then becomes a CSS variable, so that the page chooses its value
for light mode, dark mode and print. Text stays text and inherits the page's font.

Each plot is drawn twice, for a wide page and for a phone, because text must not shrink with the plot. The style sheet
shows the version that fits. One unit of a drawing is one pixel of the page at its natural width.
"""

from __future__ import annotations

import io
import math
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import groupby
from typing import TYPE_CHECKING, Any, Literal, NamedTuple
from xml.etree import ElementTree

from mergegate.merge_core.analysis import Interference
from mergegate.merge_core.architecture import KINDS, TensorKind
from mergegate.merge_core.errors import to_printable
from mergegate.merge_core.wording import format_count
from mergegate.tasks.base.stage import Outcome
from mergegate.tasks.quality.gate import GuardVerdict, SuiteVerdict
from mergegate.tasks.release.explain import Explanation
from mergegate.tasks.release.report import wording
from mergegate.tasks.release.report.content import ReportContent

if TYPE_CHECKING:
    from markupsafe import Markup
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


class Ink(Enum):
    """Purpose of a color. The values only need to differ; ``style.css`` defines the displayed colors."""

    TEXT = "#1b1f24"
    MUTED = "#5b6570"
    RULE = "#d8dde3"
    PAPER = "#ffffff"
    PASS = "#00705a"
    FAIL = "#b5380a"
    INCONCLUSIVE = "#7a5c01"
    ACCENT = "#1d5fa6"  # a second series next to TEXT, which also has its own marker shape


@dataclass(frozen=True)
class TextStyle:
    """Appearance of text in a plot. The size is in pixels."""

    size: float = 12
    bold: bool = False
    ink: Ink = Ink.TEXT
    align: Literal["left", "center", "right"] = "left"


@dataclass(frozen=True)
class Layout:
    """Name and width of a drawing, in pixels."""

    name: str
    width: int
    narrow: bool


WIDE = Layout("wide", 920, narrow=False)
NARROW = Layout("narrow", 350, narrow=True)
DASHED: dict[str, Any] = {"linewidth": 1.4, "linestyle": (0, (4, 3))}
# An entry of a legend: a label and the style of its line or marker, as arguments of matplotlib's ``Line2D``.
Key = dict[str, Any]
_SETTINGS: dict[Any, Any] = {
    "svg.fonttype": "none",
    "text.parse_math": False,  # a '$' in a task name is a dollar sign
    "font.size": 13,
    "text.color": Ink.TEXT.value,
    "axes.unicode_minus": True,
    "path.simplify": False,
}


def draw_twice(plot: str, label: str, draw: Callable[[Layout], Figure]) -> tuple[Markup, ...]:
    """Return the wide and the narrow drawing of a plot as ``<svg>`` elements, independent of the user's matplotlibrc.

    Matplotlib escapes the text in them.

    Args:
        plot: Name of the plot, unique in the page. It prefixes all ids, and the elements have the CSS classes ``plot``
            and this name with the name of the layout.
        label: Text alternative for screen readers.
        draw: Function that draws the plot in a layout.
    """
    import matplotlib
    import matplotlib.style
    from markupsafe import Markup

    drawings = []
    for layout in (WIDE, NARROW):
        name = f"{plot}-{layout.name}"
        with matplotlib.style.context("default"), matplotlib.rc_context({**_SETTINGS, "svg.hashsalt": name}):
            drawings.append(Markup(_inline(draw(layout), name, label)))
    return tuple(drawings)


def _inline(figure: Figure, plot: str, label: str) -> str:
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    raw = io.BytesIO()
    canvas: Any = FigureCanvasSVG(figure)  # matplotlib leaves its writers untyped
    with warnings.catch_warnings():
        # Matplotlib's font may lack some glyphs. That is harmless: the browser renders the text with its own fonts.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        canvas.print_svg(raw, metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    root = ElementTree.fromstring(raw.getvalue())
    # HTML knows SVG without a namespace, and the style sheet would affect the rest of the page.
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]
        element.attrib = {name.rpartition("}")[2]: value for name, value in element.attrib.items()}
        for child in list(element):
            if child.tag.rpartition("}")[2] in ("metadata", "style"):
                element.remove(child)

    # Make ids unique in the page, and remove ids that no element refers to.
    references = re.compile(r"url\(#([^)]+)\)|^#(.+)$")
    values = (value for element in root.iter() for value in element.attrib.values())
    matches = (match for value in values if (match := references.search(value)))
    targets = dict.fromkeys(match[1] or match[2] for match in matches)
    names = {target: f"{plot}-{number}" for number, target in enumerate(targets)}
    for element in root.iter():
        for name, value in list(element.attrib.items()):
            if name == "id" and value in names:
                element.set(name, names[value])
            elif name == "id":
                del element.attrib[name]
            elif match := references.search(value):
                old = match[1] or match[2]
                element.set(name, value.replace(f"#{old}", f"#{names[old]}"))

    # Colors become CSS variables. The page sets the font family.
    for element in root.iter():
        if "style" in element.attrib:
            style = re.sub(r"font(-family)?: [^;]*", _size_and_weight, element.attrib["style"])
            for ink in Ink:
                style = style.replace(ink.value, f"var(--{ink.name.lower()})")
            element.set("style", re.sub(r";\s*(;\s*)*", "; ", style).strip("; "))
    view_box = root.attrib["viewBox"]
    root.attrib.clear()
    root.attrib.update({"class": f"plot {plot}", "viewBox": view_box, "role": "img", "aria-label": label})
    return ElementTree.tostring(root, encoding="unicode").strip()


def _size_and_weight(font: re.Match[str]) -> str:
    """Return the size and weight of a CSS font, or an empty string for ``font-family``."""
    if font[1]:
        return ""
    size = re.search(r"[\d.]+px", font[0])
    weight = re.search(r"\b(?:bold|[1-9]00)\b", font[0])
    parts = [f"font-size: {size[0]}"] if size else []
    return "; ".join(parts + ([f"font-weight: {weight[0]}"] if weight else []))


def blank(layout: Layout, height: float) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(layout.width / 72, height / 72), dpi=72)
    figure.patch.set_visible(False)
    return figure


def panel(
    figure: Figure, box: tuple[float, float, float, float], grid: Literal["x", "y"] | None = "y", pad: float = 6
) -> Axes:
    """Return axes at ``box``: left, top, width and height in pixels from the upper left corner.

    ``grid`` names the axis whose ticks have rules, and ``pad`` is the distance of the tick labels.
    """
    (left, top, width, height), (figure_width, figure_height) = box, figure.get_size_inches() * 72
    axes = figure.add_axes(
        (
            left / figure_width,
            (figure_height - top - height) / figure_height,
            width / figure_width,
            height / figure_height,
        )
    )
    axes.patch.set_visible(False)
    for side in ("left", "right", "top"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(Ink.RULE.value)
    axes.tick_params(axis="both", length=0, pad=pad, labelsize=12, labelcolor=Ink.MUTED.value)
    if grid:
        axes.grid(axis=grid, color=Ink.RULE.value, linewidth=0.7)
        axes.set_axisbelow(True)
    return axes


def ticks(axes: Axes, side: Literal["x", "y"], count: int, *, integer: bool = False, suffix: str = "") -> None:
    """Label about ``count`` round values of a linear axis, each followed by ``suffix``."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axis = axes.xaxis if side == "x" else axes.yaxis
    axis.set_major_locator(MaxNLocator(count, steps=[1, 2, 5, 10], integer=integer))
    axis.set_major_formatter(FuncFormatter(lambda value, _: wording.plain(round(float(value), 9) + 0.0) + suffix))


def write(
    axes: Axes,
    point: tuple[float, float],
    text: str,
    style: TextStyle,
    *,
    shift: tuple[float, float] = (0, 0),
    coordinates: Any = "axes fraction",
    zorder: float = 9,
) -> None:
    """Write ``text`` at ``point``, moved by ``shift`` pixels to the right and downward."""
    axes.annotate(
        text,
        point,
        xycoords=coordinates,
        xytext=(shift[0], -shift[1]),
        textcoords="offset points",
        ha=style.align,
        va="center_baseline",
        fontsize=style.size,
        fontweight="bold" if style.bold else "normal",
        color=style.ink.value,
        annotation_clip=False,
        zorder=zorder,
    )


def legend(figure: Figure, keys: Sequence[Key], left: float, columns: int, spacing: float = 1.4) -> None:
    """Draw the legend above the plot, starting ``left`` pixels from the left."""
    from matplotlib.lines import Line2D

    # Matplotlib fills columns first. Reorder the entries so that they run along the rows.
    rows = math.ceil(len(keys) / columns)
    order = [row * columns + column for column in range(columns) for row in range(rows)]
    figure.legend(
        handles=[Line2D([], [], **keys[index]) for index in order if index < len(keys)],
        loc="upper left",
        bbox_to_anchor=(left / (figure.get_figwidth() * 72), 1),
        ncols=columns,
        frameon=False,
        fontsize=12,
        labelcolor=Ink.MUTED.value,
        borderaxespad=0,
        borderpad=0.3,
        handlelength=spacing,
        handletextpad=0.5,
        columnspacing=spacing,
        labelspacing=0.35,
    )


def chart(
    layout: Layout,
    keys: Sequence[Key],
    box: tuple[float, float, float, float],
    *,
    foot: float = 46,
    narrow_columns: int = 2,
) -> tuple[Figure, Axes]:
    """Return a figure with one panel and the legend above it.

    ``box`` holds the left margin, the right margin, the height of the panel and the space above the legend. ``foot`` is
    the space below the panel, and ``narrow_columns`` the number of columns of the legend on a narrow page.
    """
    left, right, height, head = box
    columns = narrow_columns if layout.narrow else max(1, len(keys))
    head += 19 * math.ceil(len(keys) / columns)
    figure = blank(layout, head + height + foot)
    axes = panel(figure, (left, head, layout.width - left - right, height))
    legend(figure, keys, 0 if layout.narrow else left - 6, columns)
    return figure, axes


def shorten(text: str, length: int) -> str:
    """Return ``text`` as one printable line of at most ``length`` characters, cut in the middle.

    Both ends of a name help to distinguish it.
    """
    text = to_printable(" ".join(text.split()))
    if len(text) <= length:
        return text
    tail = (length - 1) // 2
    return f"{text[: length - 1 - tail]}…{text[-tail:]}"


# Intervals against their limits, one row per value.

_OUTCOME_INK: dict[Outcome, Ink] = {"pass": Ink.PASS, "fail": Ink.FAIL, "inconclusive": Ink.INCONCLUSIVE}
_OUTCOME_MARKER: dict[Outcome, tuple[str, float]] = {"pass": ("o", 10), "fail": ("X", 12), "inconclusive": ("D", 9)}
_SHOWN_STRATA = 10  # strata in the plot of perplexity, worst first
_SHOWN_GUARDS = 4  # guards of each variant in the plot of variants, largest drop first


class Line(NamedTuple):
    """One row of an interval plot: an estimate with its interval, and the two limits that it is compared with."""

    label: str
    detail: str
    numbers: str
    outcome: Outcome
    word: str
    estimate: float | None  # None: not finite
    bounds: tuple[float | None, float | None]
    fail_limit: float
    soft_limit: float  # margin or warning


def guards_plot(content: ReportContent) -> tuple[Markup, ...]:
    """Return the plots of all guards: drop and interval in points, with the limits ``max_drop`` and ``margin``."""
    verdict = content.verdict
    guards = verdict.all_guards
    if not guards:
        return ()
    lines = [
        *(_drop_line(suite, f"mean of {suite.tasks} tasks", f"against {suite.reference}") for suite in verdict.suites),
        *(_drop_line(guard, guard.task, f"against {guard.reference}") for guard in guards),
    ]
    label = "Drop of each guarded task in points, with its interval. " + " ".join(
        f"{guard.task} against {guard.reference}: {wording.drop(guard)}, {wording.limits(guard)}, {guard.word}."
        for guard in guards
    )
    in_suite = any(guard.limit is not None for guard in guards)
    upper = "margin or per-task limit" if verdict.suites else "per-task limit" if in_suite else "margin"
    return _draw_drops("guards", lines, upper, label)


def variants_plot(content: ReportContent) -> tuple[Markup, ...]:
    """Return the plots of the drops of all quantized variants: the mean of a suite, or else the largest drops.

    The result is empty if no variant was evaluated on a task.
    """
    lines: list[Line] = []
    upper = "margin"
    for variant in content.variants:
        suites, guards = (variant.gate.suites, variant.gate.guards) if variant.gate else ((), ())
        lines += [_drop_line(suite, variant.type, f"mean of {suite.tasks} tasks") for suite in suites]
        shown = () if suites else sorted(guards, key=lambda guard: -guard.drop)[:_SHOWN_GUARDS]
        lines += [_drop_line(guard, variant.type, guard.task) for guard in shown]
        if any(guard.limit is not None for guard in shown):  # a task of a suite that was decided before the others
            upper = "margin or per-task limit"
    if not lines:
        return ()
    label = "Drop of each quantized variant against the merge in points, with its interval. " + " ".join(
        f"{line.label}, {line.detail}: {line.numbers}, max_drop {wording.plain(line.fail_limit)}, {upper} "
        f"{wording.plain(line.soft_limit)}, {line.word}."
        for line in lines
    )
    return _draw_drops("variants", lines, upper, label)


def _drop_line(verdict: GuardVerdict | SuiteVerdict, label: str, detail: str) -> Line:
    limits, word, bounds = (verdict.max_drop, verdict.margin), str(verdict.outcome), (verdict.low, verdict.high)
    if isinstance(verdict, GuardVerdict):
        limits, word = (verdict.max_drop, verdict.margin if verdict.limit is None else verdict.limit), verdict.word
    return Line(label, detail, wording.drop(verdict), verdict.outcome, word, verdict.drop, bounds, *limits)


def _draw_drops(name: str, lines: Sequence[Line], upper: str, label: str) -> tuple[Markup, ...]:
    """Draw drops in points. ``upper`` names the second limit of the lines."""
    has_margin = any(line.soft_limit != line.fail_limit for line in lines)
    names = ("zero", "max_drop", upper) if has_margin else ("zero", f"max_drop and {upper}")
    return draw_intervals(name, lines, 0.0, names, "drop in points", label)


def drift_plot(content: ReportContent) -> tuple[Markup, ...]:
    """Return the plots of the merge's perplexity over the better parent's, against warning and limit.

    The result is empty without a drift verdict.
    """
    drift = content.verdict.drift
    if drift is None:
        return ()
    limits, bounds, numbers = (drift.max_ratio, drift.warn_ratio), (drift.low, drift.high), wording.format_ratio(drift)
    against = f"against {drift.reference}"
    line = Line("merge", against, numbers, drift.outcome, drift.outcome, drift.ratio, bounds, *limits)
    strata = []
    for stratum in sorted(drift.strata, key=lambda stratum: -stratum.low)[:_SHOWN_STRATA]:
        outcome: Outcome = "fail" if stratum.failed else "pass"
        word, bounds = "fail" if stratum.failed else "no alarm", (stratum.low, stratum.high)
        documents, numbers = format_count(stratum.documents, "document"), wording.stratum_ratio(stratum)
        strata.append(Line(stratum.name, documents, numbers, outcome, word, stratum.ratio, bounds, *limits))
    label = (
        f"Perplexity of the merge over that of {drift.reference}: {line.numbers}; warning above "
        f"{wording.plain(drift.warn_ratio)}, limit {wording.plain(drift.max_ratio)}, {line.word}."
        + "".join(f" {stratum.label}: {stratum.numbers}, {stratum.word}." for stratum in strata)
    )
    return draw_intervals("drift", [line, *strata], 1.0, ("equal", "limit", "warning"), "ratio", label)


def judge_plot(content: ReportContent) -> tuple[Markup, ...]:
    """Return the plots of the win rate's distance below 50 % and its limit. Empty without a judge."""
    judge = content.judge
    if judge is None:
        return ()
    shortfall, low, high = (50 - 100 * rate for rate in (judge.win_rate, judge.high, judge.low))
    numbers, limit = f"{wording.number(shortfall, 1)} {wording.interval(low, high, 1)}", judge.max_shortfall
    against = f"against {judge.reference}"
    line = Line("merge", against, numbers, judge.outcome, judge.outcome, shortfall, (low, high), limit, limit)
    label = (
        f"Win rate of the merge against {judge.reference}, in points below an even one: {line.numbers}, limit "
        f"{wording.plain(judge.max_shortfall)}, {judge.outcome}."
    )
    return draw_intervals("judge", [line], 0.0, ("even", "limit"), "points below even", label)


def draw_intervals(
    plot: str, lines: Sequence[Line], neutral: float, names: tuple[str, ...], unit: str, label: str
) -> tuple[Markup, ...]:
    """Return a plot of ``lines`` against ``neutral`` and their limits, as a wide and a narrow ``<svg>`` element.

    A wide plot has the name on the left, the interval in the middle and the numbers on the right, all on one line. A
    narrow plot has the name and the numbers above the interval.

    Args:
        plot: Name of the plot, unique in the page.
        lines: Rows of the plot.
        neutral: Value that means no difference: 0 for a drop, 1 for a ratio.
        names: Legend entries for the strokes at the neutral value, the limit and the soft limit.
        unit: Unit of the axis.
        label: Text alternative for screen readers.
    """
    values = [neutral, *(limit for line in lines for limit in (line.fail_limit, line.soft_limit))]
    shown = [x for line in lines for x in (line.estimate, *line.bounds) if x is not None and math.isfinite(x)]
    low, high = min(values + shown), max(values + shown)
    # A ratio that is far from 1 needs a logarithmic axis.
    logarithmic = neutral > 0 and max([neutral, *shown]) > 2 * neutral and low > 0
    if logarithmic:
        span = math.log(high / low)
        low, high = low / math.exp(0.06 * span), high * math.exp(0.08 * span)
    else:
        span = high - low or abs(high) or 1.0
        low, high = low - 0.06 * span, high + 0.08 * span
    strokes: tuple[Key, ...] = (
        {"color": Ink.TEXT.value, "linewidth": 1},
        {"color": Ink.FAIL.value, "linewidth": 1.6},
        {"color": Ink.MUTED.value, **DASHED},
    )

    def draw(layout: Layout) -> Figure:
        height, left, right = (82, 2, 2) if layout.narrow else (42, 236, 300)
        # Vertical extent of the interval. Row i spans i - 0.5 to i + 0.5, downward.
        above, below = (0.04, 0.36) if layout.narrow else (-0.5, 0.5)
        figure = blank(layout, 36 + len(lines) * height + 32)
        box = (left, 36, layout.width - left - right, len(lines) * height)
        axes = panel(figure, box, None if layout.narrow else "x", pad=7)
        axes.set_ylim(len(lines) - 0.5, -0.5)
        axes.set_yticks([])
        _ruler(axes, (low, high), logarithmic=logarithmic, narrow=layout.narrow, ratio=neutral == 1)
        if not layout.narrow:
            write(axes, (0, 0), unit, TextStyle(ink=Ink.MUTED), shift=(-left, 13), zorder=3)
        for row, line in enumerate(lines):
            ends = [row + above, row + below]
            # Equal limits of neighboring rows join into one line.
            axes.fill_betweenx(ends, line.fail_limit, high, color=Ink.FAIL.value, alpha=0.08, linewidth=0, zorder=1)
            axes.plot([line.fail_limit] * 2, ends, zorder=2, **strokes[1])
            if line.soft_limit != line.fail_limit:
                axes.plot([line.soft_limit] * 2, ends, zorder=2, **strokes[2])
            axes.plot([neutral] * 2, ends, zorder=2, **strokes[0])
            _interval(axes, row + (above + below) / 2, line, high)
            _names(axes, row, line, left, right, narrow=layout.narrow)
        keys = [{**stroke, "label": name} for name, stroke in zip(names, strokes, strict=False)]
        legend(figure, keys, left, len(keys), spacing=1.6)
        return figure

    return draw_twice(plot, label, draw)


def _ruler(axes: Axes, ends: tuple[float, float], *, logarithmic: bool, narrow: bool, ratio: bool) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

    if logarithmic:
        axes.set_xscale("log")
        # Within one decade, powers of ten alone would leave the axis nearly without labels.
        steps = (1.0,) if ends[1] / ends[0] > 100 else (1.0, 2.0, 5.0)
        axes.xaxis.set_major_locator(LogLocator(subs=steps, numticks=5 if narrow else 8))
    else:
        axes.xaxis.set_major_locator(MaxNLocator(5 if narrow else 7, steps=[1, 2, 5, 10]))
    axes.xaxis.set_minor_locator(NullLocator())

    def text(value: float, _: object) -> str:
        is_large = abs(value) >= 1e4
        shown = wording.format_magnitude(value) if is_large else wording.plain(round(float(value), 6) + 0.0)
        return f"{shown}{wording.TIMES if ratio else ''}"

    axes.xaxis.set_major_formatter(FuncFormatter(text))
    axes.set_xlim(*ends)


def _interval(axes: Axes, y: float, line: Line, end: float) -> None:
    ink = _OUTCOME_INK[line.outcome].value
    if line.estimate is None:
        # A value that is not finite is drawn as an arrow that leaves the picture.
        axes.plot([line.fail_limit, end], [y, y], color=ink, linewidth=2.2, zorder=4)
        axes.plot([end], [y], marker=">", markersize=11, color=ink, clip_on=False, zorder=5)
        return
    low, high = line.bounds
    if low is not None and high is not None:
        axes.plot([low, high], [y, y], color=ink, linewidth=2.2, solid_capstyle="butt", zorder=4)
        axes.plot([low, high], [y, y], "|", markersize=9, markeredgewidth=2.2, color=ink, zorder=4)
    marker, size = _OUTCOME_MARKER[line.outcome]
    edge: dict[str, Any] = {"markeredgecolor": Ink.PAPER.value, "markeredgewidth": 1.2}
    axes.plot([line.estimate], [y], marker, markersize=size, color=ink, zorder=5, **edge)


def _names(axes: Axes, row: int, line: Line, left: float, right: float, *, narrow: bool) -> None:
    """Write the name, numbers and outcome of a row, next to its interval or (narrow) above it."""
    length = 26 if narrow else 30
    label, detail = shorten(line.label, length), shorten(line.detail, length + 5)
    verdict = f"{wording.GLYPHS[line.outcome]} {line.word}"
    bold, small = TextStyle(size=13, bold=True), TextStyle(size=11.5, ink=Ink.MUTED)
    colored = replace(bold, ink=_OUTCOME_INK[line.outcome])
    texts: tuple[tuple[int, tuple[float, float], str, TextStyle], ...] = (
        (0, (-left, -8), label, bold),
        (0, (-left, 9), detail, small),
        (1, (right - 132, 0), line.numbers, TextStyle(size=13, align="right")),
        (1, (right - 118, 0), verdict, colored),
    )
    if narrow:
        texts = (
            (0, (0, -28), label, bold),
            (0, (0, -11), detail, small),
            (1, (0, -28), verdict, replace(colored, align="right")),
            (1, (0, -11), line.numbers, replace(small, align="right")),
        )
    for end, shift, text, style in texts:  # at the left (0) or the right (1) end of the axis
        write(axes, (end, row), text, style, shift=shift, coordinates=axes.get_yaxis_transform(), zorder=3)


# Heat map of the conflicts between task vectors. Rows run from the input of the network to its output. The rows of a
# deep network are groups of neighboring layers, and a table has every layer. Tensors outside the layers have their own
# bars.

# Smallest range of values that the colors span, so that small differences look small.
_LEAST_SPAN = 0.1
_MAX_LAYERS = 12  # more layers than this are drawn in groups of neighbors
_GROUPS = 8  # number of groups
_STEPS = 6  # steps of the color scale
_FAINT, _FULL = 0.05, 0.6  # opacity; text stays readable on it in light mode and dark mode


class _Row(NamedTuple):
    """One layer with its cells, or one part outside the layers with a single cell."""

    name: str  # name of the stack of layers, or of the part
    cells: tuple[tuple[int, int, float | None], ...]  # first column, number of columns, value
    layers: tuple[int, ...] = ()  # empty for a part outside the layers

    @property
    def label(self) -> str:
        if len(self.layers) < 2:
            return " ".join((self.name, *map(str, self.layers)))
        return f"{self.name}s {self.layers[0]}\N{EN DASH}{self.layers[-1]}"

    @property
    def average(self) -> str:
        values = [value for _, _, value in self.cells if value is not None]
        return f"{_percent(sum(values) / len(values))} %" if values else ""


def interference_plot(content: ReportContent) -> tuple[Markup, ...]:
    """Return the heat maps of sign conflicts by layer and kind of tensor, wide and narrow.

    With a single task vector, the cells show its relative length. The result is empty without interference data.
    """
    explanation = content.explanation
    if explanation is None or explanation.interference is None:
        return ()
    columns, all_rows = _cells(explanation.interference)
    rows, several = _grouped(all_rows), explanation.interference.vectors > 1
    values = [value for row in all_rows for _, _, value in row.cells if value is not None] or [0.0]
    low = min(values) if several else 0.0
    high = max(*values, low + (_LEAST_SPAN if several else 1e-12))
    label = f"{heat_map_caption(explanation)}. " + " ".join(
        f"{row.label}: {row.average}." for row in rows if row.average
    )

    def draw(layout: Layout) -> Figure:
        left, height, font, narrowest = (70, 22, 10.5, 24) if layout.narrow else (110, 24, 12, 30)
        head, foot = 52, 4
        figure = blank(layout, head + len(rows) * height + foot)
        # One unit of the axes is one pixel. The y axis points downward from the first row.
        axes = figure.add_axes((0, 0, 1, 1))
        axes.patch.set_visible(False)
        axes.set_axis_off()
        axes.set_xlim(0, layout.width)
        axes.set_ylim(len(rows) * height + foot, -head)
        muted = TextStyle(size=font, ink=Ink.MUTED, align="center")

        def text(x: float, y: float, value: str, style: TextStyle) -> None:
            axes.text(x, y, value, ha=style.align, va="center_baseline", fontsize=font, color=style.ink.value)

        width = (layout.width - left) / len(columns)
        for index, kind in enumerate(columns):
            text(left + (index + 0.5) * width, -10, kind.replace("_", "+"), muted)
        for index, row in enumerate(rows):
            middle = (index + 0.5) * height
            text(0, middle, row.label, replace(muted, align="left"))
            for first, count, value in row.cells:
                x, cell = left + first * width, count * width
                if value is not None:
                    _fill(axes, (x + 1, index * height + 1, cell - 2, height - 2), (value - low) / (high - low))
                if width >= narrowest or count > 1:
                    shown = wording.NONE if value is None else _percent(value)
                    text(x + cell / 2, middle, shown, replace(muted, ink=Ink.MUTED if value is None else Ink.TEXT))
        # The color scale is above the columns.
        start, size = left + 44, 18
        text(start - 8, -38, f"{_percent(low)} %", replace(muted, align="right"))
        for index in range(_STEPS):
            _fill(axes, (start + index * size, -44, size - 2, 12), index / (_STEPS - 1))
        text(start + _STEPS * size + 6, -38, f"{_percent(high)} %", replace(muted, align="left"))
        return figure

    return draw_twice("interference", label, draw)


def heat_map_caption(explanation: Explanation) -> str:
    """Return the caption, which explains the numbers in the cells."""
    if explanation.interference is not None and explanation.interference.vectors < 2:
        return "Distance between the parents, in percent of the norm of the weights"
    return "Sign conflict between the parents, in percent"


def layer_table(explanation: Explanation) -> tuple[tuple[str, ...], tuple[tuple[str, tuple[str, ...]], ...]]:
    """Return the columns and rows of a table of all layers, or no rows if the heat map already shows every layer."""
    if explanation.interference is None:
        return (), ()
    columns, all_rows = _cells(explanation.interference)
    if _grouped(all_rows) == all_rows:
        return (), ()
    rows = []
    for row in all_rows:
        values = {first: value for first, _, value in row.cells}
        texts = (values.get(at) if row.layers else None for at in range(len(columns)))
        if row.layers:
            rows.append((row.label, tuple(wording.NONE if value is None else _percent(value) for value in texts)))
    return tuple(kind.replace("_", "+") for kind in columns), tuple(rows)


def _cells(interference: Interference) -> tuple[tuple[TensorKind, ...], tuple[_Row, ...]]:
    """Return the columns of the heat map, and its rows without grouping."""
    kinds = {group.kind for group in interference.spots if group.layer is not None}
    columns = tuple(kind for kind in KINDS if kind in kinds) or ("other",)
    several = len({group.stack for group in interference.spots if group.layer is not None}) > 1
    rows: dict[tuple[str, int | None], list[tuple[int, int, float | None]]] = {}
    for group in interference.spots:
        value = group.tally.conflict if group.tally.vectors > 1 else group.tally.length(0)
        if group.layer is None:
            outside = "final norm" if group.kind == "norm" else str(group.kind)
            rows.setdefault((outside, None), []).append((0, len(columns), value))
        else:
            parts = [part for part in group.stack.split(".") if part not in ("model", "layers", "blocks")]
            name = parts[-1] if several and parts else "layer"
            rows.setdefault((name, group.layer), []).append((columns.index(group.kind), 1, value))
    return columns, tuple(
        _Row(name, tuple(cells), () if layer is None else (layer,)) for (name, layer), cells in rows.items()
    )


def _grouped(rows: tuple[_Row, ...]) -> tuple[_Row, ...]:
    """Return the rows with neighboring layers joined, each cell as the mean of their cells, if there are many."""
    count = sum(bool(row.layers) for row in rows)
    if count <= _MAX_LAYERS:
        return rows
    size, result = math.ceil(count / _GROUPS), []
    for (name, is_layer), neighbors in groupby(rows, key=lambda row: (row.name, bool(row.layers))):
        members = list(neighbors)
        if not is_layer:
            result += members
            continue
        for start in range(0, len(members), size):
            group = members[start : start + size]
            cells: dict[tuple[int, int], list[float]] = {}
            for first, span, value in (cell for row in group for cell in row.cells):
                cells.setdefault((first, span), []).extend([] if value is None else [value])
            means = tuple((*place, sum(found) / len(found) if found else None) for place, found in cells.items())
            result.append(_Row(name, means, tuple(layer for row in group for layer in row.layers)))
    return tuple(result)


def _percent(value: float) -> str:
    percent = 100 * value
    return f"{percent:.0f}" if percent >= 10 or percent == 0 else f"{percent:.2g}"


def _fill(axes: Axes, box: tuple[float, float, float, float], share: float) -> None:
    """Fill a box (left, top, width, height) with a color. ``share`` is a position on the scale, from 0 to 1."""
    from matplotlib.patches import Rectangle

    alpha = round(_FAINT + (_FULL - _FAINT) * share, 3)
    left, top, width, height = box
    axes.add_patch(Rectangle((left, top), width, height, facecolor=Ink.FAIL.value, alpha=alpha, linewidth=0))

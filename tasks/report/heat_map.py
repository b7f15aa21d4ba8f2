"""Where in the network task vectors conflict: a cell for each layer and kind of tensor, drawn by matplotlib.

The rows run from the input of the network to its output. What stands outside the layers has a bar of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mergegate.merge_core.analysis import Interference, TensorGroup
from mergegate.merge_core.architecture import KINDS, TensorKind
from mergegate.tasks.explain import Explanation
from mergegate.tasks.report.content import ReportContent
from mergegate.tasks.report.svg import Ink, drawing, inline
from mergegate.tasks.report.wording import NONE

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# A flat map is drawn flat: colours span at least so much.
_LEAST_SPAN = 0.1
_MANY = 48  # rows from which numbers would not fit any more
_STEPS = 6  # of the scale
_FAINT, _FULL = 0.05, 0.6  # opacity: text on top of it stays readable, in the light and in the dark


@dataclass(frozen=True)
class _Format:
    """Pixels."""

    name: str
    width: int
    left: int
    row: int
    font: float
    narrowest: int  # a column in which a number fits


_WIDE = _Format("wide", width=920, left=110, row=24, font=12, narrowest=30)
_NARROW = _Format("narrow", width=350, left=62, row=22, font=10.5, narrowest=24)


@dataclass(frozen=True)
class _Row:
    """A layer with its cells by column, or a part outside the layers with one."""

    label: str
    cells: tuple[tuple[int, int, float | None], ...]  # first column, number of columns, value


@dataclass(frozen=True)
class _Map:
    columns: tuple[TensorKind, ...]
    rows: tuple[_Row, ...]
    low: float
    high: float


def interference_plot(content: ReportContent) -> tuple[str, ...]:
    """Sign conflict by layer and kind, wide and narrow; with one task vector, how far it leads. Empty without
    interference."""
    explanation = content.explanation
    if explanation is None or explanation.interference is None:
        return ()
    drawn = _map(explanation.interference)
    label = f"{what_is_shown(explanation)}. " + " ".join(
        f"{row.label}: {_average(row)}." for row in drawn.rows if _average(row)
    )
    return tuple(_draw(f"interference-{form.name}", drawn, form, label) for form in (_WIDE, _NARROW))


def what_is_shown(explanation: Explanation) -> str:
    """What the cells mean."""
    if explanation.interference is not None and explanation.interference.vectors < 2:
        return "Distance of the parents, in per cent of the weights' norm"
    return "Weights moved in opposite directions, in per cent of those that two or more parents move"


def _map(found: Interference) -> _Map:
    kinds = {spot.kind for spot in found.spots if spot.layer is not None}
    columns = tuple(kind for kind in KINDS if kind in kinds) or ("other",)
    several = len({spot.stack for spot in found.spots if spot.layer is not None}) > 1
    rows: dict[str, list[tuple[int, int, float | None]]] = {}
    for spot in found.spots:
        value = _value(spot)
        if spot.layer is None:
            outside = "final norm" if spot.kind == "norm" else str(spot.kind)
            rows.setdefault(outside, []).append((0, len(columns), value))
        else:
            parts = [part for part in spot.stack.split(".") if part not in ("model", "layers", "blocks")]
            label = f"{parts[-1]} {spot.layer}" if several and parts else f"layer {spot.layer}"
            rows.setdefault(label, []).append((columns.index(spot.kind), 1, value))
    values = [value for cells in rows.values() for _, _, value in cells if value is not None] or [0.0]
    low = min(values) if found.vectors > 1 else 0.0
    return _Map(
        columns=columns,
        rows=tuple(_Row(label, tuple(cells)) for label, cells in rows.items()),
        low=low,
        high=max(*values, low + (_LEAST_SPAN if found.vectors > 1 else 1e-12)),
    )


def _value(spot: TensorGroup) -> float | None:
    return spot.tally.conflict if spot.tally.vectors > 1 else spot.tally.length(0)


def _average(row: _Row) -> str:
    """What a row says to who cannot see it."""
    known = [value for _, _, value in row.cells if value is not None]
    return f"{_percent(sum(known) / len(known))} %" if known else ""


def _percent(value: float) -> str:
    percent = 100 * value
    return f"{percent:.0f}" if percent >= 10 or percent == 0 else f"{percent:.2g}"


def _draw(plot: str, drawn: _Map, form: _Format, label: str) -> str:
    from matplotlib.figure import Figure

    crowded = len(drawn.rows) > _MANY
    row = 10 if crowded else form.row
    head, foot = 52, 4
    height = head + len(drawn.rows) * row + foot
    with drawing(plot):
        figure: Any = Figure(figsize=(form.width / 72, height / 72), dpi=72)
        figure.patch.set_visible(False)
        # One unit of the axes is one pixel, downwards from the first row.
        axes: Axes = figure.add_axes((0, 0, 1, 1))
        axes.patch.set_visible(False)
        axes.set_axis_off()
        axes.set_xlim(0, form.width)
        axes.set_ylim(height - head, -head)
        column = (form.width - form.left) / len(drawn.columns)
        numbers = not crowded and column >= form.narrowest
        for at, kind in enumerate(drawn.columns):
            _text(axes, form.left + (at + 0.5) * column, -10, kind.replace("_", "+"), form, ink=Ink.MUTED)
        for at, line in enumerate(drawn.rows):
            middle = (at + 0.5) * row
            if not crowded or at % 4 == 0 or len(line.cells) == 1:
                _text(axes, 0, middle, line.label, form, align="left", ink=Ink.MUTED)
            for first, count, value in line.cells:
                box = (form.left + first * column, at * row, count * column, row)
                _cell(axes, box, drawn, value, form, numbers=numbers or (count > 1 and not crowded))
        _scale(axes, form, drawn)
        return inline(figure, plot, label)


def _cell(
    axes: Axes,
    box: tuple[float, float, float, float],
    drawn: _Map,
    value: float | None,
    form: _Format,
    *,
    numbers: bool,
) -> None:
    from matplotlib.patches import Rectangle

    x, y, width, height = box
    if value is not None:
        share = (value - drawn.low) / (drawn.high - drawn.low)
        axes.add_patch(
            Rectangle(
                (x + 1, y + 1),
                width - 2,
                height - 2,
                facecolor=Ink.FAIL.value,
                alpha=round(_FAINT + (_FULL - _FAINT) * share, 3),
                linewidth=0,
            )
        )
    if numbers:
        text, ink = (NONE, Ink.MUTED) if value is None else (_percent(value), Ink.TEXT)
        _text(axes, x + width / 2, y + height / 2, text, form, ink=ink)


def _scale(axes: Axes, form: _Format, drawn: _Map) -> None:
    """What the colours mean, above the columns."""
    from matplotlib.patches import Rectangle

    start, size = form.left + 44, 18
    _text(axes, start - 8, -38, f"{_percent(drawn.low)} %", form, align="right", ink=Ink.MUTED)
    for at in range(_STEPS):
        share = at / (_STEPS - 1)
        alpha = round(_FAINT + (_FULL - _FAINT) * share, 3)
        axes.add_patch(
            Rectangle((start + at * size, -44), size - 2, 12, facecolor=Ink.FAIL.value, alpha=alpha, linewidth=0)
        )
    end = start + _STEPS * size
    _text(axes, end + 6, -38, f"{_percent(drawn.high)} %", form, align="left", ink=Ink.MUTED)


def _text(
    axes: Axes, x: float, y: float, text: str, form: _Format, *, align: str = "center", ink: Ink = Ink.TEXT
) -> None:
    axes.text(x, y, text, ha=align, va="center_baseline", fontsize=form.font, color=ink.value)

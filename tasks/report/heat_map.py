"""Draw a heat map of the conflicts between task vectors, with one cell per layer and kind of tensor.

Rows run from the input of the network to its output. The rows of a deep network are groups of neighboring layers, and a
table has every layer. Tensors outside the layers have their own bars.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any

from mergegate.merge_core.analysis import Interference
from mergegate.merge_core.architecture import KINDS, TensorKind
from mergegate.tasks.explain import Explanation
from mergegate.tasks.report.content import ReportContent
from mergegate.tasks.report.svg import Ink, TextStyle, drawing, inline
from mergegate.tasks.report.wording import NONE

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Smallest range of values that the colors span, so that small differences look small.
_LEAST_SPAN = 0.1
_MAX_LAYERS = 12  # more layers than this are drawn in groups of neighbors
_GROUPS = 8  # number of groups
_STEPS = 6  # steps of the color scale
_FAINT, _FULL = 0.05, 0.6  # opacity; text stays readable on it in light mode and dark mode


@dataclass(frozen=True)
class _Format:
    """Size of a heat map and its parts, in pixels."""

    name: str
    width: int
    left: int
    row: int
    font: float
    narrowest: int  # smallest column width in which a number fits


_WIDE = _Format("wide", width=920, left=110, row=24, font=12, narrowest=30)
_NARROW = _Format("narrow", width=350, left=70, row=22, font=10.5, narrowest=24)


@dataclass(frozen=True)
class _Row:
    """One layer with its cells, or one part outside the layers with a single cell."""

    name: str  # name of the stack of layers, or of the part
    cells: tuple[tuple[int, int, float | None], ...]  # first column, number of columns, value
    layers: tuple[int, ...] = ()  # empty for a part outside the layers

    @property
    def label(self) -> str:
        if len(self.layers) < 2:
            return " ".join((self.name, *map(str, self.layers)))
        return f"{self.name}s {self.layers[0]}\N{EN DASH}{self.layers[-1]}"


@dataclass(frozen=True)
class LayerTable:
    """Every layer of a network as text. It has no rows if the heat map already shows every layer."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, tuple[str, ...]], ...]


@dataclass(frozen=True)
class _Map:
    columns: tuple[TensorKind, ...]
    rows: tuple[_Row, ...]
    low: float
    high: float


def interference_plot(content: ReportContent) -> tuple[str, ...]:
    """Return the heat maps of sign conflicts by layer and kind of tensor, wide and narrow.

    With a single task vector, the cells show its relative length. The result is empty without interference data.
    """
    explanation = content.explanation
    if explanation is None or explanation.interference is None:
        return ()
    heat_map = _map(explanation.interference)
    heat_map = replace(heat_map, rows=_grouped(heat_map.rows))
    label = f"{heat_map_caption(explanation)}. " + " ".join(
        f"{row.label}: {_average(row)}." for row in heat_map.rows if _average(row)
    )
    return tuple(_draw(f"interference-{form.name}", heat_map, form, label) for form in (_WIDE, _NARROW))


def heat_map_caption(explanation: Explanation) -> str:
    """Return the caption, which explains the numbers in the cells."""
    if explanation.interference is not None and explanation.interference.vectors < 2:
        return "Distance between the parents, in percent of the norm of the weights"
    return "Sign conflict between the parents, in percent"


def layer_table(explanation: Explanation) -> LayerTable:
    """Return a table of all layers, for a network with too many layers for the heat map."""
    if explanation.interference is None:
        return LayerTable((), ())
    heat_map = _map(explanation.interference)
    if _grouped(heat_map.rows) == heat_map.rows:
        return LayerTable((), ())
    rows = []
    for row in heat_map.rows:
        values = {first: value for first, _, value in row.cells}
        texts = (values.get(at) if row.layers else None for at in range(len(heat_map.columns)))
        if row.layers:
            rows.append((row.label, tuple(NONE if value is None else _percent(value) for value in texts)))
    return LayerTable(tuple(kind.replace("_", "+") for kind in heat_map.columns), tuple(rows))


def _map(interference: Interference) -> _Map:
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
    values = [value for cells in rows.values() for _, _, value in cells if value is not None] or [0.0]
    low = min(values) if interference.vectors > 1 else 0.0
    return _Map(
        columns=columns,
        rows=tuple(
            _Row(name, tuple(cells), () if layer is None else (layer,)) for (name, layer), cells in rows.items()
        ),
        low=low,
        high=max(*values, low + (_LEAST_SPAN if interference.vectors > 1 else 1e-12)),
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


def _average(row: _Row) -> str:
    values = [value for _, _, value in row.cells if value is not None]
    return f"{_percent(sum(values) / len(values))} %" if values else ""


def _percent(value: float) -> str:
    percent = 100 * value
    return f"{percent:.0f}" if percent >= 10 or percent == 0 else f"{percent:.2g}"


def _draw(plot: str, heat_map: _Map, form: _Format, label: str) -> str:
    from matplotlib.figure import Figure

    row, head, foot = form.row, 52, 4
    height = head + len(heat_map.rows) * row + foot
    with drawing(plot):
        figure: Any = Figure(figsize=(form.width / 72, height / 72), dpi=72)
        figure.patch.set_visible(False)
        # One unit of the axes is one pixel. The y axis points downward from the first row.
        axes: Axes = figure.add_axes((0, 0, 1, 1))
        axes.patch.set_visible(False)
        axes.set_axis_off()
        axes.set_xlim(0, form.width)
        axes.set_ylim(height - head, -head)
        muted = TextStyle(ink=Ink.MUTED, align="center")
        column = (form.width - form.left) / len(heat_map.columns)
        numbers = column >= form.narrowest
        for index, kind in enumerate(heat_map.columns):
            _text(axes, (form.left + (index + 0.5) * column, -10), kind.replace("_", "+"), form, muted)
        for index, line in enumerate(heat_map.rows):
            middle = (index + 0.5) * row
            _text(axes, (0, middle), line.label, form, replace(muted, align="left"))
            for first, count, value in line.cells:
                x, width = form.left + first * column, count * column
                if value is not None:
                    share = (value - heat_map.low) / (heat_map.high - heat_map.low)
                    _fill(axes, (x + 1, index * row + 1, width - 2, row - 2), share)
                if numbers or count > 1:
                    text = NONE if value is None else _percent(value)
                    style = muted if value is None else TextStyle(align="center")
                    _text(axes, (x + width / 2, middle), text, form, style)
        # The color scale is above the columns.
        start, size = form.left + 44, 18
        _text(axes, (start - 8, -38), f"{_percent(heat_map.low)} %", form, replace(muted, align="right"))
        for index in range(_STEPS):
            _fill(axes, (start + index * size, -44, size - 2, 12), index / (_STEPS - 1))
        end = start + _STEPS * size
        _text(axes, (end + 6, -38), f"{_percent(heat_map.high)} %", form, replace(muted, align="left"))
        return inline(figure, plot, label)


def _fill(axes: Axes, box: tuple[float, float, float, float], share: float) -> None:
    """Fill a box (left, top, width, height) with a color. ``share`` is a position on the scale, from 0 to 1."""
    from matplotlib.patches import Rectangle

    alpha = round(_FAINT + (_FULL - _FAINT) * share, 3)
    left, top, width, height = box
    axes.add_patch(Rectangle((left, top), width, height, facecolor=Ink.FAIL.value, alpha=alpha, linewidth=0))


def _text(axes: Axes, point: tuple[float, float], text: str, form: _Format, style: TextStyle) -> None:
    axes.text(*point, text, ha=style.align, va="center_baseline", fontsize=form.font, color=style.ink.value)

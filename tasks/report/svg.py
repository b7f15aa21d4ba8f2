"""Convert a matplotlib figure to inline SVG that is identical on every machine.

Figures are drawn in the colors of ``Ink``. Each color then becomes a CSS variable, so that the page chooses its value
for light mode, dark mode and print. Text stays text and inherits the page's font.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, Literal
from xml.etree import ElementTree

if TYPE_CHECKING:
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

    @property
    def variable(self) -> str:
        """CSS variable that holds the color."""
        return f"var(--{self.name.lower()})"


@dataclass(frozen=True)
class TextStyle:
    """Appearance of text in a plot. The size is in pixels."""

    size: float = 12
    bold: bool = False
    ink: Ink = Ink.TEXT
    align: Literal["left", "center", "right"] = "left"


_SETTINGS: dict[Any, Any] = {
    "svg.fonttype": "none",
    "text.parse_math": False,  # a '$' in a task name is a dollar sign
    "font.size": 13,
    "text.color": Ink.TEXT.value,
    "axes.unicode_minus": True,
    "path.simplify": False,
}


@contextmanager
def drawing(plot: str) -> Iterator[None]:
    """Apply the settings for drawing the plot named ``plot``, independent of the user's matplotlibrc."""
    import matplotlib
    import matplotlib.style

    with matplotlib.style.context("default"), matplotlib.rc_context({**_SETTINGS, "svg.hashsalt": plot}):
        yield


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


def inline(figure: Figure, plot: str, label: str) -> str:
    """Return ``figure`` as an ``<svg>`` element for an HTML page.

    Args:
        figure: Figure to convert.
        plot: Name of the plot, unique in the page. It prefixes all ids, and the element has the CSS classes ``plot``
            and this name.
        label: Text alternative for screen readers.
    """
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
                style = style.replace(ink.value, ink.variable)
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

"""From a matplotlib figure to inline SVG: the same bytes everywhere, colours and fonts left to the page.

Figures are drawn in the colours of ``Ink``; here each becomes the CSS variable of its name, so that the page decides
what it is in the light, in the dark and on paper. Text stays text and inherits the page's font.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Ink(Enum):
    """What a colour means. The values only have to differ; ``style.css`` says how each looks."""

    TEXT = "#1b1f24"
    MUTED = "#5b6570"
    RULE = "#d8dde3"
    PAPER = "#ffffff"
    PASS = "#00705a"
    FAIL = "#b5380a"
    INCONCLUSIVE = "#7a5c01"
    ACCENT = "#1d5fa6"  # a second series, beside TEXT; told apart by its shape too

    @property
    def variable(self) -> str:
        return f"var(--{self.name.lower()})"


_SETTINGS: dict[Any, Any] = {
    "svg.fonttype": "none",
    "text.parse_math": False,  # a '$' in a task's name is a dollar
    "font.size": 13,
    "text.color": Ink.TEXT.value,
    "axes.unicode_minus": True,
    "path.simplify": False,
}


@contextmanager
def drawing(plot: str) -> Iterator[None]:
    """Settings under which a plot of this name is drawn and written, whatever a user's matplotlibrc says."""
    import matplotlib
    import matplotlib.style

    with matplotlib.style.context("default"), matplotlib.rc_context({**_SETTINGS, "svg.hashsalt": plot}):
        yield


def inline(figure: Figure, plot: str, label: str) -> str:
    """``figure`` as an ``<svg>`` element to stand in HTML.

    Args:
        plot: Name of the plot, unique in the page; prefix of its ids and, with ``plot``, its CSS class.
        label: What the plot shows, for who cannot see it.
    """
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    raw = io.BytesIO()
    canvas: Any = FigureCanvasSVG(figure)  # matplotlib leaves its writers untyped
    with warnings.catch_warnings():
        # Glyphs that matplotlib's own font lacks are no concern: the browser draws the text, with fonts of its own.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        canvas.print_svg(raw, metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    root = ElementTree.fromstring(raw.getvalue())
    _strip(root)
    _rename_ids(root, plot)
    for element in root.iter():
        for name, value in element.attrib.items():
            element.set(name, _styled(value) if name == "style" else value)
    view_box = root.attrib["viewBox"]
    root.attrib.clear()
    root.attrib.update({"class": f"plot {plot}", "viewBox": view_box, "role": "img", "aria-label": label})
    return ElementTree.tostring(root, encoding="unicode").strip()


def _strip(root: ElementTree.Element) -> None:
    """Without namespaces (HTML knows svg), metadata, comments and the style sheet that would leak into the page."""
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]
        element.attrib = {name.rpartition("}")[2]: value for name, value in element.attrib.items()}
        for child in list(element):
            if child.tag.rpartition("}")[2] in ("metadata", "style"):
                element.remove(child)


def _rename_ids(root: ElementTree.Element, plot: str) -> None:
    """Ids are unique in the page, and only those that something refers to are kept."""
    names: dict[str, str] = {}
    references = re.compile(r"url\(#([^)]+)\)|^#(.+)$")
    for element in root.iter():
        for value in element.attrib.values():
            if match := references.search(value):
                names.setdefault(match[1] or match[2], f"{plot}-{len(names)}")
    for element in root.iter():
        for name, value in list(element.attrib.items()):
            if name == "id":
                if value in names:
                    element.set(name, names[value])
                else:
                    del element.attrib[name]
            elif match := references.search(value):
                old = match[1] or match[2]
                element.set(name, value.replace(f"#{old}", f"#{names[old]}"))


def _styled(style: str) -> str:
    style = re.sub(r"font(-family)?: [^;]*", _font, style)
    for ink in Ink:
        style = style.replace(ink.value, ink.variable)
    return re.sub(r";\s*(;\s*)*", "; ", style).strip("; ")


def _font(match: re.Match[str]) -> str:
    """Size and weight of a ``font`` declaration; the family is the page's."""
    if match[1]:
        return ""
    size = re.search(r"[\d.]+px", match[0])
    weight = re.search(r"\b(?:bold|[1-9]00)\b", match[0])
    parts = [f"font-size: {size[0]}"] if size else []
    if weight:
        parts.append(f"font-weight: {weight[0]}")
    return "; ".join(parts)

"""Show two answers to the same question side by side and mark the differences."""

from __future__ import annotations

import re
from difflib import SequenceMatcher
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from markupsafe import Markup

_PIECES = re.compile(r"\s+|\w+|[^\w\s]")


def marked_answers(reference: str, merge: str) -> tuple[Markup, Markup]:
    """Return both answers, escaped, with ``<mark>`` around the differences.

    Differences are marked by word, or by character if each answer is a single word.
    """
    from markupsafe import Markup, escape

    left, right = (_PIECES.findall(text) for text in (reference, merge))
    if len(left) <= 1 and len(right) <= 1:
        left, right = list(reference), list(merge)
    marked = [Markup(), Markup()]
    for kind, a, b, c, d in SequenceMatcher(None, left, right, autojunk=False).get_opcodes():
        for side, text in enumerate(("".join(left[a:b]), "".join(right[c:d]))):
            if text:
                marked[side] += escape(text) if kind == "equal" else Markup("<mark>") + escape(text) + Markup("</mark>")
    return marked[0], marked[1]

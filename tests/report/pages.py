"""Pages that several tests look at, drawn once."""

from __future__ import annotations

from tasks.report.content import ReportContent
from tasks.report.page import render

_drawn: dict[str, str] = {}


def page_of(content: ReportContent) -> str:
    """``render(content)``: equal content gives equal bytes, which has a test of its own."""
    key = content.model_dump_json()
    if key not in _drawn:
        _drawn[key] = render(content)
    return _drawn[key]

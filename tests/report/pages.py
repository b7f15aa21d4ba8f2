"""Render pages that several tests share, once each, and parse them."""

from __future__ import annotations

from html.parser import HTMLParser

from mergegate.tasks.report.content import ReportContent
from mergegate.tasks.report.page import render

VOID = {"meta", "br", "hr", "img", "wbr", "link", "input"}

_drawn: dict[str, str] = {}


def page_of(content: ReportContent) -> str:
    """Return ``render(content)``, cached. Another test checks that equal content gives equal bytes."""
    key = content.model_dump_json()
    if key not in _drawn:
        _drawn[key] = render(content)
    return _drawn[key]


class Page(HTMLParser):
    """Parser for a page that fails on any tag that is not closed in order."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.texts: dict[str, list[str]] = {}
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in VOID or "svg" in self.open, f"<{tag}/> is not closed in HTML"
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.text += data
            self.texts.setdefault(self.open[-1], []).append(data)

    def attributes(self, name: str) -> list[str]:
        return [value for _, attributes in self.elements if (value := attributes.get(name)) is not None]

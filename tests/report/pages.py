"""Render pages that several tests share, once each, and parse them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from html import unescape
from html.parser import HTMLParser

import pytest
from markupsafe import Markup

from mergegate.tasks.release.report import plots, sweep_plots
from mergegate.tasks.release.report.content import ReportContent
from mergegate.tasks.release.report.page import render

HOSTILE = "<script>'$x$'\x1b\"&|"
"""A name that contains a script, a dollar sign, a control character and a column separator of Markdown."""
VOID = {"meta", "br", "hr", "img", "wbr", "link", "input"}

_drawn: dict[str, str] = {}


def page_of(content: ReportContent) -> str:
    """Return ``render(content)``, cached. Another test checks that equal content gives equal bytes."""
    key = content.model_dump_json()
    if key not in _drawn:
        _drawn[key] = render(content)
    return _drawn[key]


@contextmanager
def empty_plots() -> Iterator[None]:
    """Replace each plot by an empty one, because drawing takes nearly all the time of a page."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (plots, sweep_plots):
            patch.setattr(module, "draw_twice", lambda *_: (Markup("<svg></svg>"),))
        yield


def sketch_of(content: ReportContent) -> str:
    """Return the page of ``content`` with empty plots."""
    with empty_plots():
        return render(content)


def text_of(html: str) -> str:
    """Return the visible text of a page on one line."""
    shown = re.sub(r"<wbr>", "", re.sub(r"<style>.*?</style>|<svg.*?</svg>", " ", html, flags=re.DOTALL))
    return " ".join(unescape(re.sub(r"<[^>]*>", " ", shown)).split())


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

    @property
    def tags(self) -> set[str]:
        return {tag for tag, _ in self.elements}

    @property
    def inner_links(self) -> list[str]:
        """Ids of the elements on the same page that links point to."""
        return [href.removeprefix("#") for href in self.attributes("href") if href.startswith("#")]

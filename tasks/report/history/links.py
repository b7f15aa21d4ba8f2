"""What ties a report to its run and to others of its profile: links above it, and below its headline what changed since
last time, when and where the run was, and where its release is.

A page is finished before anybody knows its neighbours, and the next one comes a night later. So both parts are put into
the finished page, between comments that no text of a stranger can contain, since that is escaped; and the links of a
page are put in anew when its successor is there.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from urllib.parse import quote

_LINKS = re.compile("<!--nights-->.*?<!--/nights-->", re.DOTALL)
_CHANGES = re.compile("<!--since-->.*?<!--/since-->", re.DOTALL)
_STYLE = (Path(__file__).parent / "links.css").read_text(encoding="utf-8")
INDEX = "index.html"


@dataclass(frozen=True)
class Neighbours:
    """Where other pages lie, relative to the directory of reports; empty where there is none.

    Args:
        before: Of the run before.
        after: Of the run after.
        search: Of a sweep that went on to a release: the page about its search, beside that about the release.
    """

    before: str = ""
    after: str = ""
    search: str = ""


def tied(
    page: str, at: str, neighbours: Neighbours, changes: Sequence[str], facts: Sequence[tuple[str, str]] = ()
) -> str:
    """A finished page with its links and what changed.

    Args:
        page: HTML with ``</style>``, ``<main>`` and ``</header>`` in it, as all reports have.
        at: Where it will lie, relative to the directory of reports.
        neighbours: Of its profile.
        changes: Sentences, as plain text.
        facts: About the run, each with its name, as plain text; an address becomes a link.
    """
    if _LINKS.search(page):  # a page that has been released, or kept before
        page = _CHANGES.sub(lambda _: _said(changes, facts), relinked(page, at, neighbours), count=1)
        return page
    page = page.replace("</style>", f"{_STYLE}</style>", 1)
    page = page.replace("<main>", f"<main>\n{_nav(at, neighbours)}", 1)
    return page.replace("</header>", f"</header>\n{_said(changes, facts)}", 1)


def relinked(page: str, at: str, neighbours: Neighbours) -> str:
    """A page that was linked already, with other neighbours."""
    return _LINKS.sub(lambda _: _nav(at, neighbours), page, count=1)


def _nav(at: str, neighbours: Neighbours) -> str:
    up = "../" * at.count("/")
    items = [
        f'<a href="{up}{INDEX}">All runs</a>',
        *([_link(up, neighbours.before, "prev", "← the run before")] if neighbours.before else []),
        *([_link(up, neighbours.after, "next", "the run after →")] if neighbours.after else []),
        *([_link(up, neighbours.search, "alternate", "the search")] if neighbours.search else []),
    ]
    return f'<!--nights--><nav class="nights" aria-label="Other reports">{" ".join(items)}</nav><!--/nights-->'


def _link(up: str, to: str, relation: str, text: str) -> str:
    return f'<a rel="{relation}" href="{up}{escape(quote(to))}">{text}</a>'


def _said(changes: Sequence[str], facts: Sequence[tuple[str, str]]) -> str:
    items = "".join(f"<li>{escape(one)}</li>" for one in changes)
    listed = f'<section class="since"><h2>Since the last run</h2><ul>{items}</ul></section>' if changes else ""
    named = "".join(f"<div><dt>{escape(name)}</dt><dd>{_shown(value)}</dd></div>" for name, value in facts)
    told = f'<section class="since"><h2>This run</h2><dl class="run">{named}</dl></section>' if facts else ""
    return f"<!--since-->{listed}{told}<!--/since-->"


def _shown(value: str) -> str:
    text = escape(value)
    if re.fullmatch(r"https?://[^\s\"'<>]+", value):
        return f'<a href="{text}">{text}</a>'
    return f"<code>{text}</code>" if value.startswith("mergegate ") else text

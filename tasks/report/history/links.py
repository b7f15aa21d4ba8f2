"""Link a report to other reports of its profile, and add facts about its run.

Links go above the report. Below its headline follow the changes since the last run, when and where the run took place,
and the location of its release.

A page is rendered before its previous page is known, and its next page is created a run later. So this module inserts
both parts into the finished page, between comments that no external text can contain because external text is escaped.
The next run replaces the links.
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
class NeighborPages:
    """Paths of related pages, relative to the directory of reports. A path is empty if there is no such page.

    Args:
        previous: Page of the previous run.
        following: Page of the next run.
        search: For a sweep that continued with a release, the page about its search.
    """

    previous: str = ""
    following: str = ""
    search: str = ""


def add_links(
    page: str, location: str, neighbors: NeighborPages, changes: Sequence[str], facts: Sequence[tuple[str, str]] = ()
) -> str:
    """Return a finished page with links, facts and the changes since the last run.

    Args:
        page: HTML that contains ``</style>``, ``<main>`` and ``</header>``, as all reports do.
        location: Future path of the page, relative to the directory of reports.
        neighbors: Related pages of the profile.
        changes: Sentences as plain text.
        facts: Name and value of each fact about the run, as plain text. An address becomes a link.
    """
    if _LINKS.search(page):  # a page that was released or archived before
        return _CHANGES.sub(lambda _: _section_html(changes, facts), replace_links(page, location, neighbors), count=1)
    page = page.replace("</style>", f"{_STYLE}</style>", 1)
    page = page.replace("<main>", f"<main>\n{_nav(location, neighbors)}", 1)
    return page.replace("</header>", f"</header>\n{_section_html(changes, facts)}", 1)


def replace_links(page: str, location: str, neighbors: NeighborPages) -> str:
    """Return a page that already has links, with links to ``neighbors`` instead."""
    return _LINKS.sub(lambda _: _nav(location, neighbors), page, count=1)


def _nav(location: str, neighbors: NeighborPages) -> str:
    up = "../" * location.count("/")
    items = [f'<a href="{up}{INDEX}">All runs</a>']
    for target, relation, text in (
        (neighbors.previous, "prev", "← previous run"),
        (neighbors.following, "next", "next run →"),
        (neighbors.search, "alternate", "search page"),
    ):
        if target:
            items.append(f'<a rel="{relation}" href="{up}{escape(quote(target))}">{text}</a>')
    return f'<!--nights--><nav class="runs-nav" aria-label="Other runs">{" ".join(items)}</nav><!--/nights-->'


def _section_html(changes: Sequence[str], facts: Sequence[tuple[str, str]]) -> str:
    items = "".join(f"<li>{escape(change)}</li>" for change in changes)
    title = "Changes since the previous run"
    changes_html = f'<section class="since"><h2>{title}</h2><ul>{items}</ul></section>' if changes else ""
    rows = []
    for name, value in facts:
        text = escape(value)
        if re.fullmatch(r"https?://[^\s\"'<>]+", value):
            text = f'<a href="{text}">{text}</a>'
        elif value.startswith("mergegate "):
            text = f"<code>{text}</code>"
        rows.append(f"<div><dt>{escape(name)}</dt><dd>{text}</dd></div>")
    table = f'<dl class="run">{"".join(rows)}</dl>'
    facts_html = f'<section class="since"><h2>This run</h2>{table}</section>' if facts else ""
    return f"<!--since-->{changes_html}{facts_html}<!--/since-->"

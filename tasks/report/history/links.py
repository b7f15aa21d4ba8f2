"""Link a report to other reports of its profile, and add facts about its run.

Links go above the report. Below its headline follow the changes since the last run, when and where the run took place,
and the location of its release.

A page is finished before its neighbors are known, and the next one follows a run later. Both parts are therefore
inserted into the finished page, between comments that no external text can contain, because external text is escaped.
The links of a page are replaced once its successor exists.
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
    """Paths of related pages, relative to the directory of reports. A path is empty if there is no such page.

    Args:
        before: Page of the previous run.
        after: Page of the next run.
        search: For a sweep that continued with a release, the page about its search next to the page about the release.
    """

    before: str = ""
    after: str = ""
    search: str = ""


def tied(
    page: str, location: str, neighbours: Neighbours, changes: Sequence[str], facts: Sequence[tuple[str, str]] = ()
) -> str:
    """Return a finished page with its links, its facts and the changes since the last run.

    Args:
        page: HTML that contains ``</style>``, ``<main>`` and ``</header>``, as all reports do.
        location: Future path of the page, relative to the directory of reports.
        neighbours: Related pages of the profile.
        changes: Sentences as plain text.
        facts: Name and value of each fact about the run, as plain text. An address becomes a link.
    """
    if _LINKS.search(page):  # a page that was released or archived before
        page = _CHANGES.sub(lambda _: _section_html(changes, facts), relinked(page, location, neighbours), count=1)
        return page
    page = page.replace("</style>", f"{_STYLE}</style>", 1)
    page = page.replace("<main>", f"<main>\n{_nav(location, neighbours)}", 1)
    return page.replace("</header>", f"</header>\n{_section_html(changes, facts)}", 1)


def relinked(page: str, location: str, neighbours: Neighbours) -> str:
    """Return a page that already has links, with links to different neighbors."""
    return _LINKS.sub(lambda _: _nav(location, neighbours), page, count=1)


def _nav(location: str, neighbours: Neighbours) -> str:
    up = "../" * location.count("/")
    items = [
        f'<a href="{up}{INDEX}">All runs</a>',
        *([_link(up, neighbours.before, "prev", "← the run before")] if neighbours.before else []),
        *([_link(up, neighbours.after, "next", "the run after →")] if neighbours.after else []),
        *([_link(up, neighbours.search, "alternate", "the search")] if neighbours.search else []),
    ]
    return f'<!--nights--><nav class="nights" aria-label="Other reports">{" ".join(items)}</nav><!--/nights-->'


def _link(up: str, target: str, relation: str, text: str) -> str:
    return f'<a rel="{relation}" href="{up}{escape(quote(target))}">{text}</a>'


def _section_html(changes: Sequence[str], facts: Sequence[tuple[str, str]]) -> str:
    items = "".join(f"<li>{escape(change)}</li>" for change in changes)
    changes_html = f'<section class="since"><h2>Since the last run</h2><ul>{items}</ul></section>' if changes else ""
    rows = "".join(f"<div><dt>{escape(name)}</dt><dd>{_value_html(value)}</dd></div>" for name, value in facts)
    facts_html = f'<section class="since"><h2>This run</h2><dl class="run">{rows}</dl></section>' if facts else ""
    return f"<!--since-->{changes_html}{facts_html}<!--/since-->"


def _value_html(value: str) -> str:
    text = escape(value)
    if re.fullmatch(r"https?://[^\s\"'<>]+", value):
        return f'<a href="{text}">{text}</a>'
    return f"<code>{text}</code>" if value.startswith("mergegate ") else text

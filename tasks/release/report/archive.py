"""Archive the page of a run at its end: store it under its own name, link it to its neighbors and list it in the index.

::

    reports/<profile>/2026-11-21T030412Z-refused.html    one per run, the last 60 of a profile
    reports/<profile>.html                               the latest, at a fixed name
    reports/history.jsonl, reports/index.html            the history of all runs

A lock lets one run at a time do this, so runs that end at the same time all get a page, a line and links. The lock is
released when its holder dies. A run that is killed halfway leaves a page without a line, which the next run removes
when it prunes old pages.

A page is rendered before its previous page is known, and its next page is created a run later. So this module inserts
the links and the facts about the run into the finished page, between comments that no external text can contain because
external text is escaped. The next run replaces the links.
"""

from __future__ import annotations

import re
import shlex
import time
from collections.abc import Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import NamedTuple

from mergegate.merge_core.files import hold_lock, read_state, state_directory, write_state
from mergegate.merge_core.wording import format_duration
from mergegate.tasks.release.report.history import (
    LOCK,
    History,
    RunRecord,
    append_record,
    changes_since,
    earlier_runs,
    read_history,
)
from mergegate.tasks.release.report.history_page import render_history
from mergegate.tasks.release.report.page import macros, style_sheets

MAX_PAGES = 60  # per profile
SEARCH = ".sweep.html"  # suffix of a page about a search
INDEX = "index.html"
# Largest size of our own pages in bytes. A larger file is not one of them.
_MAX_PAGE_BYTES = 64 << 20
_LINKS = re.compile("<!--nights-->.*?<!--/nights-->", re.DOTALL)
_CHANGES = re.compile("<!--since-->.*?<!--/since-->", re.DOTALL)
_ADDRESS = re.compile(r"https?://[^\s\"'<>]+")


class NeighborPages(NamedTuple):
    """Paths of related pages, relative to the directory of reports. A path is empty if there is no such page."""

    previous: str = ""  # page of the previous run
    following: str = ""  # page of the next run
    search: str = ""  # for a sweep that continued with a release, the page about its search


class ArchivedPage(NamedTuple):
    """Path of a run's page, and path of the latest page of its profile."""

    page: Path
    latest: Path


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
    since = macros("run.html").since(changes, [(*fact, _ADDRESS.fullmatch(fact[1]) is not None) for fact in facts])
    if not _LINKS.search(page):  # it was neither released nor archived before
        page = page.replace("</style>", f"{style_sheets('links.css')}</style>", 1)
        page = page.replace("<main>", "<main>\n<!--nights--><!--/nights-->", 1)
        page = page.replace("</header>", "</header>\n<!--since--><!--/since-->", 1)
    return replace_links(_CHANGES.sub(lambda _: since, page, count=1), location, neighbors)


def replace_links(page: str, location: str, neighbors: NeighborPages) -> str:
    """Return a page that already has links, with links to ``neighbors`` instead."""
    links = macros("run.html").links("../" * location.count("/"), neighbors)
    return _LINKS.sub(lambda _: links, page, count=1)


def archive_run(
    reports: Path,
    record: RunRecord,
    page: str,
    latest: str | None = None,
    search: str | None = None,
    latest_page: str | None = None,
) -> ArchivedPage:
    """Archive the page of a run that has ended, and add the run to the history.

    Args:
        reports: Directory of reports. It is created if absent and is not accessible to other users.
        record: Record of the run. This function sets its ``report``.
        page: HTML of the page.
        latest: Name of the profile's latest page, without its suffix. Default: the profile's name.
        search: For a sweep that continued with a release, HTML of the page about its search.
        latest_page: HTML of the latest page. It may hold details that the archived page leaves out. Default: ``page``.

    Raises:
        OSError: A page or the history cannot be written.
    """
    state_directory(reports, private=True)
    with hold_lock(reports / LOCK, required=False):
        history_before = read_history(reports)
        profile = file_name(record.profile)
        directory = state_directory(reports / profile, private=True)
        moment = time.strftime("%Y-%m-%dT%H%M%SZ", time.gmtime(max(0.0, min(record.ended, 4e9))))
        stem = f"{moment}-{file_name(record.status)}"
        names = (f"{stem}{f'-{number}' if number > 1 else ''}.html" for number in count(1))
        # The name may exist: two runs in the same second, or a clock that was set back.
        report = next(f"{profile}/{name}" for name in names if not (directory / name).exists())
        record = record.model_copy(update={"report": report})
        previous = "".join(run.report for run in earlier_runs(history_before.records, record)[-1:])
        changes = changes_since(history_before.records, record)
        neighbors = NeighborPages(_existing_page(reports, previous), search=_search_page(report) if search else "")
        pages = {report: page, f"{latest or profile}.html": latest_page or page}
        if search:
            pages |= {_search_page(report): search, f"{profile}{SEARCH}": search}
        for location, content in pages.items():
            write_state(
                reports / location, add_links(content, location, neighbors, changes, run_facts(record)).encode()
            )
        history = append_record(reports, history_before, record)

        # Remove the oldest pages of the profile. Pages that the history does not list go first.
        order = {run.report: number for number, run in enumerate(history.records) if run.profile == record.profile}
        archived = [file for file in directory.glob("*.html") if file.is_file() or file.is_symlink()]
        archived = [file for file in archived if not file.name.endswith(SEARCH)]
        archived.sort(key=lambda file: (order.get(f"{profile}/{file.name}", -1), file.name))
        for file in archived[:-MAX_PAGES]:
            with suppress(OSError):  # another user's file in a shared directory
                file.with_name(_search_page(file.name)).unlink(missing_ok=True)
                file.unlink()
        oldest = f"{profile}/{archived[-MAX_PAGES:][0].name}"  # its predecessor may be gone
        for page in {neighbors.previous, oldest} - {"", report}:
            _relink(reports, history, page)
        existing = {_existing_page(reports, run.report) for run in history.records}
        write_state(reports / INDEX, render_history(history, existing - {""}).encode())
    return ArchivedPage(reports / report, reports / f"{latest or profile}.html")


def run_facts(record: RunRecord) -> list[tuple[str, str]]:
    """Return facts about a run for its page, as names and values: the end, the duration and the machine.

    For a release, they include its version, its location and the command that reproduces it.
    """
    moment = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(max(0.0, min(record.ended, 4e9))))
    machine = f" on {record.machine}" if record.machine else ""
    facts = [("ended", f"{moment}, after {format_duration(record.seconds)}{machine}")]
    if record.version:
        facts.append(("release", record.version))
    if record.location and record.flow == "sweep" and record.status == "passed":  # A recipe: nothing was released.
        facts += [("recipe", record.location), ("merge it with", f"mergegate merge {shlex.quote(record.location)} OUT")]
    elif record.location:
        facts.append(("published to" if record.status == "released" else "published at", record.location))
        facts.append(("reproduce with", f"mergegate reproduce {shlex.quote(record.location)}"))
    if record.seen_at:
        facts.append(("Prefect", record.seen_at))
    elif record.run:
        facts.append(("Prefect run", record.run))
    return facts


def file_name(profile: str) -> str:
    """Return a safe file name for a profile, whose name is untrusted and must not collide with the index page."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", profile)[:120].strip(".") or "unnamed"
    return f"{name}-" if name.lower() == INDEX.removesuffix(".html") else name


def _search_page(page: str) -> str:
    return f"{page.removesuffix('.html')}{SEARCH}"


def _existing_page(reports: Path, page: str) -> str:
    """Return ``page`` if it exists and is inside the directory of reports, else an empty string."""
    match = re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9._-]*/[A-Za-z0-9_-][A-Za-z0-9._-]*\.html", page)
    return page if match and (reports / page).is_file() else ""


def _relink(reports: Path, history: History, page: str) -> None:
    """Update the links to neighbors in an archived page, and in the page about its search."""
    record = next((candidate for candidate in reversed(history.records) if candidate.report == page), None)
    if record is None:
        return
    runs = history.runs_of(record.profile, record.flow)
    index = runs.index(record)
    previous, following = (
        "".join(_existing_page(reports, run.report) for run in neighbor)
        for neighbor in (runs[index - 1 : index], runs[index + 1 : index + 2])
    )
    neighbors = NeighborPages(previous, following, _existing_page(reports, _search_page(page)))
    for location in filter(None, (page, neighbors.search)):
        content = read_state(reports / location, bytes.decode, most=_MAX_PAGE_BYTES)
        if isinstance(content, str):
            write_state(reports / location, replace_links(content, location, neighbors).encode())

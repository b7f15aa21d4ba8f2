"""What becomes of a run's page at its end: kept under its own name, tied to its neighbours, listed in the index.

::

    reports/<profile>/2026-11-21T030412Z-refused.html    of each run, the last 60 of a profile
    reports/<profile>.html                               the latest, to be found by name
    reports/history.jsonl, reports/index.html            what is known of all runs

One at a time does so, under a lock that dies with its holder: of eight runs that end at once each has its page, its
line and its neighbours. What is half done when a run is killed is a page without a line, which the pruning removes.
"""

from __future__ import annotations

import re
import shlex
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from mergegate.merge_core.files import locked, read_state, state_directory, write_state
from mergegate.merge_core.wording import format_duration
from mergegate.tasks.report.history.changes import changes_since, previous_of
from mergegate.tasks.report.history.ledger import LOCK, History, append_record, read_history
from mergegate.tasks.report.history.links import INDEX, Neighbours, relinked, tied
from mergegate.tasks.report.history.overview import render_history
from mergegate.tasks.report.history.record import RunRecord

MOST_PAGES = 60  # of a profile
SEARCH = ".sweep.html"  # how a page about a search ends
# Of our own pages, in bytes: what is larger was not made here.
_LARGEST = 64 << 20


class ArchivedPage(NamedTuple):
    """Where the page of a run is, and where the latest of its profile."""

    page: Path
    latest: Path


def keep_run(
    reports: Path,
    record: RunRecord,
    page: str,
    latest: str | None = None,
    search: str | None = None,
    latest_page: str | None = None,
) -> ArchivedPage:
    """Keep the page of a run that has ended, and note it in the history.

    Args:
        reports: Directory; made if it is absent, and closed to other users.
        record: Of the run; its ``report`` is found here.
        page: HTML.
        latest: Name of the profile's latest page, without its ending; absent: the profile's name.
        latest_page: HTML, where the latest says what is not to be kept of every run.
        search: HTML of a further page: of a sweep that went on to a release, the one about its search.

    Raises:
        OSError: when a disk does not let it be kept.
    """
    state_directory(reports, private=True)
    with locked(reports / LOCK, required=False):
        known = read_history(reports)
        profile = file_name(record.profile)
        place = state_directory(reports / profile, private=True)
        at = f"{profile}/{_free_name(place, record)}"
        record = record.model_copy(update={"report": at})
        before = previous_of(known.records, record)
        changes = changes_since(known.records, record)
        neighbours = Neighbours(
            before=_if_there(reports, before.report if before else ""), search=_beside(at) if search else ""
        )
        pages = {at: page, f"{latest or profile}.html": latest_page or page}
        if search:
            pages |= {_beside(at): search, f"{profile}{SEARCH}": search}
        for place_of, content in pages.items():
            write_state(reports / place_of, tied(content, place_of, neighbours, changes, run_facts(record)).encode())
        history = append_record(reports, known, record)
        oldest = _prune(place, history, record.profile)
        for page in {neighbours.before, oldest} - {"", at}:
            _relink(reports, history, page)
        write_state(reports / INDEX, render_history(history, _pages(reports, history)).encode())
    return ArchivedPage(reports / at, reports / f"{latest or profile}.html")


def run_facts(record: RunRecord) -> list[tuple[str, str]]:
    """What a page says of its run: when, where, how long, and of a release which and how it is made again."""
    moment = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(max(0.0, min(record.ended, 4e9))))
    where = f" on {record.machine}" if record.machine else ""
    facts = [("ended", f"{moment}, after {format_duration(record.seconds)}{where}")]
    if record.version:
        facts.append(("release", record.version))
    if record.location and record.flow == "sweep" and record.status == "passed":  # A recipe: nothing was released.
        facts += [("recipe", record.location), ("to merge it", f"mergegate merge {shlex.quote(record.location)} OUT")]
    elif record.location:
        facts.append(("published to" if record.status == "released" else "published at", record.location))
        facts.append(("to reproduce", f"mergegate reproduce {shlex.quote(record.location)}"))
    if record.seen_at:
        facts.append(("Prefect", record.seen_at))
    elif record.run:
        facts.append(("Prefect run", record.run))
    return facts


def file_name(profile: str) -> str:
    """The profile's name as that of a file: a stranger may have chosen it, and the index has its own."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", profile)[:120].strip(".") or "unnamed"
    return f"{name}-" if name.lower() == INDEX.removesuffix(".html") else name


def _beside(page: str) -> str:
    return f"{page.removesuffix('.html')}{SEARCH}"


def _free_name(place: Path, record: RunRecord) -> str:
    moment = time.strftime("%Y-%m-%dT%H%M%SZ", time.gmtime(max(0.0, min(record.ended, 4e9))))
    stem = f"{moment}-{file_name(record.status)}"
    number, name = 1, f"{stem}.html"
    while (place / name).exists():  # the same second, or a clock that was put back
        number += 1
        name = f"{stem}-{number}.html"
    return name


def _if_there(reports: Path, page: str) -> str:
    """A link leads nowhere out of the directory of reports, and to a page that is still kept."""
    inside = re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9._-]*/[A-Za-z0-9_-][A-Za-z0-9._-]*\.html", page)
    return page if inside and (reports / page).is_file() else ""


def _pages(reports: Path, history: History) -> frozenset[str]:
    """The pages of the history that are still kept."""
    return frozenset(page for one in history.records if (page := _if_there(reports, one.report)))


def _relink(reports: Path, history: History, page: str) -> None:
    """Give a page that is kept, and that of its search, the neighbours that it has now."""
    itself = next((one for one in reversed(history.records) if one.report == page), None)
    if itself is None:
        return
    nights = history.of(itself.profile, itself.flow)
    at = nights.index(itself)
    before, after = (
        _if_there(reports, one[0].report) if one else "" for one in (nights[at - 1 : at], nights[at + 1 : at + 2])
    )
    around = Neighbours(before, after, _if_there(reports, _beside(page)))
    for place in filter(None, (page, around.search)):
        found = read_state(reports / place, bytes.decode, most=_LARGEST)
        if isinstance(found, str):
            write_state(reports / place, relinked(found, place, around).encode())


def _prune(place: Path, history: History, profile: str) -> str:
    """The newest pages stay, by the order of the history; those that it does not know go first.

    Returns:
        The oldest that stays, whose predecessor may have gone.
    """
    order = {one.report: number for number, one in enumerate(history.records) if one.profile == profile}
    pages = [page for page in place.glob("*.html") if page.is_file() or page.is_symlink()]
    pages = [page for page in pages if not page.name.endswith(SEARCH)]
    pages.sort(key=lambda page: (order.get(f"{place.name}/{page.name}", -1), page.name))
    for page in pages[:-MOST_PAGES]:
        with suppress(OSError):  # somebody else's, in a directory that is shared
            page.with_name(_beside(page.name)).unlink(missing_ok=True)
            page.unlink()
    return f"{place.name}/{pages[-MOST_PAGES:][0].name}"

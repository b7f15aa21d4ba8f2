"""``history.jsonl``: a line for each run of this project, appended at its end; bounded, and believed line by line.

Unlike a journal of unfinished work, a line stands for itself: one that is torn, altered or foreign is left out, those
around it are believed. Whoever appends next mends the file: what it was is set aside, what is whole stays.

The order of runs is the order of lines. A clock that is put back, or two machines that disagree, change nothing.
"""

from __future__ import annotations

import logging
import os
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mergegate.merge_core.files import Damaged, locked, move_aside, read_state, write_state
from mergegate.tasks.report.history.record import RunRecord, parse_record

HISTORY, LOCK = "history.jsonl", "history.lock"
# Of each profile and flow: more than a year of nights. And of all: a directory that hundreds of profiles share.
MOST_OF_ONE, MOST_OF_ALL = 400, 2000
# How many more lines there may be before the file is written anew.
_SLACK = 100
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class History:
    """What is known of past runs.

    Args:
        records: In the order in which they ended.
        damaged: Lines that cannot be believed; all of them where the file itself cannot be read.
        why: Of a file that cannot be read at all.
    """

    records: tuple[RunRecord, ...] = ()
    damaged: int = 0
    why: str = ""

    def of(self, profile: str, flow: str) -> tuple[RunRecord, ...]:
        """The runs of one profile by one flow."""
        return tuple(one for one in self.records if (one.profile, one.flow) == (profile, flow))

    def said_of_damage(self) -> str:
        """A sentence for a person; empty where all is whole."""
        if self.why:
            return f"The history cannot be read: {self.why}."
        if not self.damaged:
            return ""
        return f"{self.damaged} damaged line{'' if self.damaged == 1 else 's'} of the history left out."


def read_history(reports: Path) -> History:
    """What stands in the history below the directory of reports. Never an error: what cannot be read is said."""
    try:
        found = read_state(reports / HISTORY, _parsed)
    except OSError as error:
        return History(damaged=1, why=error.strerror or str(error))
    if isinstance(found, Damaged):
        return History(damaged=1, why=found.why)
    return found or History()


def append_record(reports: Path, known: History, record: RunRecord) -> History:
    """Add a line. To be called by one at a time, with what was read under the same lock.

    Raises:
        OSError: when it cannot be written.
    """
    file = reports / HISTORY
    after = History((*known.records, record))
    kept = _newest(after.records)
    if known.damaged:
        _set_aside(file, known)
    if known.damaged or len(kept) + _SLACK < len(after.records):
        _write_anew(file, kept)
        return History(kept)
    descriptor = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    try:
        # A line that a power cut has torn must not swallow this one; an empty line is none.
        os.write(descriptor, b"\n" * (os.fstat(descriptor).st_size > 0) + record.line() + b"\n")
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return after


def mend_history(reports: Path) -> None:
    """Set the history aside where it is damaged, and keep the lines of it that are whole.

    Raises:
        OSError: when it cannot be written.
    """
    with locked(reports / LOCK, required=False):
        known = read_history(reports)
        if known.damaged:
            _set_aside(reports / HISTORY, known)
            _write_anew(reports / HISTORY, known.records)


def _set_aside(file: Path, known: History) -> None:
    place = move_aside(file)
    _log.warning("%s %s", known.said_of_damage(), f"It is kept as {place.name}" if place else "")


def _write_anew(file: Path, records: Sequence[RunRecord]) -> None:
    write_state(file, b"".join(one.line() + b"\n" for one in records))


def _newest(records: Sequence[RunRecord]) -> tuple[RunRecord, ...]:
    seen: dict[tuple[str, str], int] = defaultdict(int)
    kept: list[RunRecord] = []
    for one in reversed(records):
        seen[one.profile, one.flow] += 1
        if seen[one.profile, one.flow] <= MOST_OF_ONE and len(kept) < MOST_OF_ALL:
            kept.append(one)
    return tuple(reversed(kept))


def _parsed(content: bytes) -> History:
    records, damaged = [], 0
    for line in content.split(b"\n"):
        if not line:
            continue
        try:
            records.append(parse_record(line))
        except (ValueError, TypeError, RecursionError):
            damaged += 1
    return History(tuple(records), damaged)

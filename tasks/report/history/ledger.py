"""Read and append ``history.jsonl``, which has one line per run of the project.

The number of lines is bounded. Each line is validated on its own. Readers skip a line that is torn, altered or foreign.
The next run that appends a line sets the damaged file aside and keeps the valid lines.

The order of runs is the order of lines, so it does not depend on clocks.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mergegate.merge_core.files import Damaged, hold_lock, move_aside, read_state, write_state
from mergegate.tasks.report.history.record import RunRecord, parse_record

HISTORY, LOCK = "history.jsonl", "history.lock"
# Runs per profile and flow: more than a year of nightly runs. Runs in total: enough for a directory that hundreds of
# profiles share.
MAX_PER_PROFILE, MAX_TOTAL = 400, 2000
# Number of surplus lines that are tolerated before the file is rewritten.
_SLACK = 100
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class History:
    """Past runs of a project.

    Args:
        records: Runs in the order in which they ended.
        damaged: Number of lines that failed validation. 1 if the file itself cannot be read.
        why: Reason why the file cannot be read, or an empty string.
    """

    records: tuple[RunRecord, ...] = ()
    damaged: int = 0
    why: str = ""

    def runs_of(self, profile: str, flow: str) -> tuple[RunRecord, ...]:
        """Return the runs of a flow with a profile."""
        return tuple(record for record in self.records if (record.profile, record.flow) == (profile, flow))

    def damage_sentence(self) -> str:
        """Return a sentence that describes the damage, or an empty string if the history is intact."""
        if self.why:
            return f"The history cannot be read: {self.why}."
        if not self.damaged:
            return ""
        return f"{self.damaged} damaged line{'' if self.damaged == 1 else 's'} of the history left out."


def read_history(reports: Path) -> History:
    """Return the history in the directory of reports. It never raises: the result describes what cannot be read."""
    try:
        history = read_state(reports / HISTORY, _parse)
    except OSError as error:
        return History(damaged=1, why=error.strerror or str(error))
    if isinstance(history, Damaged):
        return History(damaged=1, why=history.reason)
    return history or History()


def append_record(reports: Path, history: History, record: RunRecord) -> History:
    """Append a line to the history. The caller must hold the lock and must have read ``history`` under it.

    Raises:
        OSError: The history cannot be written.
    """
    path = reports / HISTORY
    after = History((*history.records, record))
    counts: Counter[tuple[str, str]] = Counter()
    newest_first: list[RunRecord] = []
    for item in reversed(after.records):
        counts[item.profile, item.flow] += 1
        if counts[item.profile, item.flow] <= MAX_PER_PROFILE and len(newest_first) < MAX_TOTAL:
            newest_first.append(item)
    newest = tuple(reversed(newest_first))
    if history.damaged:
        _set_aside(path, history)
    if history.damaged or len(newest) + _SLACK < len(after.records):
        _rewrite(path, newest)
        return History(newest)
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    try:
        # A line that was torn by a power failure must not swallow this one. Readers skip empty lines.
        os.write(descriptor, b"\n" * (os.fstat(descriptor).st_size > 0) + record.line() + b"\n")
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return after


def mend_history(reports: Path) -> None:
    """Set a damaged history aside, and keep its valid lines.

    Raises:
        OSError: The history cannot be written.
    """
    with hold_lock(reports / LOCK, required=False):
        history = read_history(reports)
        if history.damaged:
            _set_aside(reports / HISTORY, history)
            _rewrite(reports / HISTORY, history.records)


def _set_aside(path: Path, history: History) -> None:
    backup = move_aside(path)
    _log.warning("%s %s", history.damage_sentence(), f"The damaged file is {backup.name}." if backup else "")


def _rewrite(path: Path, records: Sequence[RunRecord]) -> None:
    write_state(path, b"".join(record.line() + b"\n" for record in records))


def _parse(content: bytes) -> History:
    records, damaged = [], 0
    for line in content.split(b"\n"):
        if not line:
            continue
        try:
            records.append(parse_record(line))
        except (ValueError, TypeError, RecursionError):
            damaged += 1
    return History(tuple(records), damaged)

"""A journal of what a stage has computed so far, so that a killed one goes on where it was.

It lies in the directory in which the artifact is made, under the name ``JOURNAL``, and goes when that is sealed::

    with open_journal(JournalPlace(out / JOURNAL, key)) as journal:
        for value in journal.records:          # of the run that was killed: whole, in order
            ...
        journal.append(value)                  # one piece of work is done

A line is a digest and the record as JSON. Each digest covers the key and every record up to its own, so what a crash
left half written, blocks of another file, and the journal of other inputs end the belief at the line where they begin;
the file is cut there.

After ``kill -9`` all that was appended is there. It is flushed to the disk every few seconds, so that after a crash of
the machine at most those are lost.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from merge_core.store.locks import lock_file

JOURNAL = "unfinished.journal"

# To be raised whenever a stage keeps something else than before: what an older program left is not continued.
_FORMAT = 1
_FLUSH_EVERY = 5.0  # seconds
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class JournalPlace:
    """Where the unfinished work of one stage call is kept.

    Args:
        path: Of the file; it is made with the first record.
        key: Of everything that decides the records. A journal under another one is not continued.
    """

    path: Path
    key: str


class RecordJournal:
    """A journal that is open.

    Args:
        place: None: nothing is kept.
    """

    def __init__(self, place: JournalPlace | None) -> None:
        self._place, self._fd = place, -1
        self._digest = hashlib.sha256(f"{_FORMAT} {place.key if place else ''}".encode())
        self._flushed = time.monotonic()
        self.records: tuple[Any, ...] = ()
        if place is not None and place.path.exists():
            self._open(place.path)
            self.records = tuple(self._whole_records())

    def append(self, record: object) -> None:
        """Keep ``record``, of what JSON knows (floats are kept exactly). A disk that is full ends the journal, not the
        stage."""
        if self._place is None:
            return
        body = json.dumps(record, separators=(",", ":")).encode()
        try:
            if self._fd < 0:
                self._open(self._place.path)
            self._digest.update(body)
            line = self._digest.hexdigest().encode() + b" " + body + b"\n"
            if os.write(self._fd, line) < len(line):
                raise OSError("the disk is full")
            if time.monotonic() - self._flushed >= _FLUSH_EVERY:
                os.fdatasync(self._fd)
                self._flushed = time.monotonic()
        except OSError as error:
            _log.warning("%s: %s; a run that is killed now starts again here", self._place.path, error)
            self.close()
            self._place = None

    def close(self) -> None:
        """Let another process have it."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _open(self, path: Path) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        # The process of a killed run may have a moment left to live.
        lock_file(self._fd, path, required=False)

    def _whole_records(self) -> Iterator[Any]:
        content = _content(self._fd)
        end = 0
        for line in content.splitlines(keepends=True):
            claimed, _, body = line.rstrip(b"\n").partition(b" ")
            seen = self._digest.copy()
            seen.update(body)
            if not line.endswith(b"\n") or claimed != seen.hexdigest().encode():
                _log.warning("a journal is not believed from byte %d of %d on", end, len(content))
                break
            self._digest = seen
            end += len(line)
            yield json.loads(body)
        os.ftruncate(self._fd, end)


@contextmanager
def open_journal(place: JournalPlace | None) -> Iterator[RecordJournal]:
    """The journal at ``place``, for this process alone; for None one that keeps nothing."""
    journal = RecordJournal(place)
    try:
        yield journal
    finally:
        journal.close()


def _content(descriptor: int) -> bytes:
    with os.fdopen(os.dup(descriptor), "rb") as file:
        file.seek(0)
        return file.read()

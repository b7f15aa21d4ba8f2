"""Record what a stage has computed in a journal, so that a killed stage can resume.

The journal is the file ``JOURNAL`` in the directory of the unfinished artifact. It is removed when the artifact is
complete::

    with open_journal(JournalLocation(out / JOURNAL, key)) as journal:
        for value in journal.records:          # complete records of the killed run, in order
            ...
        journal.append(value)                  # one more unit of work is done

Each line contains a digest and a record as JSON. The digest covers the key and all records up to this one. Reading
stops at the first line whose digest does not match, because a crash left it incomplete, the disk damaged it, or the
journal belongs to other inputs. The file is truncated there.

All appended records survive ``kill -9``. The journal is flushed to the disk every five seconds, so a crash of the
machine loses only the records of the last few seconds.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from mergegate.merge_core.files.locks import lock_file
from mergegate.merge_core.files.state import is_misplaced, remove_any, remove_damaged
from mergegate.merge_core.system import flush_data

JOURNAL = "unfinished.journal"

# Increase this number whenever the records of a stage change. Journals of an older format are not resumed.
_FORMAT = 1
_FLUSH_EVERY = 5.0  # Seconds.
# Bytes. Bounds the memory for a damaged file without line breaks.
_LONGEST_LINE = 256 << 20
_log = logging.getLogger(__name__)


opened_journals: dict[Path, int] = {}
"""Descriptors of journals, by path, that another process has opened for this one, which may not write there."""


@dataclass(frozen=True)
class JournalLocation:
    """Location of a stage's journal.

    Args:
        path: Path of the file, which is created with the first record.
        key: Hash of everything that determines the records. A journal with another key is not resumed.
    """

    path: Path
    key: str


class LineChain:
    """Writer and reader of lines, each of which begins with a digest of ``seed`` and all bodies up to its own.

    Lines that were written with another seed do not verify.
    """

    def __init__(self, seed: str) -> None:
        self._digest = hashlib.sha256(seed.encode())

    def append(self, descriptor: int, body: bytes) -> None:
        """Write ``body``, which must not contain line breaks, as the next line. Raise OSError if the disk is full."""
        self._digest.update(body)
        line = self._digest.hexdigest().encode() + b" " + body + b"\n"
        if os.write(descriptor, line) < len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def read_verified(self, file: BinaryIO, fits: Callable[[Any], bool]) -> Iterator[tuple[Any, int]]:
        """Yield the JSON value of each line of ``file``, and the offset after the line.

        Stop at the first line whose digest does not match, or for whose value ``fits`` returns false.
        """
        end = 0
        while content := file.readline(_LONGEST_LINE):
            recorded, _, body = content.rstrip(b"\n").partition(b" ")
            computed = self._digest.copy()
            computed.update(body)
            if not content.endswith(b"\n") or recorded != computed.hexdigest().encode():
                return
            try:
                value = json.loads(body)
            except (ValueError, RecursionError):
                return
            if not fits(value):
                return
            self._digest = computed
            end += len(content)
            yield value, end


class RecordJournal:
    """Open journal. ``records`` are the records of the killed run, in order.

    Args:
        location: Location of the journal, or None to store no records.
        fits: Function that returns whether a record has the expected form. Records of an older version may not.
    """

    def __init__(self, location: JournalLocation | None, fits: Callable[[Any], bool] = lambda record: True) -> None:
        self._location, self._fd = location, -1
        self._lines = LineChain(f"{_FORMAT} {location.key if location else ''}")
        self._flushed = time.monotonic()
        self.records: tuple[Any, ...] = ()
        if location is not None and os.path.lexists(location.path):
            try:
                self._open(location.path)
                with os.fdopen(os.dup(self._fd), "rb") as file:
                    file.seek(0)
                    complete = list(self._lines.read_verified(file, fits))
                self.records = tuple(record for record, _ in complete)
                end = complete[-1][1] if complete else 0
                if end < (size := os.fstat(self._fd).st_size):
                    _log.warning("%s: ignoring the bytes from %d to %d, which are damaged", location.path, end, size)
                    os.ftruncate(self._fd, end)
            except OSError as error:
                self._give_up(error)

    def append(self, record: object) -> None:
        """Append a record of JSON types. Floats are stored exactly.

        If this fails, for example because the disk is full, log a warning and store no more records.
        """
        if self._location is None:
            return
        body = json.dumps(record, separators=(",", ":")).encode()
        try:
            if self._fd < 0:
                self._open(self._location.path)
            self._lines.append(self._fd, body)
            if time.monotonic() - self._flushed >= _FLUSH_EVERY:
                flush_data(self._fd)
                self._flushed = time.monotonic()
        except OSError as error:
            self._give_up(error)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _give_up(self, error: OSError) -> None:
        _log.warning(
            "%s: %s; if this run is killed, the stage starts again", self._location and self._location.path, error
        )
        self.close()
        self._location = None

    def _open(self, path: Path) -> None:
        self._fd = opened_journals.pop(path, -1)
        if self._fd < 0:
            self._fd = open_journal_file(path)
        # The process of a killed run may still be alive for a moment.
        lock_file(self._fd, path, required=False)


def open_journal_file(path: Path) -> int:
    """Open the file of a journal, create it if necessary, and return its descriptor. May raise OSError."""
    if is_misplaced(path):
        remove_damaged(path, "not a journal")
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)


@contextmanager
def open_journal(
    location: JournalLocation | None, fits: Callable[[Any], bool] = lambda record: True
) -> Iterator[RecordJournal]:
    """Open the journal at ``location`` and lock it until the end of the block (see :class:`RecordJournal`)."""
    journal = RecordJournal(location, fits)
    try:
        yield journal
    finally:
        journal.close()


def keep_only_journal(out: Path) -> None:
    """Remove everything from ``out`` except the journal. Files of a killed run would become part of the artifact."""
    for path in out.iterdir():
        if path.name != JOURNAL:
            remove_any(path)

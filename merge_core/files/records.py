"""Keep a journal of what a stage has computed, so that a killed stage can resume.

The journal is in the directory of the unfinished artifact, under the name ``JOURNAL``, and is removed when the artifact
is complete::

    with open_journal(JournalLocation(out / JOURNAL, key)) as journal:
        for value in journal.records:          # complete records of the killed run, in order
            ...
        journal.append(value)                  # one more unit of work is done

Each line holds a digest and the record as JSON. The digest covers the key and all records up to and including its own.
Reading stops at the first line whose digest does not match: a line that a crash left incomplete, blocks of another
file, or a journal of other inputs. The file is truncated there.

All appended records survive ``kill -9``. The journal is flushed to the disk every few seconds, so a crash of the
machine loses at most the records of the last few seconds.
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
from mergegate.merge_core.files.state import is_misplaced, remove_any, set_aside_damaged
from mergegate.merge_core.system import flush_data

JOURNAL = "unfinished.journal"

# Increase this number whenever the records of a stage change. Journals of an older format are not resumed.
_FORMAT = 1
_FLUSH_EVERY = 5.0  # Seconds.
# Bytes. Bounds the memory for a damaged file without line breaks.
_LONGEST_LINE = 256 << 20
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class JournalLocation:
    """Location of the journal of one stage call.

    Args:
        path: Path of the file, created with the first record.
        key: Key of everything that determines the records. A journal with another key is not resumed.
    """

    path: Path
    key: str


class LineChain:
    """Chain of lines. Each line begins with a digest of the seed and of every body up to its own.

    Args:
        seed: Identity of the chain. Lines that were written with another seed do not verify.
    """

    def __init__(self, seed: str) -> None:
        self._digest = hashlib.sha256(seed.encode())

    def line(self, body: bytes) -> bytes:
        """Return the next line of the chain for a body without line breaks."""
        self._digest.update(body)
        return self._digest.hexdigest().encode() + b" " + body + b"\n"

    def read_verified(self, file: BinaryIO, fits: Callable[[Any], bool]) -> Iterator[tuple[Any, int]]:
        """Yield the values at the beginning of ``file`` as long as the chain verifies, each with its end offset.

        Args:
            file: File, positioned at its beginning.
            fits: Returns whether a value has the expected form. Reading stops at the first value that does not.
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
    """Open journal.

    Args:
        location: Location of the journal. None disables it: no record is stored.
        fits: Returns whether a record has the expected form. Records of an older version may not have it.
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

        If the disk is full, the journal ends with a warning and the stage continues without it.
        """
        if self._location is None:
            return
        body = json.dumps(record, separators=(",", ":")).encode()
        try:
            if self._fd < 0:
                self._open(self._location.path)
            line = self._lines.line(body)
            if os.write(self._fd, line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            if time.monotonic() - self._flushed >= _FLUSH_EVERY:
                flush_data(self._fd)
                self._flushed = time.monotonic()
        except OSError as error:
            self._give_up(error)

    def close(self) -> None:
        """Close the file and release its lock."""
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
        if is_misplaced(path):
            set_aside_damaged(path, "not a journal")
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        # The process of a killed run may still be alive for a moment.
        lock_file(self._fd, path, required=False)


@contextmanager
def open_journal(
    location: JournalLocation | None, fits: Callable[[Any], bool] = lambda record: True
) -> Iterator[RecordJournal]:
    """Open the journal at ``location`` for this process alone. If ``location`` is None, the journal stores nothing.

    See :class:`RecordJournal`.
    """
    journal = RecordJournal(location, fits)
    try:
        yield journal
    finally:
        journal.close()


def keep_only_journal(out: Path, pattern: str = "") -> None:
    """Remove everything from ``out`` except the journal and the files that it refers to.

    Other leftovers of a killed run are not part of the artifact, and would be sealed with it.
    """
    for path in out.iterdir():
        if path.name != JOURNAL and not (pattern and path.match(pattern) and path.is_file() and not path.is_symlink()):
            remove_any(path)

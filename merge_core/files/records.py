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

# To be raised whenever a stage keeps something else than before: what an older program left is not continued.
_FORMAT = 1
_FLUSH_EVERY = 5.0  # seconds
# In bytes; garbage need not have line breaks.
_LONGEST_LINE = 256 << 20
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


class LineChain:
    """Lines that vouch for each other: each begins with a digest of the seed and of every body up to its own.

    Args:
        seed: What they belong to. Lines under another one do not fit.
    """

    def __init__(self, seed: str) -> None:
        self._digest = hashlib.sha256(seed.encode())

    def line(self, body: bytes) -> bytes:
        """The next line, of a body without line breaks."""
        self._digest.update(body)
        return self._digest.hexdigest().encode() + b" " + body + b"\n"

    def whole(self, file: BinaryIO, fits: Callable[[Any], bool]) -> Iterator[tuple[Any, int]]:
        """Values from the beginning of ``file``, as far as lines vouch for each other; with the byte after each.

        Args:
            file: At its beginning.
            fits: Whether a value is of the kind that is kept; the first that is not ends the belief, too.
        """
        end = 0
        while content := file.readline(_LONGEST_LINE):
            claimed, _, body = content.rstrip(b"\n").partition(b" ")
            seen = self._digest.copy()
            seen.update(body)
            if not content.endswith(b"\n") or claimed != seen.hexdigest().encode():
                return
            try:
                value = json.loads(body)
            except (ValueError, RecursionError):
                return
            if not fits(value):
                return
            self._digest = seen
            end += len(content)
            yield value, end


class RecordJournal:
    """A journal that is open.

    Args:
        place: None: nothing is kept.
        fits: Whether a record is of the kind that is kept here; what an older program kept may not be.
    """

    def __init__(self, place: JournalPlace | None, fits: Callable[[Any], bool] = lambda record: True) -> None:
        self._place, self._fd = place, -1
        self._lines = LineChain(f"{_FORMAT} {place.key if place else ''}")
        self._flushed = time.monotonic()
        self.records: tuple[Any, ...] = ()
        if place is not None and os.path.lexists(place.path):
            try:
                self._open(place.path)
                self.records = tuple(self._whole_records(fits))
            except OSError as error:
                self._give_up(error)

    def append(self, record: object) -> None:
        """Keep ``record``, of what JSON knows (floats are kept exactly). A disk that is full ends the journal, not the
        stage."""
        if self._place is None:
            return
        body = json.dumps(record, separators=(",", ":")).encode()
        try:
            if self._fd < 0:
                self._open(self._place.path)
            line = self._lines.line(body)
            if os.write(self._fd, line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            if time.monotonic() - self._flushed >= _FLUSH_EVERY:
                flush_data(self._fd)
                self._flushed = time.monotonic()
        except OSError as error:
            self._give_up(error)

    def close(self) -> None:
        """Let another process have it."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _give_up(self, error: OSError) -> None:
        _log.warning("%s: %s; a run that is killed now starts again here", self._place and self._place.path, error)
        self.close()
        self._place = None

    def _open(self, path: Path) -> None:
        if is_misplaced(path):
            set_aside_damaged(path, "no journal")
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        # The process of a killed run may have a moment left to live.
        lock_file(self._fd, path, required=False)

    def _whole_records(self, fits: Callable[[Any], bool]) -> Iterator[Any]:
        end = 0
        with os.fdopen(os.dup(self._fd), "rb") as file:
            file.seek(0)
            for record, end in self._lines.whole(file, fits):  # noqa: B007  # where the last one ends
                yield record
        if end < (size := os.fstat(self._fd).st_size):
            _log.warning("a journal is not believed from byte %d of %d on", end, size)
            os.ftruncate(self._fd, end)


@contextmanager
def open_journal(
    place: JournalPlace | None, fits: Callable[[Any], bool] = lambda record: True
) -> Iterator[RecordJournal]:
    """The journal at ``place``, for this process alone; for None one that keeps nothing. See :class:`RecordJournal`."""
    journal = RecordJournal(place, fits)
    try:
        yield journal
    finally:
        journal.close()


def keep_only_journal(out: Path, beside: str = "") -> None:
    """Empty ``out``, but for a journal that the stage which works there goes on from, and files ``beside`` it (a
    pattern) of which it speaks: anything else in it is no part of what is made, and would be sealed with it."""
    for path in out.iterdir():
        if path.name != JOURNAL and not (beside and path.match(beside) and path.is_file() and not path.is_symlink()):
            remove_any(path)

# stand-in of h-G
"""What was recorded of requests and answers."""

from __future__ import annotations

import pickle
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any, NamedTuple

from tasks.shadow.arms import ArmRow


class RecordedAnswer(NamedTuple):
    """What one arm answered."""

    status: int
    body: bytes
    first_byte: float | None
    seconds: float
    error: str


class RecordedPair(NamedTuple):
    """One request with the answers of both arms."""

    request_id: str
    session: str
    at: float
    path: str
    request: bytes
    parent: RecordedAnswer
    candidate: RecordedAnswer


class Records:
    """The database."""

    def __init__(self, file: str) -> None:
        self._file = file
        with closing(self._open()) as db, db:
            db.execute("create table if not exists rows (kind, id, candidate, at, value, primary key (kind, id))")

    def write(self, batch: Sequence[tuple[str, str, str, Any]]) -> None:
        """(kind, id, candidate, RecordedPair or ArmRow)"""
        with closing(self._open()) as db, db:
            rows = [(kind, key, candidate, one.at, pickle.dumps(one)) for kind, key, candidate, one in batch]
            db.executemany("insert or ignore into rows values (?, ?, ?, ?, ?)", rows)

    def pairs(self, candidate: str, since: float | None = None) -> Iterator[RecordedPair]:
        """In order of time."""
        yield from self._rows("pair", candidate, since)

    def arms(self, candidate: str, since: float | None = None) -> list[ArmRow]:
        """In order of time."""
        return list(self._rows("arm", candidate, since))

    def counts(self) -> Mapping[str, int]:
        """How many of each."""
        with closing(self._open()) as db:
            return dict(db.execute("select kind, count(*) from rows group by kind"))

    def purge(self, before: float) -> int:
        """Remove what is older."""
        with closing(self._open()) as db, db:
            return db.execute("delete from rows where at < ?", (before,)).rowcount

    def _open(self) -> sqlite3.Connection:
        return sqlite3.connect(self._file, timeout=5)

    def _rows(self, kind: str, candidate: str, since: float | None) -> Iterator[Any]:
        with closing(self._open()) as db:
            asked = "select value from rows where kind = ? and candidate = ? and at >= ? order by at, id"
            for (value,) in db.execute(asked, (kind, candidate, since or 0.0)):
                yield pickle.loads(value)


def open_records(url: str) -> Records:
    """The records at ``sqlite:///FILE``."""
    return Records(url.removeprefix("sqlite:///"))

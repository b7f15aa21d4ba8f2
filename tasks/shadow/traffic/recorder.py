"""The way of records into the database: a queue, and a thread that nobody waits for.

What does not fit into the queue, what the database does not take, and bodies that may not be kept are counted, and the
counts are kept when it is there again. Redaction happens in this thread: nothing leaves the process's memory before.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress

from sqlalchemy.exc import SQLAlchemyError

from mergegate.tasks.shadow.recorded_traffic import ShadowRecord
from mergegate.tasks.shadow.records import Records
from mergegate.tasks.shadow.traffic.redaction import Redaction

_log = logging.getLogger(__name__)
_BATCH = 500
_MOST_BYTES = 256 << 20  # of bodies that wait
_ATTEMPTS, _FIRST_WAIT_S = 3, 0.2
_PURGE_EVERY_S = 3600.0
_TALLY_EVERY_S = 2.0
_DAY_S = 86400.0


class Recorder:
    """Keeps records. ``put`` and ``count`` return at once, whatever the database does.

    Args:
        connect: Makes the connection; asked again after it failed.
        redaction: What is taken out of bodies.
        most: Records that may wait.
        body_limit: Bytes; of a longer body nothing is kept.
        keep_days: After which records go.
    """

    def __init__(
        self, connect: Callable[[], Records], redaction: Redaction, *, most: int, body_limit: int, keep_days: float
    ) -> None:
        self._connect, self._redaction = connect, redaction
        self._body_limit, self._keep_s = body_limit, keep_days * _DAY_S
        self._waiting: queue.Queue[ShadowRecord | None] = queue.Queue(most)  # None wakes the thread
        self._bytes = 0
        self._records: Records | None = None
        self._purged = self._told = 0.0
        self._lock = threading.Lock()
        self._all, self._new = Counter[str](), Counter[tuple[str, str]]()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="shadow records", daemon=True)
        self._thread.start()

    def put(self, record: ShadowRecord) -> None:
        """Keep ``record``, or count that it is not kept."""
        size = len(record.request) + len(record.response)
        with self._lock:
            fits = self._bytes + size <= _MOST_BYTES
            self._bytes += size if fits else 0
        if fits:
            try:
                self._waiting.put_nowait(record)
                return
            except queue.Full:
                with self._lock:
                    self._bytes -= size
        self.count(record.candidate, "not recorded: queue full")

    def count(self, candidate: str, what: str, more: int = 1) -> None:
        """Add to a count that the database keeps, too."""
        with self._lock:
            self._all[what] += more
            self._new[candidate, what] += more

    def counts(self) -> dict[str, int]:
        """What was counted since this process began, and how many records wait."""
        with self._lock:
            return {**self._all, "waiting for the database": self._waiting.qsize()}

    def close(self, within: float = 10.0) -> None:
        """Write what waits, for so many seconds at most."""
        self._closing.set()
        with suppress(queue.Full):  # Then it is awake.
            self._waiting.put_nowait(None)
        self._thread.join(within)

    def _run(self) -> None:
        while True:
            batch = self._next()
            if batch or self._tallies_are_due():
                self._keep([self._keepable(one) for one in batch])
            if self._closing.is_set() and self._waiting.empty():
                self._keep([])
                if self._records:
                    self._records.close()
                return

    def _next(self) -> list[ShadowRecord]:
        found: list[ShadowRecord | None] = []
        with suppress(queue.Empty):
            found.append(self._waiting.get(timeout=_TALLY_EVERY_S / 4))
            while len(found) < _BATCH:
                found.append(self._waiting.get_nowait())
        batch = [one for one in found if one is not None]
        with self._lock:
            self._bytes -= sum(len(one.request) + len(one.response) for one in batch)
        return batch

    def _tallies_are_due(self) -> bool:
        return bool(self._new) and time.monotonic() - self._told >= _TALLY_EVERY_S

    def _keepable(self, record: ShadowRecord) -> ShadowRecord:
        """The record as it may be kept: a body that is too long or cannot be redacted is left out, and counted."""

        def body(content: bytes) -> bytes:
            if len(content) > self._body_limit:
                self.count(record.candidate, "body not kept: too long")
                return b""
            try:
                return self._redaction.body(content)
            except ValueError:
                self.count(record.candidate, "body not kept: cannot be redacted")
                return b""

        return record._replace(
            request=body(record.request),
            response=body(record.response),
            path=self._redaction.text(record.path)[:200],
            request_id=self._redaction.text(record.request_id)[:200],
        )

    def _keep(self, batch: Sequence[ShadowRecord]) -> None:
        with self._lock:
            tallies, self._new = self._new, Counter()
        for attempt in range(_ATTEMPTS):
            try:
                if self._records is None:
                    self._records = self._connect()
                self._records.write(batch, tallies)
                self._told = time.monotonic()
                with self._lock:
                    self._all["recorded"] += len(batch)
                self._purge()
                return
            except (SQLAlchemyError, OSError) as error:
                _log.warning("records: %s; attempt %d of %d", type(error).__name__, attempt + 1, _ATTEMPTS)
                self._disconnect()
                if attempt + 1 < _ATTEMPTS and self._closing.wait(_FIRST_WAIT_S * 2**attempt):
                    break  # One more attempt would keep somebody waiting who wants to end.
        with self._lock:
            self._new.update(tallies)
        self._told = time.monotonic()
        for one in batch:
            self.count(one.candidate, "not recorded: database")

    def _disconnect(self) -> None:
        if self._records is not None:
            with suppress(Exception):
                self._records.close()
        self._records = None

    def _purge(self) -> None:
        if self._records is not None and time.monotonic() - self._purged >= _PURGE_EVERY_S:
            self._records.purge(time.time() - self._keep_s)
            self._purged = time.monotonic()

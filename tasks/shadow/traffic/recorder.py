"""Write records to the database in a background thread, through a bounded queue.

The proxy never waits for the database. The recorder counts records that do not fit into the queue, records that the
database rejects, and bodies that must not be stored. It writes these counts when the database is available again.
Redaction runs in the same thread, so no content leaves the memory of the process before it is redacted.
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
from mergegate.tasks.shadow.settings import ShadowSettings
from mergegate.tasks.shadow.traffic.redaction import Redaction

_log = logging.getLogger(__name__)
_BATCH = 500
_MAX_QUEUE_BYTES = 256 << 20  # largest total size of the bodies in the queue
_ATTEMPTS, _FIRST_WAIT_S = 3, 0.2
_PURGE_INTERVAL_S = 3600.0
_TALLY_INTERVAL_S = 2.0
DAY_S = 86400.0


class Recorder:
    """Background writer of records. ``enqueue`` and ``count`` never wait for the database.

    Args:
        connect: Function that opens the database. It is called again after a failure.
        redaction: Redaction for bodies, paths and request IDs.
        settings: Limits on the queue, on stored bodies and on the age of records.
    """

    def __init__(self, connect: Callable[[], Records], redaction: Redaction, settings: ShadowSettings) -> None:
        self._connect, self._redaction = connect, redaction
        self._body_limit, self._keep_s = settings.max_body_bytes, settings.retention_days * DAY_S
        self._queue: queue.Queue[ShadowRecord | None] = queue.Queue(settings.record_queue)  # None wakes up the thread
        self._bytes = 0
        self._records: Records | None = None
        self._last_purge = self._tallies_written = 0.0
        self._lock = threading.Lock()
        self._totals, self._increments = Counter[str](), Counter[tuple[str, str]]()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="shadow records", daemon=True)
        self._thread.start()

    def enqueue(self, record: ShadowRecord) -> None:
        """Add a record to the queue. If the queue is full, count the record as not recorded."""
        size = len(record.request) + len(record.response)
        with self._lock:
            fits = self._bytes + size <= _MAX_QUEUE_BYTES
            self._bytes += size if fits else 0
        if fits:
            try:
                self._queue.put_nowait(record)
                return
            except queue.Full:
                with self._lock:
                    self._bytes -= size
        self.count(record.candidate, "not recorded: queue full")

    def count(self, candidate: str, name: str) -> None:
        """Increase a counter, which is also written to the database."""
        with self._lock:
            self._totals[name] += 1
            self._increments[candidate, name] += 1

    def counts(self) -> dict[str, int]:
        """Return the counters since the start of the process, and the number of records in the queue."""
        with self._lock:
            return {**self._totals, "waiting for the database": self._queue.qsize()}

    def close(self, timeout: float = 10.0) -> None:
        """Write the queued records and stop the thread, waiting at most ``timeout`` seconds."""
        self._closing.set()
        with suppress(queue.Full):  # With a full queue, the thread is already awake.
            self._queue.put_nowait(None)
        self._thread.join(timeout)

    def _run(self) -> None:
        while True:
            entries: list[ShadowRecord | None] = []
            with suppress(queue.Empty):
                entries.append(self._queue.get(timeout=_TALLY_INTERVAL_S / 4))
                while len(entries) < _BATCH:
                    entries.append(self._queue.get_nowait())
            batch = [record for record in entries if record is not None]
            with self._lock:
                self._bytes -= sum(len(record.request) + len(record.response) for record in batch)
            tallies_due = self._increments and time.monotonic() - self._tallies_written >= _TALLY_INTERVAL_S
            if batch or tallies_due:
                self._write([self._redact(record) for record in batch])
            if self._closing.is_set() and self._queue.empty():
                self._write([])
                if self._records:
                    self._records.close()
                return

    def _redact(self, record: ShadowRecord) -> ShadowRecord:
        """Return the redacted record. Bodies that are too long or cannot be redacted are removed and counted."""

        def redacted_body(content: bytes) -> bytes:
            if len(content) > self._body_limit:
                self.count(record.candidate, "body not kept: too long")
                return b""
            try:
                return self._redaction.body(content)
            except ValueError:
                self.count(record.candidate, "body not kept: cannot be redacted")
                return b""

        return record._replace(
            request=redacted_body(record.request),
            response=redacted_body(record.response),
            path=self._redaction.text(record.path)[:200],
            request_id=self._redaction.text(record.request_id)[:200],
        )

    def _write(self, batch: Sequence[ShadowRecord]) -> None:
        with self._lock:
            tallies, self._increments = self._increments, Counter()
        for attempt in range(_ATTEMPTS):
            try:
                if self._records is None:
                    self._records = self._connect()
                self._records.write(batch, tallies)
                self._tallies_written = time.monotonic()
                with self._lock:
                    self._totals["recorded"] += len(batch)
                if time.monotonic() - self._last_purge >= _PURGE_INTERVAL_S:
                    self._records.purge(time.time() - self._keep_s)
                    self._last_purge = time.monotonic()
                return
            except (SQLAlchemyError, OSError) as error:
                kind = type(error).__name__
                _log.warning("could not write shadow records: %s (attempt %d of %d)", kind, attempt + 1, _ATTEMPTS)
                if self._records is not None:
                    with suppress(Exception):
                        self._records.close()
                self._records = None
                if attempt + 1 < _ATTEMPTS and self._closing.wait(_FIRST_WAIT_S * 2**attempt):
                    break  # Another attempt would delay the shutdown.
        with self._lock:
            self._increments.update(tallies)
        self._tallies_written = time.monotonic()
        for record in batch:
            self.count(record.candidate, "not recorded: database")

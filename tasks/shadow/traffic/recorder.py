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
from mergegate.tasks.shadow.traffic.redaction import Redaction

_log = logging.getLogger(__name__)
_BATCH = 500
_MOST_BYTES = 256 << 20  # largest total size of the bodies in the queue
_ATTEMPTS, _FIRST_WAIT_S = 3, 0.2
_PURGE_EVERY_S = 3600.0
_TALLY_EVERY_S = 2.0
_DAY_S = 86400.0


class Recorder:
    """Background writer of records. ``put`` and ``count`` return immediately, regardless of the database.

    Args:
        connect: Function that opens the database. It is called again after a failure.
        redaction: Redaction of bodies, paths and request IDs.
        most: Largest number of records in the queue.
        max_body_bytes: Largest size of a stored body, in bytes. Longer bodies are not stored.
        retention_days: Days after which records are deleted.
    """

    def __init__(
        self,
        connect: Callable[[], Records],
        redaction: Redaction,
        *,
        most: int,
        max_body_bytes: int,
        retention_days: float,
    ) -> None:
        self._connect, self._redaction = connect, redaction
        self._body_limit, self._keep_s = max_body_bytes, retention_days * _DAY_S
        self._waiting: queue.Queue[ShadowRecord | None] = queue.Queue(most)  # None wakes up the thread
        self._bytes = 0
        self._records: Records | None = None
        self._purged = self._told = 0.0
        self._lock = threading.Lock()
        self._all, self._new = Counter[str](), Counter[tuple[str, str]]()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="shadow records", daemon=True)
        self._thread.start()

    def put(self, record: ShadowRecord) -> None:
        """Add a record to the queue, or count it as not recorded if the queue is full."""
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

    def count(self, candidate: str, name: str, more: int = 1) -> None:
        """Increase a count, which is also written to the database."""
        with self._lock:
            self._all[name] += more
            self._new[candidate, name] += more

    def counts(self) -> dict[str, int]:
        """Return the counts since the start of the process, and the number of records in the queue."""
        with self._lock:
            return {**self._all, "waiting for the database": self._waiting.qsize()}

    def close(self, within: float = 10.0) -> None:
        """Write the queued records and stop the thread, waiting at most ``within`` seconds."""
        self._closing.set()
        with suppress(queue.Full):  # With a full queue, the thread is already awake.
            self._waiting.put_nowait(None)
        self._thread.join(within)

    def _run(self) -> None:
        while True:
            batch = self._next_batch()
            if batch or self._tallies_are_due():
                self._write([self._redact(record) for record in batch])
            if self._closing.is_set() and self._waiting.empty():
                self._write([])
                if self._records:
                    self._records.close()
                return

    def _next_batch(self) -> list[ShadowRecord]:
        entries: list[ShadowRecord | None] = []
        with suppress(queue.Empty):
            entries.append(self._waiting.get(timeout=_TALLY_EVERY_S / 4))
            while len(entries) < _BATCH:
                entries.append(self._waiting.get_nowait())
        batch = [record for record in entries if record is not None]
        with self._lock:
            self._bytes -= sum(len(record.request) + len(record.response) for record in batch)
        return batch

    def _tallies_are_due(self) -> bool:
        return bool(self._new) and time.monotonic() - self._told >= _TALLY_EVERY_S

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
                    break  # Another attempt would delay the shutdown.
        with self._lock:
            self._new.update(tallies)
        self._told = time.monotonic()
        for record in batch:
            self.count(record.candidate, "not recorded: database")

    def _disconnect(self) -> None:
        if self._records is not None:
            with suppress(Exception):
                self._records.close()
        self._records = None

    def _purge(self) -> None:
        if self._records is not None and time.monotonic() - self._purged >= _PURGE_EVERY_S:
            self._records.purge(time.time() - self._keep_s)
            self._purged = time.monotonic()

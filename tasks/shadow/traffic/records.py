"""Redact requests and answers, and store them in SQLite or PostgreSQL in a background thread.

A row is one request at one arm. The user received an ``answer``; a ``copy`` was only recorded. All rows for one user
request share an ``exchange``: an answer and its copy (a pair to be judged), or a failure of the candidate and the
parent's answer that replaced it. An existing gateway may write these rows directly.
``dev/shadow-releases.md`` describes the columns.

The proxy never waits for the database: records go through a bounded queue. The recorder counts records that do not fit
into the queue, records that the database rejects, and bodies that must not be stored. It writes these counts when the
database is available again. Redaction runs in the same thread, so no content leaves the memory of the process before it
is redacted.

In JSON, a secret may contain escaped characters, and in a stream it may be split over many events. So mergegate
decodes the JSON, joins the pieces of each text in a stream, redacts the texts and encodes the result again. If a joined
text changes, its first piece receives the new text and its other pieces become empty.
"""

from __future__ import annotations

import importlib
import json
import logging
import queue
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeAlias

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import SQLAlchemyError

from mergegate.merge_core.errors import InvalidInput, pip_command
from mergegate.merge_core.files import hold_lock
from mergegate.tasks.shadow.arms import ArmRow, RecordedPair, ShadowRecord
from mergegate.tasks.shadow.settings import ShadowSettings

if TYPE_CHECKING:
    from types import TracebackType

_TIMEOUT_S = 5  # timeout for connections and for another writer's lock
_PAIRS_IN_MEMORY = 200

_TABLES = sa.MetaData()
RECORDS = sa.Table(
    "shadow_record",
    _TABLES,
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("exchange", sa.String(64), nullable=False),
    sa.Column("candidate", sa.String(200), nullable=False),
    sa.Column("role", sa.String(8), nullable=False),
    sa.Column("arm", sa.String(10), nullable=False),
    sa.Column("request_id", sa.String(200), nullable=False),
    sa.Column("session", sa.String(64), nullable=False),
    sa.Column("at", sa.Float, nullable=False),
    sa.Column("path", sa.String(200), nullable=False),
    sa.Column("request", sa.LargeBinary, nullable=False),
    sa.Column("status", sa.Integer, nullable=False),
    sa.Column("response", sa.LargeBinary, nullable=False),
    sa.Column("error", sa.String(200), nullable=False),
    sa.Column("fallback", sa.Boolean, nullable=False),
    sa.Column("first_byte", sa.Float),
    sa.Column("seconds", sa.Float, nullable=False),
    sa.Index("shadow_record_exchange", "exchange", "candidate", "role", "arm", unique=True),
    sa.Index("shadow_record_candidate", "candidate", "at"),
)
TALLIES = sa.Table(
    "shadow_tally",
    _TABLES,
    sa.Column("candidate", sa.String(200), primary_key=True),
    sa.Column("what", sa.String(60), primary_key=True),
    sa.Column("count", sa.BigInteger, nullable=False),
)
# The table in which Alembic stores the version of a schema, so that it can change the tables above later.
_VERSIONS = sa.Table(
    "shadow_version",
    _TABLES,
    sa.Column("version_num", sa.String(32), nullable=False),
    sa.PrimaryKeyConstraint("version_num", name="shadow_version_pkc"),
)
_VERSION = "0001"


class Records:
    """Open database of records. A context manager, for one thread at a time."""

    def __init__(self, engine: sa.Engine) -> None:
        self._engine = engine
        self._insert = sqlite.insert if engine.dialect.name == "sqlite" else postgresql.insert

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close()

    def write(self, batch: Sequence[ShadowRecord], tallies: Mapping[tuple[str, str], int] | None = None) -> None:
        """Add rows and counts in one transaction.

        Records that are already stored are skipped. ``tallies`` holds increments by candidate and name of the count.

        Raises:
            sqlalchemy.exc.SQLAlchemyError: The database rejected the transaction.
        """
        with self._engine.begin() as connection:
            if batch:  # A batch is repeated if its commit was not confirmed.
                connection.execute(
                    self._insert(RECORDS).on_conflict_do_nothing(), [record._asdict() for record in batch]
                )
            for (candidate, name), count in (tallies or {}).items():
                is_count = (TALLIES.c.candidate == candidate) & (TALLIES.c.what == name)
                updated = connection.execute(sa.update(TALLIES).where(is_count).values(count=TALLIES.c.count + count))
                if not updated.rowcount:
                    connection.execute(sa.insert(TALLIES), {"candidate": candidate, "what": name, "count": count})

    def pairs(self, candidate: str, since: float | None = None) -> Iterator[RecordedPair]:
        """Yield the requests since a Unix time with records at both arms, even failed ones, in order of time."""
        parent, copy = RECORDS.alias("parent"), RECORDS.alias("copy")
        query = (
            sa.select(*(arm.c[name] for arm in (parent, copy) for name in ShadowRecord._fields))
            .join(copy, (copy.c.exchange == parent.c.exchange) & (copy.c.candidate == parent.c.candidate))
            .where(parent.c.candidate == candidate, parent.c.arm == "parent", copy.c.arm == "candidate")
            .where(parent.c.role == "answer", copy.c.role == "copy", parent.c.at >= (since or 0.0))
            .order_by(parent.c.at, parent.c.id)
        )
        width = len(ShadowRecord._fields)
        with self._engine.connect() as connection:
            for row in connection.execution_options(yield_per=_PAIRS_IN_MEMORY).execute(query):
                yield RecordedPair(ShadowRecord(*row[:width]), ShadowRecord(*row[width:]))

    def arms(self, candidate: str, since: float | None = None) -> list[ArmRow]:
        """Return the outcome of every request at each arm, ordered by the start of the request."""
        columns = [RECORDS.c[name] for name in ArmRow._fields]
        query = sa.select(*columns).where(RECORDS.c.candidate == candidate, RECORDS.c.at >= (since or 0.0))
        with self._engine.connect() as connection:
            return [ArmRow(*row) for row in connection.execute(query.order_by(RECORDS.c.at, RECORDS.c.id))]

    def counts(self, candidate: str) -> Mapping[str, int]:
        """Return the counters for a candidate's traffic: ``requests``, ``copies left out``, ``not recorded``, etc."""
        query = sa.select(TALLIES.c.what, TALLIES.c.count).where(TALLIES.c.candidate == candidate)
        with self._engine.connect() as connection:
            return {row[0]: row[1] for row in connection.execute(query.order_by(TALLIES.c.what))}

    def purge(self, before: float) -> int:
        """Delete the records of requests before a Unix time, and return their number."""
        with self._engine.begin() as connection:
            return connection.execute(sa.delete(RECORDS).where(RECORDS.c.at < before)).rowcount

    def close(self) -> None:
        self._engine.dispose()


def open_records(url: str) -> Records:
    """Open the records at a database URL. Create the tables if necessary.

    A SQLite file is in WAL mode, so that readers and the proxy can work concurrently.

    Raises:
        InvalidInput: The driver for the URL is not installed, or the tables are of another version of mergegate.
        sqlalchemy.exc.SQLAlchemyError: The database is not available or its schema cannot be changed.
    """
    scheme, rest = url.split("://", 1)
    if scheme == "postgresql":
        try:
            importlib.import_module("psycopg")
        except ImportError:
            raise InvalidInput(
                "shadow.records",
                found="a PostgreSQL address, but its driver psycopg is not installed",
                remedy=pip_command("mergegate[postgresql]"),
            ) from None
        url = f"postgresql+psycopg://{rest}"
    timeout = "timeout" if scheme.startswith("sqlite") else "connect_timeout"
    engine = sa.create_engine(url, connect_args={timeout: _TIMEOUT_S}, pool_pre_ping=True, hide_parameters=True)
    is_sqlite = engine.dialect.name == "sqlite"
    try:
        if is_sqlite:
            path = Path(engine.url.database or "")
            path.parent.mkdir(parents=True, exist_ok=True)
            sa.event.listen(engine, "connect", lambda connection, _: connection.execute("pragma synchronous=normal"))
            # If two connections switch the mode simultaneously, SQLite refuses one of them without waiting, to avoid a
            # deadlock (https://www.sqlite.org/c3ref/busy_handler.html). A lock file therefore serializes them.
            lock = path.with_name(path.name + ".lock")
            with hold_lock(lock, remove=True, required=False), engine.connect() as connection:
                connection.exec_driver_sql("pragma journal_mode=wal")
        with engine.begin() as connection:
            if is_sqlite:
                connection.exec_driver_sql("begin immediate")  # A concurrent process waits here.
            else:
                connection.execute(sa.text("select pg_advisory_xact_lock(hashtext('mergegate shadow'))"))
            _create_tables(connection)
    except BaseException:
        engine.dispose()
        raise
    return Records(engine)


def _create_tables(connection: sa.Connection) -> None:
    _VERSIONS.create(connection, checkfirst=True)
    versions = connection.execute(sa.select(_VERSIONS.c.version_num)).scalars().all()
    if not versions:
        _TABLES.create_all(connection)
        connection.execute(sa.insert(_VERSIONS), {"version_num": _VERSION})
    elif versions != [_VERSION]:
        raise InvalidInput(
            "shadow.records",
            found=f"tables of version {', '.join(versions)}",
            expected=f"version {_VERSION}",
            remedy="use the version of mergegate that created them, or another database",
        )


MARK = "[redacted]"
_EVENT = b"data:"
_TextPath: TypeAlias = tuple[str, ...]  # path of a text in a JSON document


class Redaction:
    """Rules that redact text: each match of a pattern is replaced by ``MARK``, then ``function`` changes the result."""

    def __init__(self, patterns: Sequence[str], function: Callable[[str], str] | None = None) -> None:
        self._patterns = [re.compile(pattern) for pattern in patterns]
        self._function = function

    def text(self, text: str) -> str:
        for pattern in self._patterns:
            text = pattern.sub(MARK, text)
        return self._function(text) if self._function and text else text

    def body(self, body: bytes) -> bytes:
        """Return ``body``, redacted. It must be JSON or a stream of JSON events.

        Raises:
            ValueError: ``body`` has another format, so its content is unknown, or the function failed.
        """
        if not body or not (self._patterns or self._function):
            return body
        try:
            if not body.lstrip().startswith((_EVENT, b":")):
                document = _walk(json.loads(body), (), lambda _, text: self.text(text))
                return json.dumps(document, ensure_ascii=False).encode()

            # Join the pieces of each text of the stream, and redact the joined text.
            lines = body.splitlines()
            all_data = {number: _event_data(line) for number, line in enumerate(lines)}
            events = {number: json.loads(data) for number, data in all_data.items() if data is not None}
            pieces: dict[_TextPath, list[str]] = {}

            def gather(path: _TextPath, text: str) -> str:
                pieces.setdefault(path, []).append(text)
                return text

            for event in events.values():
                _walk(event, (), gather)
            replacements = {
                path: iter([redacted, *[""] * (len(texts) - 1)])
                for path, texts in pieces.items()
                if (redacted := self.text("".join(texts))) != "".join(texts)
            }

            for number, line in enumerate(lines):
                if number in events:
                    event = _walk(events[number], (), lambda path, text: next(replacements.get(path, iter((text,)))))
                    lines[number] = b"data: " + json.dumps(event, ensure_ascii=False).encode()
                elif not line.startswith(_EVENT):
                    lines[number] = self.text(line.decode()).encode()  # a comment or the name of an event
            return b"\n".join(lines) + b"\n"
        except RecursionError:
            raise ValueError("the body is nested too deeply") from None
        except Exception as error:
            raise ValueError(f"redaction failed with {type(error).__name__}") from None


def open_redaction(patterns: Sequence[str], function_path: str | None) -> Redaction:
    """Create the redaction for a profile. ``function_path`` has the form ``package.module:function``.

    Raises:
        InvalidInput: The function cannot be imported or is not callable.
    """
    if function_path is None:
        return Redaction(patterns)
    module, _, name = function_path.partition(":")
    expected = "an importable function from text to text"
    try:
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise InvalidInput(
            "shadow.redactor", found=f"{function_path!r}, which cannot be imported ({error})", expected=expected
        ) from None
    if not callable(function):
        raise InvalidInput("shadow.redactor", found=f"{function_path!r}, which is not callable", expected=expected)
    return Redaction(patterns, function)


def _event_data(line: bytes) -> bytes | None:
    """Return the JSON in a line of a stream, or None if the line contains none."""
    data = line[len(_EVENT) :].strip() if line.startswith(_EVENT) else b""
    return data if data and data != b"[DONE]" else None


def _walk(value: Any, path: _TextPath, change: Callable[[_TextPath, str], str]) -> Any:
    """Return ``value`` with every text changed, including field names and numbers.

    A list entry with an ``index`` field is identified by that index instead of its position.
    """
    if isinstance(value, str):
        return change(path, value)
    if isinstance(value, list):
        indices = [
            entry.get("index", number) if isinstance(entry, dict) else number for number, entry in enumerate(value)
        ]
        return [_walk(entry, (*path, str(index)), change) for index, entry in zip(indices, value, strict=True)]
    if isinstance(value, dict):
        return {change((*path, key, ""), key): _walk(entry, (*path, key), change) for key, entry in value.items()}
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        number_text = str(value)
        return value if (redacted := change((*path, number_text, "number"), number_text)) == number_text else redacted
    return value


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

"""Read and write the table of requests and answers, in SQLite or PostgreSQL.

A row is one request at one arm. The user received an ``answer``; a ``copy`` was only recorded. All rows for one user
request share an ``exchange``: an answer and its copy (a pair to be judged), or a failure of the candidate and the
parent's answer that replaced it. An existing gateway may write these rows directly.
``dev/shadow-releases.md`` describes the columns.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Self

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite

from mergegate.merge_core.errors import InvalidInput, pip_command
from mergegate.merge_core.files import hold_lock
from mergegate.tasks.shadow.recorded_traffic import ArmRow, RecordedAnswer, RecordedPair, ShadowRecord

if TYPE_CHECKING:
    from types import TracebackType

_MIGRATIONS = Path(__file__).with_name("migrations")
_TIMEOUT_S = 5  # timeout for connections and for another writer's lock
_PAIRS_IN_MEMORY = 200

_TABLES = sa.MetaData()
# The schema after the newest migration.
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
)
TALLIES = sa.Table(
    "shadow_tally",
    _TABLES,
    sa.Column("candidate", sa.String(200), primary_key=True),
    sa.Column("what", sa.String(60), primary_key=True),
    sa.Column("count", sa.BigInteger, nullable=False),
)


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
            sa.select(parent, copy)
            .join(copy, (copy.c.exchange == parent.c.exchange) & (copy.c.candidate == parent.c.candidate))
            .where(parent.c.candidate == candidate, parent.c.arm == "parent", copy.c.arm == "candidate")
            .where(parent.c.role == "answer", copy.c.role == "copy", parent.c.at >= (since or 0.0))
            .order_by(parent.c.at, parent.c.id)
        )
        width = len(RECORDS.columns)
        with self._engine.connect() as connection:
            for row in connection.execution_options(yield_per=_PAIRS_IN_MEMORY).execute(query):
                names = RECORDS.columns.keys()
                first = dict(zip(names, row[:width], strict=True))
                second = dict(zip(names, row[width:], strict=True))
                yield RecordedPair(
                    request_id=first["exchange"],
                    session=first["session"],
                    at=first["at"],
                    path=first["path"],
                    request=first["request"],
                    parent=_answer(first),
                    candidate=_answer(second),
                )

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
    """Open the records at a database URL. Create or migrate the tables if necessary.

    A SQLite file is in WAL mode, so that readers and the proxy can work concurrently.

    Raises:
        InvalidInput: The driver for the URL is not installed.
        sqlalchemy.exc.SQLAlchemyError: The database is not available or its schema cannot be changed.
    """
    from alembic import command
    from alembic.config import Config

    scheme, rest = url.split("://", 1)
    if scheme == "postgresql":
        try:
            import_module("psycopg")
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
    config = Config()
    config.set_main_option("script_location", str(_MIGRATIONS).replace("%", "%%"))
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
            config.attributes["connection"] = connection
            command.upgrade(config, "head")
    except BaseException:
        engine.dispose()
        raise
    return Records(engine)


def _answer(row: Mapping[str, object]) -> RecordedAnswer:
    values = (row[name] for name in ("status", "response", "first_byte", "seconds", "error"))
    return RecordedAnswer(*values)  # type: ignore[arg-type]  # The columns have these types.

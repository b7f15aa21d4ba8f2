"""What is kept of requests and answers: one table, in SQLite or PostgreSQL, whoever writes it.

A row is one request at one arm: an ``answer`` reached the user, a ``copy`` did not. What one request became has one
``exchange``: answer and copy (a pair to be judged), or a candidate's failure and the parent's answer in its place. A
gateway that is there already may write these rows itself; docs/shadow.md says what stands in each column.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Self

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite

from mergegate.merge_core.errors import InvalidInput
from mergegate.merge_core.files import locked
from mergegate.tasks.shadow.arms import ArmRow
from mergegate.tasks.shadow.recorded_traffic import RecordedAnswer, RecordedPair, ShadowRecord

if TYPE_CHECKING:
    from types import TracebackType

_MIGRATIONS = Path(__file__).with_name("migrations")
_WAIT_S = 5  # for a database that somebody else writes
_AT_ONCE = 200  # pairs that are in memory

_TABLES = sa.MetaData()
# As the newest migration leaves it.
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
    """The database. A context manager; used by one thread at a time."""

    def __init__(self, engine: sa.Engine) -> None:
        self._engine = engine
        self._insert = sqlite.insert if engine.dialect.name == "sqlite" else postgresql.insert

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close()

    def write(self, batch: Sequence[ShadowRecord], tallies: Mapping[tuple[str, str], int] | None = None) -> None:
        """Add rows and counts, all or none.

        Args:
            tallies: By candidate and what was counted: how many more.

        Raises:
            sqlalchemy.exc.SQLAlchemyError: The database does not take them.
        """
        with self._engine.begin() as connection:
            if batch:  # Of a batch whose commit was not heard of, nothing is kept twice.
                connection.execute(self._insert(RECORDS).on_conflict_do_nothing(), [one._asdict() for one in batch])
            for (candidate, what), count in (tallies or {}).items():
                own = (TALLIES.c.candidate == candidate) & (TALLIES.c.what == what)
                changed = connection.execute(sa.update(TALLIES).where(own).values(count=TALLIES.c.count + count))
                if not changed.rowcount:
                    connection.execute(sa.insert(TALLIES), {"candidate": candidate, "what": what, "count": count})

    def pairs(self, candidate: str, since: float | None = None) -> Iterator[RecordedPair]:
        """Requests that both arms answered, whatever they answered, in order of time.

        Args:
            since: Unix time; older ones are left out.
        """
        parent, copy = RECORDS.alias("parent"), RECORDS.alias("copy")
        asked = (
            sa.select(parent, copy)
            .join(copy, (copy.c.exchange == parent.c.exchange) & (copy.c.candidate == parent.c.candidate))
            .where(parent.c.candidate == candidate, parent.c.arm == "parent", copy.c.arm == "candidate")
            .where(parent.c.role == "answer", copy.c.role == "copy", parent.c.at >= (since or 0.0))
            .order_by(parent.c.at, parent.c.id)
        )
        width = len(RECORDS.columns)
        with self._engine.connect() as connection:
            for row in connection.execution_options(yield_per=_AT_ONCE).execute(asked):
                ours = RECORDS.columns.keys()
                theirs = dict(zip(ours, row[:width], strict=True)), dict(zip(ours, row[width:], strict=True))
                first, second = theirs
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
        """How every request of both arms went, in the order in which they began."""
        columns = [RECORDS.c[name] for name in ArmRow._fields]
        asked = sa.select(*columns).where(RECORDS.c.candidate == candidate, RECORDS.c.at >= (since or 0.0))
        with self._engine.connect() as connection:
            return [ArmRow(*row) for row in connection.execute(asked.order_by(RECORDS.c.at, RECORDS.c.id))]

    def counts(self, candidate: str) -> Mapping[str, int]:
        """What was counted of a candidate's traffic: ``requests``, ``copies left out``, ``not recorded``, …"""
        asked = sa.select(TALLIES.c.what, TALLIES.c.count).where(TALLIES.c.candidate == candidate)
        with self._engine.connect() as connection:
            return {row[0]: row[1] for row in connection.execute(asked.order_by(TALLIES.c.what))}

    def purge(self, before: float) -> int:
        """Remove rows that are older than a Unix time; how many there were."""
        with self._engine.begin() as connection:
            return connection.execute(sa.delete(RECORDS).where(RECORDS.c.at < before)).rowcount

    def close(self) -> None:
        """Give the connections back."""
        self._engine.dispose()


def open_records(url: str) -> Records:
    """The records at an address, made or brought up to date where they are not.

    Raises:
        InvalidInput: for an address whose driver is not installed.
        sqlalchemy.exc.SQLAlchemyError: The database cannot be reached, or does not let itself be changed.
    """
    engine = sa.create_engine(_with_driver(url), connect_args=_patience(url), pool_pre_ping=True, hide_parameters=True)
    try:
        if engine.dialect.name == "sqlite":
            _prepare_sqlite(engine)
        _bring_up_to_date(engine)
    except BaseException:
        engine.dispose()
        raise
    return Records(engine)


def _bring_up_to_date(engine: sa.Engine) -> None:
    from alembic import command
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(_MIGRATIONS).replace("%", "%%"))
    with engine.begin() as connection:
        if engine.dialect.name == "sqlite":
            connection.exec_driver_sql("begin immediate")  # Of two that begin at once, one waits.
        else:
            connection.execute(sa.text("select pg_advisory_xact_lock(hashtext('mergegate shadow'))"))
        config.attributes["connection"] = connection
        command.upgrade(config, "head")


def _with_driver(url: str) -> str:
    scheme, rest = url.split("://", 1)
    if scheme != "postgresql":
        return url
    try:
        import psycopg  # noqa: F401  # asked here, for a message to people
    except ImportError:
        raise InvalidInput(
            "shadow.records",
            found="an address of PostgreSQL, and no driver for it",
            expected="psycopg",
            remedy="pip install 'mergegate[postgresql]'",
        ) from None
    return f"postgresql+psycopg://{rest}"


def _patience(url: str) -> dict[str, int]:
    return {"timeout": _WAIT_S} if url.startswith("sqlite") else {"connect_timeout": _WAIT_S}


def _prepare_sqlite(engine: sa.Engine) -> None:
    """Let readers and the proxy work side by side: a mode of the file (WAL), set by whoever makes it.

    Of two connections that set it at once, SQLite sends one away without waiting, lest they wait for each other
    (https://www.sqlite.org/c3ref/busy_handler.html); so ours take turns.
    """
    path = Path(engine.url.database or "")
    path.parent.mkdir(parents=True, exist_ok=True)
    sa.event.listen(engine, "connect", _write_without_waiting)
    with locked(path.with_name(path.name + ".lock"), remove=True, required=False), engine.connect() as connection:
        connection.exec_driver_sql("pragma journal_mode=wal")


def _write_without_waiting(connection: sa.engine.interfaces.DBAPIConnection, _: object) -> None:
    connection.execute("pragma synchronous=normal")


def _answer(row: Mapping[str, object]) -> RecordedAnswer:
    found = (row[name] for name in ("status", "response", "first_byte", "seconds", "error"))
    return RecordedAnswer(*found)  # type: ignore[arg-type]  # columns of these types

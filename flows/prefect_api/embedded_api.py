"""Serve Prefect's API for a run without a server, inside its own process and on the project's own SQLite file.

Prefect can start a temporary server, but that is a child process that outlives a killed run. If two of them migrate the
same new database at the same time, both fail. Here, the API runs in a thread that ends with the run, and only one
process at a time migrates::

    with local_api():
        release(profile)

If ``PREFECT_API_URL`` is the URL of a server (``mergegate server`` or a team's own), the run uses that server. The
``prefect.toml`` that ``mergegate server`` writes for Prefect's own command line is ignored, because a manual run must
not depend on whether that server is up.
"""

from __future__ import annotations

import asyncio
import errno
import http.client
import logging
import os
import secrets
import socket
import sqlite3
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from tempfile import NamedTemporaryFile

from mergegate.flows.prefect_api.site import own_settings
from mergegate.merge_core.errors import InvalidInput
from mergegate.merge_core.files import (
    disk_errors_refused,
    disk_refusal,
    hold_lock,
    is_disk_error,
    remove_damaged,
    remove_sqlite,
    sqlite_fault,
    state_directory,
    user_cache,
    write_state,
)
from mergegate.merge_core.wording import detail

START_TIMEOUT_S = 900.0
DEFAULT_HOME = ".mergegate"
# Maximum wait for a process that locks the database.
_PATIENCE_S = 10.0
# Roughly the space that a database needs for its next pages.
_PROBE_BYTES = 1 << 18


def configure(home: Path) -> None:
    """Point Prefect at the project's own state, and turn off its log output and telemetry.

    Call this before ``import prefect``. Environment variables that the user has set take precedence.

    Raises:
        InvalidInput: The state directory cannot be created at this location.
        DiskUnavailable: The disk refused to create it.
    """
    quiet = {
        "PREFECT_HOME": str(home / "prefect"),
        "PREFECT_SERVER_ANALYTICS_ENABLED": "0",
        "DO_NOT_TRACK": "1",
        "PREFECT_LOGGING_LEVEL": "CRITICAL",
        "PREFECT_SERVER_LOGGING_LEVEL": "CRITICAL",
        # The output of a local run has its log records, so the API does not need them.
        "PREFECT_LOGGING_TO_API_ENABLED": "0",
        # Task results are recorded in batches after one second instead of one transaction each.
        "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_BATCH_SIZE": "100",
        "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_FLUSH_INTERVAL": "1",
    }
    for name, value in quiet.items():
        os.environ.setdefault(name, value)
    if own_settings():
        os.environ.setdefault("PREFECT_API_URL", "")
    # Prefect's settings do not affect these loggers, and their messages are not useful here.
    for worker in ("EventsWorker", "APILogWorker"):
        logging.getLogger(worker).setLevel(logging.CRITICAL)
    prefect_home = Path(os.environ["PREFECT_HOME"])
    for directory in (home, prefect_home):
        try:
            # Only the owner may read our own directories: reports, weights and Prefect's records are private.
            if directory == home and home.is_dir() and home.name != DEFAULT_HOME:
                continue  # a directory of the user, who decides about its permissions
            if directory == home and os.path.lexists(home) and not home.is_dir():
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(home))
            state_directory(directory, private=directory == home or directory.parent == home)
        except OSError as error:
            if is_disk_error(error):
                raise disk_refusal(error, directory) from None
            raise InvalidInput(
                str(directory),
                found=f"the directory cannot be created: {error.strerror}",
                expected="a directory for the project's state",
                remedy="set MERGEGATE_HOME to a writable directory",
            ) from None


def configured_url() -> str | None:
    """Return the URL of the configured server's API, or None if no server is configured."""
    from prefect.settings import get_current_settings

    return get_current_settings().api.url


@contextmanager
def local_api() -> Iterator[None]:
    """Serve Prefect's API on a free loopback port while the block runs, unless a server is configured.

    The database only contains Prefect's record of runs, which mergegate does not need. If it is damaged, a new one
    replaces it.

    Raises:
        InvalidInput: The configured server does not answer.
        DiskUnavailable: The database cannot be written.
        ApiNotStarted: The API does not start, even with a new database.
    """
    from prefect.events.worker import EventsWorker
    from prefect.settings import (
        PREFECT_API_AUTH_STRING,
        PREFECT_API_URL,
        PREFECT_FLOWS_HEARTBEAT_FREQUENCY,
        PREFECT_SERVER_API_AUTH_STRING,
        PREFECT_SERVER_CORS_ALLOWED_ORIGINS,
        get_current_settings,
        temporary_settings,
    )

    if url := configured_url():
        # Check that the server answers, instead of letting every call time out.
        try:
            with urllib.request.urlopen(f"{url.rstrip('/')}/health", timeout=10):
                pass
        except urllib.error.HTTPError:
            pass  # the server answers; Prefect reports an access error
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise InvalidInput(
                f"PREFECT_API_URL: {url}",
                found=f"no server answers ({error})",
                expected="a Prefect server",
                remedy="start it (mergegate server), correct the address, or unset PREFECT_API_URL to use no server",
            ) from None
        yield
        return

    home = get_current_settings().home
    # Every user of this machine and every web page in its browsers can reach a loopback port. Therefore the API
    # requires a secret that only this process knows, and rejects pages of other origins.
    secret = f"mergegate:{secrets.token_urlsafe(32)}"
    protected = {
        PREFECT_SERVER_API_AUTH_STRING: secret,
        PREFECT_API_AUTH_STRING: secret,
        PREFECT_SERVER_CORS_ALLOWED_ORIGINS: "http://127.0.0.1",
    }
    with temporary_settings(protected), ExitStack() as stack:
        with disk_errors_refused(home):
            state_directory(home)
            stack.enter_context(hold_lock(home / "migration.lock"))  # one migration at a time
            database = _database()
            if database and (why := sqlite_fault(database, patience_s=_PATIENCE_S)):
                forget_records(database, why)
            is_new = database is not None and not database.exists()
            if database and is_new:
                _create_database(database)
        try:
            url, stop = _start_server(database)
        except ApiNotStarted as failure:
            # The database may have content that Prefect cannot read. Its records are lost, but the run can continue.
            require_writable(home)
            if database is None or not database.exists():
                raise
            forget_records(database, str(failure))
            if is_new:
                with suppress(OSError, RuntimeError):
                    _empty_database().unlink()  # The database is probably a copy of it.
            url, stop = _start_server(database)
    # Services are off because a process that ends soon must not schedule anything. Heartbeats are off because they cost
    # one second per flow.
    with temporary_settings({**protected, PREFECT_API_URL: url, PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None}):
        try:
            yield
        finally:
            with suppress(Exception):  # telemetry of a finished run must not fail it
                EventsWorker.drain_all(timeout=2)
            # From here on, the server's own services are cancelled and would log errors about it.
            for name in ("prefect", "sqlalchemy.pool", "aiosqlite"):
                logging.getLogger(name).setLevel(logging.CRITICAL)
            stop()


class ApiNotStarted(RuntimeError):
    """Prefect's API did not start in this process."""


def _start_server(database: Path | None) -> tuple[str, Callable[[], None]]:
    """Start the API in a thread, and return its URL and a function that stops it.

    Raises:
        ApiNotStarted: The API does not start, or the migrated database still lacks tables or columns.
    """
    import uvicorn
    from prefect.server.api.server import create_app
    from prefect.server.database import provide_database_interface

    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}/api"
    app = create_app(ephemeral=True, final=True, ignore_cache=True)
    server = uvicorn.Server(uvicorn.Config(app, log_level="critical", lifespan="on"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, name="prefect-api", daemon=True)
    thread.start()

    def stop() -> None:
        server.should_exit = True
        thread.join(timeout=10)

    deadline = time.monotonic() + START_TIMEOUT_S
    while not server.started:
        if not thread.is_alive() or time.monotonic() > deadline:
            stop()
            listener.close()
            raise ApiNotStarted("Prefect's API did not start in this process; see its log above")
        time.sleep(0.02)
    if database is None:
        return url, stop
    # A table or a column may be missing although the database claims the current version.
    with closing(sqlite3.connect(database, timeout=_PATIENCE_S)) as connection:
        for table in provide_database_interface().Base.metadata.sorted_tables:
            rows = connection.execute("SELECT name FROM pragma_table_info(?)", (table.name,)).fetchall()
            if missing := sorted({column.name for column in table.columns} - {name for (name,) in rows}):
                stop()
                raise ApiNotStarted(f"Prefect's database has no {table.name}.{missing[0]}")
    return url, stop


def _create_database(database: Path) -> None:
    """Copy the empty database that an earlier run kept, because the migrations of a new one take eight seconds.

    Without such a copy, create a database and keep a copy of it for later projects. If this fails, Prefect creates its
    database when it starts.
    """
    from prefect.server.database import provide_database_interface

    try:
        empty = _empty_database()
        if empty.exists() and not sqlite_fault(empty, patience_s=_PATIENCE_S):
            write_state(database, _content(empty))
            return
        with ThreadPoolExecutor(1) as thread:  # This thread may have an event loop already, as in a notebook.
            thread.submit(asyncio.run, provide_database_interface().create_db()).result()
        empty.parent.mkdir(parents=True, exist_ok=True)
        write_state(empty, _content(database))
    except Exception as error:  # Prefect, alembic and SQLAlchemy raise their own.
        detail("Prefect's empty database was not copied or kept: %s", error)


def _empty_database() -> Path:
    """Return the path of the empty database that all projects of this user copy."""
    import prefect

    return user_cache() / f"prefect-{prefect.__version__}.db"


def _content(database: Path) -> bytes:
    with closing(sqlite3.connect(database)) as connection:
        return connection.serialize()  # Unlike the file, this includes what is only in the write-ahead log.


def require_writable(path: Path) -> None:
    """Raise DiskUnavailable unless a file can be written below ``path``. Databases report this problem less clearly."""
    with disk_errors_refused(path), NamedTemporaryFile(dir=path, prefix="probe-", suffix=".partial") as file:
        file.write(bytes(_PROBE_BYTES))
        file.flush()
        os.fsync(file.fileno())


def forget_records(database: Path, why: str) -> None:
    """Delete Prefect's database, together with the file that lists the blocks registered in it."""
    remove_sqlite(database, why)
    remove_damaged(database.with_name("memo_store.toml"), "it belongs to the database")


def _database() -> Path | None:
    """Return the path of Prefect's database, or None if it is not a file."""
    from prefect.settings import get_current_settings
    from sqlalchemy.engine import make_url

    url = get_current_settings().server.database.connection_url
    address = make_url(url.get_secret_value()) if url else None
    if address is None or not address.drivername.startswith("sqlite") or address.database in (None, "", ":memory:"):
        return None
    return Path(str(address.database))

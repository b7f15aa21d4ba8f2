"""Prefect's API for a run without a server: inside this very process, on the project's own SQLite file.

Prefect can start a temporary server of its own, but as a child process that outlives a killed run, and two of them that
migrate one fresh database at once fail each other. Here the API lives in a thread and dies with the run, and migrations
happen one process at a time::

    with local_api():
        release(profile)

Where ``PREFECT_API_URL`` names a server (``mergegate server``, a team's own), that one is used and nothing is started.
What ``mergegate server`` wrote down for Prefect's own command line does not count: a run by hand must not depend on
whether that server happens to be up.
"""

from __future__ import annotations

import errno
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
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from tempfile import NamedTemporaryFile

from mergegate.flows.prefect_api.site import own_settings
from mergegate.merge_core.errors import InvalidInput
from mergegate.merge_core.files import (
    disk_errors_refused,
    disk_refusal,
    is_disk_error,
    locked,
    set_aside_damaged,
    set_sqlite_aside,
    sqlite_fault,
    state_directory,
)

START_TIMEOUT_S = 900.0
DEFAULT_HOME = ".mergegate"
# How long somebody may hold the database before it is looked at no further.
_PATIENCE_S = 10.0
# About what a database needs for its next few pages.
_PROBE_BYTES = 1 << 18


def configure(home: Path) -> None:
    """Point Prefect at the project's own state and keep it quiet and offline. Call before ``import prefect``.

    What the user's environment already says stays as it is.

    Raises:
        InvalidInput: when the state has no place to be.
        DiskRefused: when the disk does not let it be made.
    """
    quiet = {
        "PREFECT_HOME": str(home / "prefect"),
        "PREFECT_SERVER_ANALYTICS_ENABLED": "0",
        "DO_NOT_TRACK": "1",
        "PREFECT_LOGGING_LEVEL": "CRITICAL",
        "PREFECT_SERVER_LOGGING_LEVEL": "CRITICAL",
        # The records of a local run are read by people in its own output; nobody polls the API for them meanwhile.
        "PREFECT_LOGGING_TO_API_ENABLED": "0",
        # What tasks come to is recorded a second later and many at once, not each in transactions of its own.
        "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_BATCH_SIZE": "100",
        "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_FLUSH_INTERVAL": "1",
    }
    for name, value in quiet.items():
        os.environ.setdefault(name, value)
    if own_settings():
        os.environ.setdefault("PREFECT_API_URL", "")
    # Loggers of Prefect's own that none of its settings reaches: what they still have to hand over is nobody's concern.
    for worker in ("EventsWorker", "APILogWorker"):
        logging.getLogger(worker).setLevel(logging.CRITICAL)
    own = Path(os.environ["PREFECT_HOME"])
    for place in (home, own):
        try:
            # What is ours alone is closed to others: reports, weights and Prefect's records are nobody else's business.
            if place == home and home.is_dir() and home.name != DEFAULT_HOME:
                continue  # a directory of the user's, who decides
            if place == home and os.path.lexists(home) and not home.is_dir():
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(home))
            state_directory(place, private=place == home or place.parent == home)
        except OSError as error:
            if is_disk_error(error):
                raise disk_refusal(error, place) from None
            raise InvalidInput(
                str(place),
                found=f"cannot be made: {error.strerror}",
                expected="a directory for the project's state",
                remedy="point MERGEGATE_HOME to a place that can be written",
            ) from None


def has_server() -> bool:
    """Whether runs are recorded by a server that somebody has configured: other people look there."""
    return bool(_configured_url())


def _configured_url() -> str | None:
    from prefect.settings import get_current_settings

    return get_current_settings().api.url


@contextmanager
def local_api() -> Iterator[None]:
    """Serve Prefect's API on a free loopback port for as long as the block runs, unless a server is configured.

    The database is Prefect's record of runs, nothing that a run needs: one that is damaged is set aside and begun anew.

    Raises:
        InvalidInput: when the configured server does not answer.
        DiskRefused: when the database cannot be written.
    """
    from prefect.settings import (
        PREFECT_API_AUTH_STRING,
        PREFECT_API_URL,
        PREFECT_FLOWS_HEARTBEAT_FREQUENCY,
        PREFECT_SERVER_API_AUTH_STRING,
        PREFECT_SERVER_CORS_ALLOWED_ORIGINS,
        get_current_settings,
        temporary_settings,
    )

    if url := _configured_url():
        _require_answer(url)
        yield
        return

    home = get_current_settings().home
    # Anybody on this machine can reach a port of the loopback, and any page in a browser on it: they need a secret that
    # only this process knows, and no page of another origin is let in.
    secret = f"mergegate:{secrets.token_urlsafe(32)}"
    closed = {
        PREFECT_SERVER_API_AUTH_STRING: secret,
        PREFECT_API_AUTH_STRING: secret,
        PREFECT_SERVER_CORS_ALLOWED_ORIGINS: "http://127.0.0.1",
    }
    with temporary_settings(closed), ExitStack() as held:
        with disk_errors_refused(home):
            held.enter_context(_one_migration_at_a_time(home))
            database = _database()
            if database and (why := sqlite_fault(database, patience_s=_PATIENCE_S)):
                forget_records(database, why)
        try:
            url, stop = _start_server(database)
        except _NotStarted as failure:
            # Whatever its database holds that Prefect cannot read: the records are lost, the run need not be.
            require_writable(home)
            if database is None or not database.exists():
                raise RuntimeError(str(failure)) from None
            forget_records(database, str(failure))
            url, stop = _start_server(database)
    # Services off: nothing is scheduled by a process that is about to end. Heartbeats off: they cost a second a flow.
    with temporary_settings({**closed, PREFECT_API_URL: url, PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None}):
        try:
            yield
        finally:
            _drain_events()
            _hush()
            stop()


class _NotStarted(Exception):
    """Prefect's API did not start in this process."""


def _start_server(database: Path | None) -> tuple[str, Callable[[], None]]:
    """Address of the API, served by a thread; and what ends it.

    Raises:
        _NotStarted: also when the database is none of Prefect's after it has brought it up to date.
    """
    import uvicorn
    from prefect.server.api.server import create_app

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
            raise _NotStarted("Prefect's API did not start in this process; see its log above")
        time.sleep(0.02)
    if database and (missing := _missing_columns(database)):
        stop()
        raise _NotStarted(f"Prefect's database has no {missing}")
    return url, stop


def _missing_columns(database: Path) -> str:
    """A table or column that Prefect needs and its database has not, though it says that it is of this version."""
    from prefect.server.database import provide_database_interface

    with closing(sqlite3.connect(database, timeout=_PATIENCE_S)) as connection:
        for table in provide_database_interface().Base.metadata.sorted_tables:
            rows = connection.execute("SELECT name FROM pragma_table_info(?)", (table.name,)).fetchall()
            if missing := sorted({column.name for column in table.columns} - {name for (name,) in rows}):
                return f"{table.name}.{missing[0]}"
    return ""


def require_writable(place: Path) -> None:
    """See that a file can be written below ``place``: databases say less clearly why they cannot.

    Raises:
        DiskRefused: when it cannot, or only a few bytes.
    """
    with disk_errors_refused(place), NamedTemporaryFile(dir=place, prefix="probe-", suffix=".partial") as file:
        file.write(bytes(_PROBE_BYTES))
        file.flush()
        os.fsync(file.fileno())


def forget_records(database: Path, why: str) -> None:
    """Set Prefect's database aside, with the note of what has been registered in it."""
    set_sqlite_aside(database, why)
    set_aside_damaged(database.with_name("memo_store.toml"), "it belongs to the database")


def _database() -> Path | None:
    """Prefect's database, where it is a file."""
    from prefect.settings import get_current_settings
    from sqlalchemy.engine import make_url

    url = get_current_settings().server.database.connection_url
    address = make_url(url.get_secret_value()) if url else None
    if address is None or not address.drivername.startswith("sqlite") or address.database in (None, "", ":memory:"):
        return None
    return Path(str(address.database))


def _require_answer(url: str) -> None:
    """See that the configured server is there, rather than have every call time out one by one."""
    try:
        with urllib.request.urlopen(f"{url.rstrip('/')}/health", timeout=10):
            return
    except urllib.error.HTTPError:
        return  # it answers; whether it lets us in is Prefect's to say
    except (OSError, ValueError) as error:
        raise InvalidInput(
            f"PREFECT_API_URL: {url}",
            found=f"no server answers ({error})",
            expected="a Prefect server",
            remedy="start it (mergegate server), correct the address, or unset PREFECT_API_URL to run without one",
        ) from None


def _drain_events() -> None:
    """Let the client's event worker hand over what it holds while there is still an API to take it."""
    from prefect.events.worker import EventsWorker

    with suppress(Exception):  # telemetry of a finished run is never worth failing it
        EventsWorker.drain_all(timeout=2)


def _hush() -> None:
    """From here on the server's own services are cancelled in mid-step; what they log about it helps nobody."""
    for name in ("prefect", "sqlalchemy.pool", "aiosqlite"):
        logging.getLogger(name).setLevel(logging.CRITICAL)


@contextmanager
def _one_migration_at_a_time(home: Path) -> Iterator[None]:
    state_directory(home)
    with locked(home / "migration.lock"):
        yield

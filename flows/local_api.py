"""Prefect's API for a run without a server: inside this very process, on the project's own SQLite file.

Prefect can start a temporary server of its own, but as a child process that outlives a killed run, and two of them that
migrate one fresh database at once fail each other. Here the API lives in a thread and dies with the run, and migrations
happen one process at a time::

    with local_api():
        release(profile)

Where ``PREFECT_API_URL`` names a server (``make server``, a team's own), that one is used and nothing is started.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from merge_core.errors import InvalidInput
from merge_core.store import locked

START_TIMEOUT_S = 120.0


def configure(home: Path) -> None:
    """Point Prefect at the project's own state and keep it quiet and offline. Call before ``import prefect``.

    What the user's environment already says stays as it is.

    Raises:
        InvalidInput: when the state has no place to be.
    """
    quiet = {
        "PREFECT_HOME": str(home / "prefect"),
        "PREFECT_SERVER_ANALYTICS_ENABLED": "0",
        "DO_NOT_TRACK": "1",
        "PREFECT_LOGGING_LEVEL": "CRITICAL",
        "PREFECT_SERVER_LOGGING_LEVEL": "CRITICAL",
        # The records of a local run are read by people in its own output; nobody polls the API for them meanwhile.
        "PREFECT_LOGGING_TO_API_ENABLED": "0",
    }
    for name, value in quiet.items():
        os.environ.setdefault(name, value)
    for place in (home, Path(os.environ["PREFECT_HOME"])):
        try:
            place.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InvalidInput(
                str(place),
                found=f"cannot be made: {error.strerror}",
                expected="a directory for the project's state",
                remedy="point MERGEGATE_HOME to a place that can be written",
            ) from None


@contextmanager
def local_api() -> Iterator[None]:
    """Serve Prefect's API on a free loopback port for as long as the block runs, unless a server is configured.

    Raises:
        InvalidInput: when the configured server does not answer.
    """
    from prefect.settings import (
        PREFECT_API_URL,
        PREFECT_FLOWS_HEARTBEAT_FREQUENCY,
        get_current_settings,
        temporary_settings,
    )

    if url := get_current_settings().api.url:
        _require_answer(url)
        yield
        return

    import uvicorn
    from prefect.server.api.server import create_app

    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}/api"
    # Services off: nothing is scheduled by a process that is about to end. Heartbeats off: they cost a second a flow.
    with temporary_settings({PREFECT_API_URL: url, PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None}):
        app = create_app(ephemeral=True, final=True)
        server = uvicorn.Server(uvicorn.Config(app, log_level="critical", lifespan="on"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, name="prefect-api", daemon=True)
        with _one_migration_at_a_time(get_current_settings().home):
            thread.start()
            deadline = time.monotonic() + START_TIMEOUT_S
            while not server.started:
                if not thread.is_alive() or time.monotonic() > deadline:
                    raise RuntimeError("Prefect's API did not start in this process; see its log above")
                time.sleep(0.02)
        try:
            yield
        finally:
            _drain_events()
            _hush()
            server.should_exit = True
            thread.join(timeout=10)


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
            remedy="start it (make server), correct the address, or unset PREFECT_API_URL to run without one",
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
    home.mkdir(parents=True, exist_ok=True)
    with locked(home / "migration.lock"):
        yield

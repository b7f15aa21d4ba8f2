"""``mergegate server`` and ``mergegate worker``: run Prefect's own with the settings of this project."""

from __future__ import annotations

import os
import signal
import socket
import sys
from dataclasses import replace
from pathlib import Path
from typing import NoReturn
from urllib.parse import urlsplit

from rich.console import Console

from mergegate.flows.cli.styles import short_path
from mergegate.flows.prefect_api import (
    POOL,
    PORT,
    SCHEDULES_FILE,
    Schedules,
    database_url,
    find_site,
    load_or_create_secret,
    load_schedules,
    make_pool,
    rearm_rules_when_ready,
    require_database,
    serve_prefect,
    site_client,
    write_settings,
)
from mergegate.merge_core.errors import InvalidInput

_ANYWHERE = ("0.0.0.0", "::")


def run_server(host: str, port: int | None, console: Console) -> None:
    """Serve Prefect's API and pages for this project.

    Args:
        host: Address to listen on.
        port: Port to listen on. None: that of ``server.address`` in ``schedules.yaml``, or else 4200.

    Raises:
        InvalidInput: The port is in use, or the database does not answer.
        DiskUnavailable: The secret cannot be stored.
    """
    schedules = load_optional_schedules()
    configured = schedules.server.address if schedules else None
    port = port or (urlsplit(configured).port if configured else None) or PORT
    _require_free(host, port)
    if (database := database_url(schedules)) is not None:
        require_database(database)
    local_host = "127.0.0.1" if host in _ANYWHERE else host
    secret = load_or_create_secret()
    site = replace(find_site(address=configured or f"http://{local_host}:{port}"), secret=secret)
    console.print(f"Prefect's pages: {site.address}, secret in {short_path(site.home / 'prefect' / 'auth')}")
    if not write_settings(site):
        console.print("prefect.toml here is not ours and stays as it is: prefect's own commands do not know the server")
    if host in _ANYWHERE or not host.startswith(("127.", "localhost")):
        console.print("listening beyond this machine: one password and no TLS, so put a proxy before it")
    os.environ.update(site.server_environment(database))
    rearm_rules_when_ready(replace(site, address=f"http://{local_host}:{port}"))
    serve_prefect(host, port)


def become_worker(once: bool, console: Console) -> NoReturn:
    """Run due deployments, one at a time.

    Args:
        once: Whether to run only the deployments that are due now, and exit.

    Raises:
        InvalidInput: The server does not answer or denies access.
    """
    site = find_site(load_optional_schedules())
    os.environ.update(site.worker_environment())
    with site_client(site) as client:
        make_pool(client)
    console.print(f"worker for {site.address}, in {short_path(site.root)}")
    more = ["--run-once"] if once else []
    sys.stdout.flush()
    # To stop, Prefect's worker sends itself a SIGINT. Background jobs of a shell ignore that signal and would keep
    # running.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    # exec replaces this process, so ending the command ends the worker. With -P, a project file with the name of a
    # library does not shadow that library.
    command = [sys.executable, "-P", "-m", "prefect", "worker", "start", "--pool", POOL, "--type", "process", *more]
    os.execve(sys.executable, command, site.worker_environment())


def load_optional_schedules() -> Schedules | None:
    """Load ``schedules.yaml`` of this directory, or return None if it does not exist.

    Raises:
        InvalidInput: The file is invalid.
    """
    return load_schedules(Path(SCHEDULES_FILE)) if Path(SCHEDULES_FILE).exists() else None


def _require_free(host: str, port: int) -> None:
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except (OSError, OverflowError, TypeError, ValueError) as error:
        raise InvalidInput(
            f"{host}:{port}",
            found=getattr(error, "strerror", None) or str(error),
            expected="an address of this machine where nobody listens",
            remedy="end the server that runs there, or choose another port: mergegate server --port 4300",
        ) from None

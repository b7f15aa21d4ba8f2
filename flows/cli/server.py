"""``mergegate server``, ``worker`` and ``deploy``: run Prefect's server and worker with the project's settings."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

import typer
from rich.text import Text

from mergegate.flows.cli.command import JsonOption, command_context
from mergegate.flows.cli.output import print_answer, short_path
from mergegate.flows.prefect_api import (
    POOL,
    PORT,
    SCHEDULES_FILE,
    Schedules,
    database_url,
    desired_deployments,
    desired_rules,
    find_site,
    load_or_create_secret,
    load_schedules,
    make_pool,
    rearm_rules,
    require_database,
    serve_prefect,
    site_client,
    sync_deployments,
    sync_rules,
    write_settings,
)
from mergegate.merge_core.errors import InvalidInput

_ALL_ADDRESSES = ("0.0.0.0", "::")
_MARKS = {"made": "+", "changed": "~", "unchanged": "=", "removed": "-"}


def server_command(
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=65535,
            help="Port to listen on.",
            show_default="that of server.address in schedules.yaml, or 4200",
        ),
    ] = None,
) -> None:
    """Serve Prefect's API and pages for this project.

    Set MERGEGATE_DATABASE=postgresql://… if a team uses the server.
    """
    with command_context() as console:
        schedules = load_optional_schedules()
        configured = schedules.server.address if schedules else None
        port = port or (urlsplit(configured).port if configured else None) or PORT
        require_free_port(host, port, f"{host}:{port}", "stop the server there, or choose another port: --port 4300")
        if (database := database_url(schedules)) is not None:
            require_database(database)
        local_host = "127.0.0.1" if host in _ALL_ADDRESSES else host
        secret = load_or_create_secret()
        site = replace(find_site(address=configured or f"http://{local_host}:{port}"), secret=secret)
        console.print(f"Prefect's pages: {site.address}, secret in {short_path(site.home / 'prefect' / 'auth')}")
        if not write_settings(site):
            console.print(
                "prefect.toml in this directory is not mergegate's and stays unchanged, so Prefect's own commands do "
                "not find this server"
            )
        if host in _ALL_ADDRESSES or not host.startswith(("127.", "localhost")):
            console.print(
                "other machines can reach this server. It has one password and no TLS, so put a proxy in front of it"
            )
        os.environ.update(site.server_environment(database))
        own_site = replace(site, address=f"http://{local_host}:{port}")
        threading.Thread(target=rearm_rules, args=(own_site,), name="rearming", daemon=True).start()
        serve_prefect(host, port)


def worker_command(
    once: Annotated[bool, typer.Option("--once", help="Run the deployments that are due now, then exit.")] = False,
) -> None:
    """Run due deployments, one at a time.

    The runs work in this project's directory.
    """
    with command_context() as console:
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


def deploy_command(as_json: JsonOption = False) -> None:
    """Update deployments and schedules from schedules.yaml.

    Notifications are also updated. A second call changes nothing.
    """
    with command_context(as_json, with_state=True) as console:
        schedules = load_schedules(Path(SCHEDULES_FILE))
        site = find_site(schedules)
        deployments = desired_deployments(schedules, site.root)
        with site_client(site) as client:
            make_pool(client)
            changes = sync_deployments(client, deployments, site)
            ids = {change.name: change.id for change in changes}
            rules = sync_rules(client, desired_rules(schedules, deployments), schedules.notify, ids, site)
        if as_json:
            facts = [change._asdict() for change in changes]
            more = {"server": site.address, "deployments": facts, "rules": dict(rules)}
            print_answer("deployed", f"{len(changes)} deployments", more)
            return
        descriptions = {deployment.full_name: deployment.summary() for deployment in deployments}
        width = max(len(change.name) for change in changes)
        for change in changes:
            description = descriptions.get(change.name, "removed")
            console.print(Text(f"  {_MARKS[change.change]} {change.name:<{width}}  {description}".rstrip()))
        for name, rule_change in rules:
            if rule_change != "unchanged":
                console.print(Text(f"  {_MARKS[rule_change]} {name.removeprefix('mergegate: ')}"))
        kinds = [*(change.change for change in changes), *(rule_change for _, rule_change in rules)]
        counts = ", ".join(f"{kinds.count(kind)} {kind}" for kind in _MARKS if kind in kinds)
        console.print(f"{site.address}: {counts}")


def load_optional_schedules() -> Schedules | None:
    """Load ``schedules.yaml`` of this directory. Return None if the file does not exist.

    Raises:
        InvalidInput: The file is invalid.
    """
    return load_schedules(Path(SCHEDULES_FILE)) if Path(SCHEDULES_FILE).exists() else None


def require_free_port(host: str, port: int, location: str, remedy: str = "") -> None:
    """Raise InvalidInput at ``location``, with ``remedy``, unless this process can listen on a port."""
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except (OSError, OverflowError, TypeError, ValueError) as error:
        raise InvalidInput(
            location,
            found=(getattr(error, "strerror", None) or str(error)).lower(),
            expected="an address of this machine that no other program listens on",
            remedy=remedy,
        ) from None

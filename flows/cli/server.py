"""``mergegate server``, ``worker``, ``deploy``, ``status``, ``trigger`` and ``approve``: use Prefect's server.

``status`` needs no server. It asks the server whether it can carry out the schedules.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Annotated, NamedTuple
from urllib.parse import urlsplit

import typer
from rich.console import Console
from rich.text import Text

from mergegate.flows.cli.command import JsonOption, command_context
from mergegate.flows.operations.console import OUTCOME_STYLES, print_answer, short_path
from mergegate.flows.prefect_api import (
    POOL,
    PORT,
    SCHEDULES_FILE,
    TAG,
    Schedules,
    database_url,
    deployments_on_server,
    desired_deployments,
    desired_rules,
    find_site,
    follow_run,
    load_or_create_secret,
    load_schedules,
    make_pool,
    page_of_run,
    rearm_rules,
    require_database,
    select_waiting_run,
    serve_prefect,
    site_client,
    sync_deployments,
    sync_rules,
    waiting_runs,
    write_settings,
)
from mergegate.flows.profile import load_profile, profile_name
from mergegate.merge_core.errors import InvalidInput, Refused, suggest
from mergegate.merge_core.wording import format_bytes, format_duration
from mergegate.tasks.base.stage import home, runs_directory
from mergegate.tasks.base.store import read_runs, store_bytes
from mergegate.tasks.release.report import format_run_time, outcome_of_status, read_history

_NOT_DEPLOYED = "it is not deployed; deploy it with mergegate deploy"
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


def status_command(as_json: JsonOption = False) -> None:
    """Show active runs, schedules, last results and the store."""
    with command_context(as_json) as console:
        now = time.time()
        running = [run for run in read_runs(runs_directory()) if run.is_live]
        last = {record.profile: record for record in read_history(home() / "reports").records}
        schedule_file = Path(SCHEDULES_FILE)
        due = _scheduled_profiles(load_schedules(schedule_file)) if schedule_file.is_file() else []
        size = store_bytes(home() / "store")
        if as_json:
            brief = {"run", "profile", "status", "message", "ended", "version"}
            more = {
                "home": str(home()),
                "running": [{"run": run.run, "profile": run.profile, "seconds": now - run.started} for run in running],
                "due": [entry._asdict() for entry in due],
                "last": [record.model_dump(mode="json", include=brief) for record in last.values()],
                "store_bytes": size,
            }
            deployed = sum(not entry.missing for entry in due)
            message = f"{len(running)} running, {deployed} deployed, {format_bytes(size)} in the store"
            print_answer("running" if running else "idle", message, more)
            return
        for run in running:
            seconds = max(0.0, now - run.started)
            console.print(f"running  {run.profile or run.flow}  since {format_duration(seconds)}  ({run.run})")
        if not running:
            console.print("running  nothing")
        for entry in due:
            if not entry.missing:
                console.print(f"due      {entry.profile}  {entry.schedule}")
        for missing in dict.fromkeys(entry.missing for entry in due if entry.missing):
            profiles = ", ".join(entry.profile for entry in due if entry.missing == missing)
            console.print(f"due      not {profiles}: {missing}")
        if not due:
            console.print(f"due      nothing: no {SCHEDULES_FILE} in this directory")
        for record in last.values():
            style = OUTCOME_STYLES[outcome_of_status(record.status)]
            ended = f"  {format_run_time(record)}  "
            status = Text(record.status, style=style)
            console.print("last     ", Text(record.profile), ended, status, f"  {record.why}", sep="")
        if not last:
            console.print("last     no run has finished here yet")
        console.print(f"store    {format_bytes(size)}")


class _ScheduledProfile(NamedTuple):
    """A profile in ``schedules.yaml``. ``missing`` tells what its runs lack and how to start it, or is empty."""

    profile: str
    schedule: str
    missing: str


def _scheduled_profiles(schedules: Schedules) -> list[_ScheduledProfile]:
    """Return the listed profiles. Their runs need a server, a deployment and a worker."""
    site = find_site(schedules)
    no_server, no_worker, deployed, workers = "", "", set[str](), []
    try:
        with site_client(site) as client:
            from prefect.exceptions import ObjectNotFound

            deployed = set(deployments_on_server(client))
            with suppress(ObjectNotFound):  # the pool of a server that no worker has joined
                client.read_work_pool(POOL)  # unlike the next request, it raises ObjectNotFound
                workers = client.read_workers_for_work_pool(POOL)
            if not any(worker.status == "ONLINE" for worker in workers):
                no_worker = "no worker is online; start one with mergegate worker"
    except InvalidInput as error:
        answers = not error.found.startswith("no server")
        no_server = f"{site.address}: {error.found}" if answers else f"no server answers at {site.address}"
        no_server += f"; {error.remedy}" if answers else "; start it with mergegate server"
    return [
        _ScheduledProfile(
            profile=str(entry.profile),
            schedule=entry.schedule or "when triggered",
            missing=no_server
            or ("" if f"{entry.flow}/{profile_name(entry.profile)}" in deployed else _NOT_DEPLOYED)
            or no_worker,
        )
        for entry in schedules.profiles
    ]


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


_IMPATIENT_S = 30.0


def trigger_command(
    profile: Annotated[
        str, typer.Argument(help="Deployed profile, by name or as FLOW/NAME, or any profile by its file.")
    ],
    wait: Annotated[
        bool, typer.Option("--wait", help="Wait until the run has ended, and exit with its exit code.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Start a release on the next free worker.

    mergegate prints the URL of the page of the run.
    """
    with command_context(as_json, with_state=True) as console:
        from mergegate.flows.outcome import run_name

        schedules = load_optional_schedules()
        site = find_site(schedules)
        with site_client(site) as client:
            on_server = deployments_on_server(client)
            ours = tuple(name for name, existing in on_server.items() if TAG in existing.tags)
            name, parameters = _find_target(profile, schedules, ours)
            if (deployment := on_server.get(name)) is None:
                raise InvalidInput(name, found="it is not deployed", expected="a deployment", remedy="mergegate deploy")
            all_parameters = {**deployment.parameters, **parameters}
            # Name of the run until it starts and chooses its own name.
            run_title = run_name(name.partition("/")[0], all_parameters, time.strftime("%Y-%m-%d"))
            run = client.create_flow_run_from_deployment(deployment.id, parameters=dict(parameters), name=run_title)
            page = page_of_run(run.id, site.address)
            if not as_json:
                console.print(Text(f"{name}: run {run.name}\n  {page}"))
            elif not wait:
                more = {"deployment": name, "run": str(run.id), "page": page}
                print_answer("started", run.name, more)
            if not wait:
                return
            ended = follow_run(client, run.id, _StatePrinter(console))
        if as_json:
            print_answer(ended.state, ended.message, {"run": str(run.id), "page": page})
        else:
            console.print(Text(f"{ended.state}: {ended.message}" if ended.message else ended.state))
        raise typer.Exit(ended.exit_code)


def _find_target(
    name: str, schedules: Schedules | None, deployment_names: tuple[str, ...]
) -> tuple[str, dict[str, str]]:
    """Return the full name of the deployment to run, and parameters that replace its own.

    A file without a deployment of its own runs in ``release/release``.
    """
    if name in deployment_names:
        return name, {}
    file = Path(name)
    by_name = [full_name for full_name in deployment_names if full_name.partition("/")[2] == name]
    if by_name and not file.is_file():
        if len(by_name) > 1 and f"release/{name}" in by_name:
            return f"release/{name}", {}  # the others need their full name: shadow/NAME
        if len(by_name) > 1:
            raise InvalidInput(
                name,
                found=f"{len(by_name)} deployments have this name",
                expected="one deployment",
                remedy=f"write {' or '.join(by_name)}",
            )
        return by_name[0], {}
    if file.is_file():
        for entry in schedules.profiles if schedules else ():
            if entry.profile.resolve() == file.resolve():
                return f"{entry.flow}/{load_profile(file).name}", {}
        load_profile(file)  # reports an invalid profile now
        return "release/release", {"profile": name}
    names = [full_name.partition("/")[2] for full_name in deployment_names]
    raise InvalidInput(
        name,
        found="neither a deployed profile nor a file",
        expected="a profile in schedules.yaml, by its name or its file",
        remedy=suggest(name, names) if deployment_names else "mergegate deploy",
    )


class _StatePrinter:
    """Prints each state of a run once, and a hint if no worker starts it."""

    def __init__(self, console: Console) -> None:
        self._console, self._printed = console, {""}

    def __call__(self, state: str, seconds: float) -> None:
        if state not in self._printed:
            more = ": waits for approval (mergegate approve)" if state.lower() in ("suspended", "paused") else ""
            self._console.print(Text(f"  {state.lower()}{more}", style="dim"))
        elif state in ("Scheduled", "Late", "Pending") and seconds > _IMPATIENT_S and "hint" not in self._printed:
            self._printed.add("hint")
            self._console.print("  no worker has started it yet. Start one (mergegate worker), or wait for a busy one.")
        self._printed.add(state)


def approve_command(
    run: Annotated[
        str | None,
        typer.Argument(help="ID or name of a waiting run, or name of its profile.", show_default="the only one"),
    ] = None,
    reject: Annotated[bool, typer.Option("--reject", help="Reject the release.")] = False,
    reason: Annotated[
        str, typer.Option(help="Reason for the decision. Required with --reject; users are notified of it.")
    ] = "",
    as_json: JsonOption = False,
) -> None:
    """Approve or reject a release that waits on the server.

    mergegate shows the evidence first.
    """
    with command_context(as_json, with_state=True) as console:
        from rich.markdown import Markdown

        from mergegate.flows.operations.run import current_user

        if reject and not reason.strip():
            raise InvalidInput(
                "--reject", found="no reason", expected="--reason TEXT, which is part of the notification"
            )
        site = find_site(load_optional_schedules())
        with site_client(site) as client:
            waiting_run = select_waiting_run(waiting_runs(client), run)
            if not as_json:
                console.print(Markdown(waiting_run.summary))
            answer = client.resume_flow_run(
                waiting_run.id,
                run_input={
                    "publish": not reject,
                    "by": current_user(),
                    "reason": reason,
                    "version": waiting_run.version,
                },
            )
            if answer.status.value != "ACCEPT":
                raise Refused(
                    f"run {waiting_run.name}",
                    found=str(getattr(answer.details, "reason", "") or "it did not accept the answer"),
                    expected="a run that waits for approval",
                    remedy="mergegate approve lists all waiting runs",
                )
        name, page = f"{waiting_run.profile} {waiting_run.version}", page_of_run(waiting_run.id, site.address)
        decision = "rejected" if reject else "approved"
        if as_json:
            facts = {"profile": waiting_run.profile, "version": waiting_run.version, "run": str(waiting_run.id)}
            print_answer(decision, f"{decision} {name}", {**facts, "page": page})
        else:
            console.print(f"{decision} {name}; a worker continues the run")
            console.print(f"  {page}")

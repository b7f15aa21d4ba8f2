"""``mergegate trigger PROFILE``: start a run of a deployed profile on the next free worker."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from mergegate.flows.cli.command import JsonOption, command_context
from mergegate.flows.cli.output import print_answer
from mergegate.flows.cli.server import load_optional_schedules
from mergegate.flows.outcome import run_name
from mergegate.flows.prefect_api import (
    TAG,
    Schedules,
    deployments_on_server,
    find_site,
    follow_run,
    page_of_run,
    site_client,
)
from mergegate.flows.profile import load_profile
from mergegate.merge_core.errors import InvalidInput, suggest

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

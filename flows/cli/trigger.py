"""``mergegate trigger PROFILE``: start a run of a deployed profile on the next free worker."""

from __future__ import annotations

import time
from pathlib import Path

from rich.console import Console
from rich.text import Text

from mergegate.flows.cli.output import print_answer
from mergegate.flows.cli.server import load_optional_schedules
from mergegate.flows.outcome import run_name
from mergegate.flows.prefect_api import (
    Schedules,
    deployment_names,
    find_deployment,
    find_site,
    follow_run,
    site_client,
    start_run,
)
from mergegate.flows.profile import load_profile
from mergegate.merge_core.errors import InvalidInput, suggest

_IMPATIENT_S = 30.0


def trigger_run(named: str, console: Console, as_json: bool, *, wait: bool) -> int:
    """Start a run, and return its exit code if the command waits for it, otherwise 0.

    Args:
        named: Deployed profile by name, as ``release/name``, or by file. ``release/release`` runs a file that is not
            deployed.
        wait: Whether to wait until the run has ended.

    Raises:
        InvalidInput: The name is not deployed, or the server does not answer or denies access.
    """
    schedules = load_optional_schedules()
    site = find_site(schedules)
    with site_client(site) as client:
        name, parameters = _find_target(named, schedules, deployment_names(client))
        deployment = find_deployment(client, name)
        if deployment is None:
            raise InvalidInput(name, found="not deployed", expected="a deployment", remedy="mergegate deploy")
        all_parameters = {**deployment.parameters, **parameters}
        run_title = run_name(name.partition("/")[0], all_parameters, time.strftime("%Y-%m-%d"))
        run = start_run(client, site, deployment.id, parameters, run_title)
        if not as_json:
            console.print(Text(f"{name}: run {run.name}\n  {run.page}"))
        if not wait:
            if as_json:
                more = {"deployment": name, "run": str(run.id), "page": run.page}
                print_answer("started", run.name, more)
            return 0
        ended = follow_run(client, run.id, _StatePrinter(console))
    if as_json:
        print_answer(ended.state, ended.message, {"run": str(run.id), "page": run.page})
    else:
        console.print(Text(f"{ended.state}: {ended.message}" if ended.message else ended.state))
    return ended.exit_code


def _find_target(named: str, schedules: Schedules | None, deployed: tuple[str, ...]) -> tuple[str, dict[str, str]]:
    """Return the full name of the deployment, and parameters that replace its own."""
    if named in deployed:
        return named, {}
    if (by_name := [full_name for full_name in deployed if full_name.partition("/")[2] == named]) and not Path(
        named
    ).is_file():
        if len(by_name) > 1 and f"release/{named}" in by_name:
            return f"release/{named}", {}  # the others need their full name: shadow/NAME
        if len(by_name) > 1:
            raise InvalidInput(named, found="deployed twice", expected=" or ".join(by_name), remedy="name one of them")
        return by_name[0], {}
    if Path(named).is_file():
        for entry in schedules.profiles if schedules else ():
            if entry.profile.resolve() == Path(named).resolve():
                return f"{entry.flow}/{load_profile(Path(named)).name}", {}
        load_profile(Path(named))  # reports an invalid profile now
        return "release/release", {"profile": named}
    raise InvalidInput(
        named,
        found="neither a deployed profile nor a file",
        expected="a profile of schedules.yaml, by its name or its file",
        remedy=suggest(named, [full_name.partition("/")[2] for full_name in deployed])
        if deployed
        else "mergegate deploy",
    )


class _StatePrinter:
    """Prints each state of a run once, and a hint if no worker takes it."""

    def __init__(self, console: Console) -> None:
        self._console, self._printed = console, {""}

    def __call__(self, state: str, seconds: float) -> None:
        if state not in self._printed:
            self._say(state.lower())
        elif state in ("Scheduled", "Late", "Pending") and seconds > _IMPATIENT_S and "impatient" not in self._printed:
            self._printed.add("impatient")
            self._console.print("  nobody has taken it yet: is there a worker (mergegate worker), and is it free?")
        self._printed.add(state)

    def _say(self, state: str) -> None:
        more = ": waits for approval (mergegate approve)" if state in ("suspended", "paused") else ""
        self._console.print(Text(f"  {state}{more}", style="dim"))

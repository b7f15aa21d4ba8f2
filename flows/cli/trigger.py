"""``mergegate trigger PROFILE``: a run of what is deployed, carried out by the next worker that is free."""

from __future__ import annotations

import time
from pathlib import Path

from rich.console import Console
from rich.text import Text

from mergegate.flows.cli.output import print_answer
from mergegate.flows.cli.server import optional_nights
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
    """Start a run; the exit code: of the run when it was waited for, else 0.

    Args:
        named: A deployed profile by its name, as ``release/name``, or by its file. A file that is not deployed is
            carried out by ``release/release``.
        wait: Until it has ended.

    Raises:
        InvalidInput: when nothing of that name is deployed, or the server does not answer or let us in.
    """
    nights = optional_nights()
    site = find_site(nights)
    with site_client(site) as client:
        name, parameters = _meant(named, nights, deployment_names(client))
        deployment = find_deployment(client, name)
        if deployment is None:
            raise InvalidInput(name, found="not deployed", expected="a deployment", remedy="mergegate deploy")
        given = {**deployment.parameters, **parameters}
        called = run_name(name.partition("/")[0], given, time.strftime("%Y-%m-%d"))
        run = start_run(client, site, deployment.id, parameters, called)
        if not as_json:
            console.print(Text(f"{name}: run {run.name}\n  {run.page}"))
        if not wait:
            if as_json:
                more = {"deployment": name, "run": str(run.id), "page": run.page}
                print_answer("started", run.name, more)
            return 0
        ended = follow_run(client, run.id, _Teller(console))
    if as_json:
        print_answer(ended.state, ended.message, {"run": str(run.id), "page": run.page})
    else:
        console.print(Text(f"{ended.state}: {ended.message}" if ended.message else ended.state))
    return ended.exit_code


def _meant(named: str, nights: Schedules | None, deployed: tuple[str, ...]) -> tuple[str, dict[str, str]]:
    """Full name of the deployment, and parameters other than its own."""
    if named in deployed:
        return named, {}
    if (by_name := [one for one in deployed if one.partition("/")[2] == named]) and not Path(named).is_file():
        if len(by_name) > 1 and f"release/{named}" in by_name:
            return f"release/{named}", {}  # the others are named in full: shadow/NAME
        if len(by_name) > 1:
            raise InvalidInput(named, found="deployed twice", expected=" or ".join(by_name), remedy="name one of them")
        return by_name[0], {}
    if Path(named).is_file():
        for night in nights.profiles if nights else ():
            if night.profile.resolve() == Path(named).resolve():
                return f"{night.flow}/{load_profile(Path(named)).name}", {}
        load_profile(Path(named))  # what is wrong with it is said now
        return "release/release", {"profile": named}
    raise InvalidInput(
        named,
        found="neither a deployed profile nor a file",
        expected="a profile of nights.yaml, by its name or its file",
        remedy=suggest(named, [one.partition("/")[2] for one in deployed]) if deployed else "mergegate deploy",
    )


class _Teller:
    """Says each state of a run once, and what may be wrong when nobody takes it."""

    def __init__(self, console: Console) -> None:
        self._console, self._said = console, {""}

    def __call__(self, state: str, seconds: float) -> None:
        if state not in self._said:
            self._say(state.lower())
        elif state in ("Scheduled", "Late", "Pending") and seconds > _IMPATIENT_S and "impatient" not in self._said:
            self._said.add("impatient")
            self._console.print("  nobody has taken it yet: is there a worker (mergegate worker), and is it free?")
        self._said.add(state)

    def _say(self, state: str) -> None:
        more = ": waits for approval (mergegate approve)" if state in ("suspended", "paused") else ""
        self._console.print(Text(f"  {state}{more}", style="dim"))

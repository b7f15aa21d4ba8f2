"""Find the runs that wait for approval."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING
from uuid import UUID

from mergegate.merge_core.errors import InvalidInput

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.client.schemas.objects import FlowRun

QUESTION = "publish-"
"""Prefix of the key of an approval request. The first digits of the release's digest follow it."""


@dataclass(frozen=True)
class WaitingRun:
    """A run that waits for approval of ``version``.

    ``profile`` comes from the name of the deployment. It is empty if the deployment no longer exists. ``summary`` is
    the evidence on the run's page, as Markdown.
    """

    id: UUID
    name: str
    profile: str
    version: str
    summary: str


def waiting_runs(client: SyncPrefectClient) -> tuple[WaitingRun, ...]:
    """Return all runs that wait for approval, the oldest first."""
    from prefect.exceptions import ObjectNotFound

    waiting = []
    for run in suspended_runs(client):
        if keys := question_keys(run):
            summary = json.loads(client.read_flow_run_input(run.id, keys["description"]))
            form = json.loads(client.read_flow_run_input(run.id, keys["schema"]))
            version = form["properties"]["version"]["default"]
            profile = ""
            if run.deployment_id:
                with suppress(ObjectNotFound):  # the run outlives its deployment
                    profile = client.read_deployment(run.deployment_id).name
            waiting.append(WaitingRun(run.id, run.name, profile, str(version), str(summary)))
    return tuple(waiting)


def suspended_runs(client: SyncPrefectClient) -> list[FlowRun]:
    """Return all suspended or paused runs, the oldest first."""
    from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterState, FlowRunFilterStateType
    from prefect.client.schemas.objects import StateType

    paused = FlowRunFilterState(type=FlowRunFilterStateType(any_=[StateType.PAUSED]))
    runs = client.read_flow_runs(flow_run_filter=FlowRunFilter(state=paused))
    return sorted(runs, key=lambda run: run.state.timestamp.timestamp() if run.state else 0.0)


def question_keys(run: FlowRun) -> dict[str, str]:
    """Return the server's keys for the form and the answer of an approval request. Empty for any other run."""
    keys = run.state.state_details.run_input_keyset if run.state else None
    return dict(keys) if keys and f"-{QUESTION}" in keys.get("schema", "") else {}


def select_waiting_run(waiting: tuple[WaitingRun, ...], name: str | None) -> WaitingRun:
    """Return the waiting run whose ID, name or profile is ``name``. Without a name, return the only waiting run.

    Raises:
        InvalidInput: No run matches, or several do.
    """
    matches = [run for run in waiting if name is None or name in (str(run.id), run.name, run.profile)]
    if len(matches) == 1:
        return matches[0]
    listed = "".join(f"\n  {run.profile} {run.version}: run {run.name}, {run.id}" for run in matches or waiting)
    count = f"{len(matches)} runs wait" if matches else "no such run waits"
    raise InvalidInput(
        name or "mergegate approve",
        found=f"{count} for approval{listed}",
        expected="one waiting run",
        remedy="name one of these runs" if matches or waiting else "",
    )

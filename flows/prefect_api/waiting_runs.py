"""List the runs that wait for approval."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING
from uuid import UUID

from mergegate.merge_core.errors import InvalidInput

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.client.schemas.objects import FlowRun

QUESTION = "publish-"
"""Prefix of the keys of approval requests. Digits of the digest follow."""


@dataclass(frozen=True)
class WaitingRun:
    """A run that waits for approval.

    Attributes:
        profile: Name of its profile, from the deployment ``release/<profile>``. Empty if the deployment no longer
            exists.
        version: Version that it would publish.
        summary: Content of its page.
    """

    id: UUID
    name: str
    profile: str
    version: str
    summary: str


def waiting_runs(client: SyncPrefectClient) -> tuple[WaitingRun, ...]:
    """Return every run that waits for approval, the oldest first."""
    waiting = []
    for run in suspended_runs(client):
        if keys := question_keys(run):
            summary = json.loads(client.read_flow_run_input(run.id, keys["description"]))
            form = json.loads(client.read_flow_run_input(run.id, keys["schema"]))
            version = form["properties"]["version"]["default"]
            profile = client.read_deployment(run.deployment_id).name if run.deployment_id else ""
            waiting.append(WaitingRun(run.id, run.name, profile, str(version), str(summary)))
    return tuple(waiting)


def suspended_runs(client: SyncPrefectClient) -> list[FlowRun]:
    """Return every suspended or paused run, the oldest first."""
    from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterState, FlowRunFilterStateType
    from prefect.client.schemas.objects import StateType

    paused = FlowRunFilterState(type=FlowRunFilterStateType(any_=[StateType.PAUSED]))
    runs = client.read_flow_runs(flow_run_filter=FlowRunFilter(state=paused))
    return sorted(runs, key=lambda run: run.state.timestamp.timestamp() if run.state else 0.0)


def question_keys(run: FlowRun) -> dict[str, str]:
    """Return the server's keys of request and answer, or an empty dict if the request is not ours."""
    keys = run.state.state_details.run_input_keyset if run.state else None
    return dict(keys) if keys and f"-{QUESTION}" in keys.get("schema", "") else {}


def select_waiting_run(waiting: tuple[WaitingRun, ...], name: str | None) -> WaitingRun:
    """Return the run with that id, name or profile, or the only one that waits.

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

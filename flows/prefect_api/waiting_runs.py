"""Runs that wait for a person: which there are, what they ask, and the answer."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING
from uuid import UUID

from mergegate.merge_core.errors import InvalidInput, Refused

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.client.schemas.objects import FlowRun

QUESTION = "publish-"
"""What the keys of our questions begin with; then come digits of what is asked about."""


@dataclass(frozen=True)
class WaitingRun:
    """A run that waits for approval.

    Attributes:
        deployment: Its full name is ``release/<profile>``; empty when it has gone.
        version: Of what it would publish.
        summary: What its page shows.
    """

    id: UUID
    name: str
    profile: str
    version: str
    summary: str


def waiting_runs(client: SyncPrefectClient) -> tuple[WaitingRun, ...]:
    """Every run that waits for approval, the oldest first."""
    return tuple(_waiting(client, run) for run in suspended_runs(client) if question_keys(run))


def answer_run(client: SyncPrefectClient, run: WaitingRun, *, publish: bool, by: str, reason: str) -> None:
    """Tell a waiting run what was decided; a worker goes on with it.

    Raises:
        Refused: when it waits no longer, or does not take the answer.
    """
    said = {"publish": publish, "by": by, "reason": reason, "version": run.version}
    answer = client.resume_flow_run(run.id, run_input=said)
    if answer.status.value != "ACCEPT":
        raise Refused(
            f"run {run.name}",
            found=str(getattr(answer.details, "reason", "") or "it did not take the answer"),
            expected="a run that waits for approval",
            remedy="mergegate approve lists those that do",
        )


def suspended_runs(client: SyncPrefectClient) -> list[FlowRun]:
    """Every run that is suspended or paused, for whatever reason, the oldest first."""
    from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterState, FlowRunFilterStateType
    from prefect.client.schemas.objects import StateType

    paused = FlowRunFilterState(type=FlowRunFilterStateType(any_=[StateType.PAUSED]))
    found = client.read_flow_runs(flow_run_filter=FlowRunFilter(state=paused))
    return sorted(found, key=lambda run: run.state.timestamp.timestamp() if run.state else 0.0)


def question_keys(run: FlowRun) -> dict[str, str]:
    """Where the server keeps question and answer; empty where the run asks something that is not ours."""
    found = run.state.state_details.run_input_keyset if run.state else None
    return dict(found) if found and f"-{QUESTION}" in found.get("schema", "") else {}


def _waiting(client: SyncPrefectClient, run: FlowRun) -> WaitingRun:
    keys = question_keys(run)
    summary = json.loads(client.read_flow_run_input(run.id, keys["description"]))
    version = json.loads(client.read_flow_run_input(run.id, keys["schema"]))["properties"]["version"]["default"]
    profile = client.read_deployment(run.deployment_id).name if run.deployment_id else ""
    return WaitingRun(run.id, run.name, profile, str(version), str(summary))


def select_waiting_run(waiting: tuple[WaitingRun, ...], named: str | None) -> WaitingRun:
    """The run that is meant: by id, by its name, by its profile; or the only one.

    Raises:
        InvalidInput: when there is none, or several.
    """
    meant = [one for one in waiting if named is None or named in (str(one.id), one.name, one.profile)]
    if len(meant) == 1:
        return meant[0]
    listed = "".join(f"\n  {one.profile} {one.version}: run {one.name}, {one.id}" for one in meant or waiting)
    raise InvalidInput(
        named or "mergegate approve",
        found=f"{len(meant)} runs wait for approval{listed}" if meant else f"no such run waits for approval{listed}",
        expected="one",
        remedy="name one of them" if meant or waiting else "",
    )

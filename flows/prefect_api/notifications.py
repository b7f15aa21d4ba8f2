"""Define the rules of a project's server: notify operators, and end silent runs and runs without approval.

A rule (Prefect: automation) watches the runs of this project's deployments. Each recipient in ``schedules.yaml`` has
one rule per occasion. The other rules have no recipient: a run that stops sending events is marked as crashed, which
frees its slot, and so is a run that a worker took but never started. A run that is not approved in time is refused.

This module computes the rules from the files. ``automations`` applies them to the server.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from mergegate.flows.prefect_api.deployments import DesiredDeployment
from mergegate.flows.prefect_api.schedules import RESERVED, Occasion, Schedules
from mergegate.flows.prefect_api.site import HEARTBEAT_S

# A run is silent after three missed heartbeats.
SILENCE_S = 3 * HEARTBEAT_S
# Maximum time from the moment a worker takes a run until the run's process reports that it runs. If the worker dies in
# between, no other worker takes the run, but it keeps its slot. Without this limit, no later scheduled run of the
# profile would start. The limit is long because an image may have to be pulled.
START_LIMIT_S = 600
# States between a worker taking a run and the end of the run. Runs in other states are waiting for a worker (Scheduled,
# Late, AwaitingRetry), waiting for a user, or finished.
TAKEN_STATES = ("Pending", "Submitting", "InfrastructurePending", "NotReady")
RUNNING_STATES = ("Running", "Retrying", "Cancelling")
_NAME = "{{ flow_run.name if deployment.name in " + repr(RESERVED) + " else deployment.name }}"
# A state message has several lines. Show the first one, or the second if the first only says "not released".
_LINES = "{% set lines = (flow_run.state.message or '').split('\\n') %}"
_REASON = (
    _LINES
    + "{{ (lines[1] if 'not released' in lines[0] and lines | length > 1 else lines[0]) | trim | truncate(160, True) }}"
)
_PAGE = " · {{ flow_run | ui_url }}"
_STATE = "{{ {'RolledBack': 'rolled back'}.get(flow_run.state.name, flow_run.state.name | lower) }}"

# For each occasion: the states of the run, the message and its subject.
_NOTIFICATIONS: Mapping[Occasion, tuple[tuple[str, ...], str, str]] = {
    "released": (("Released", "Promoted"), f"✓ {_NAME}: {_REASON}{_PAGE}", f"{_NAME} {_STATE}"),
    "refused": (
        ("Refused", "Invalid", "RolledBack", "Killed"),
        f"✗ {_NAME} {_STATE}: {_REASON}{_PAGE}",
        f"{_NAME} {_STATE}",
    ),
    "failed": (
        ("Failed", "Crashed", "TimedOut"),
        f"✗ {_NAME} {_STATE}: {_REASON}{_PAGE}",
        f"{_NAME} {_STATE}",
    ),
    "late": (("Late",), f"! {_NAME} is late: no worker has started it{_PAGE}", f"{_NAME} is late"),
    "approval": (
        ("Suspended",),
        f"? {_NAME} waits for approval: mergegate approve {_NAME}{_PAGE}",
        f"{_NAME} waits for approval",
    ),
}


@dataclass(frozen=True)
class StateChange:
    """The state that a rule sets a run to, with the reason."""

    state: Literal["CRASHED", "FAILED"]
    name: str
    message: str


@dataclass(frozen=True)
class Message:
    """A notification for one of the recipients, by position in ``schedules.yaml``. The server renders it with Jinja."""

    recipient: int
    subject: str
    body: str


@dataclass(frozen=True)
class DesiredRule:
    """Desired state of a rule on the server.

    The events in ``on`` trigger it, if they come from a run of ``deployments``. If ``silence_s`` is set, the rule waits
    for this many seconds, and triggers only if no other event of the run follows.
    """

    name: str
    deployments: tuple[str, ...]
    on: tuple[str, ...]
    then: Message | StateChange
    silence_s: float | None = None


def desired_rules(schedules: Schedules, deployments: Sequence[DesiredDeployment]) -> tuple[DesiredRule, ...]:
    """Return all rules of a project: those that end runs first, then notifications."""
    all_names = tuple(deployment.full_name for deployment in deployments)
    rules = [
        DesiredRule(
            "mergegate: a silent run has crashed",
            all_names,
            (*(f"prefect.flow-run.{state}" for state in RUNNING_STATES), "prefect.flow-run.heartbeat"),
            StateChange("CRASHED", "Crashed", f"the run has been silent for {SILENCE_S} seconds"),
            SILENCE_S,
        ),
        DesiredRule(
            "mergegate: a run that did not start has crashed",
            all_names,
            tuple(f"prefect.flow-run.{state}" for state in TAKEN_STATES),
            StateChange(
                "CRASHED", "Crashed", f"a worker took the run, but it did not start within {START_LIMIT_S} seconds"
            ),
            START_LIMIT_S,
        ),
    ]
    for deployment in deployments:
        approval = deployment.profile.approval_for(deployment.flow) if deployment.profile else None
        if approval is not None:
            action = "promoted" if deployment.flow == "shadow" else "published"
            message = f"the run was not approved within {approval.timeout}, so nothing is {action}"
            rules.append(
                DesiredRule(
                    f"mergegate: {deployment.full_name} is refused if it is not approved",
                    (deployment.full_name,),
                    ("prefect.flow-run.Suspended",),
                    StateChange("FAILED", "Refused", message),
                    max(10.0, approval.timeout_s),
                )
            )
    kinds: list[str] = [recipient.to for recipient in schedules.notify]
    for number, recipient in enumerate(schedules.notify):
        label: str = recipient.to  # slack, or slack 2 if there are several
        if kinds.count(label) > 1:
            label += f" {kinds[: number + 1].count(label)}"
        for occasion in dict.fromkeys(recipient.events):
            states, body, subject = _NOTIFICATIONS[occasion]
            rules.append(
                DesiredRule(
                    f"mergegate: notify {label} of {occasion}",
                    all_names,
                    tuple(f"prefect.flow-run.{state}" for state in states),
                    Message(number, subject, body),
                )
            )
    return tuple(rules)

"""Define the rules of a project's server, and update its automations to match them.

The rules notify operators, and end silent runs and runs without approval.

The description of an automation identifies its project, so other automations on the server stay untouched. The address
of a recipient comes from the environment of ``mergegate deploy``. Prefect stores it as an encrypted block.

A rule (Prefect: automation) watches the runs of this project's deployments. Each recipient in ``schedules.yaml`` has
one rule per occasion. The other rules have no recipient: a run that stops sending events is marked as crashed, which
frees its slot, and so is a run that a worker took but never started. A run that is not approved in time is refused.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

from mergegate.flows.prefect_api.deployments import DeployChange, DesiredDeployment
from mergegate.flows.prefect_api.schedules import RESERVED, SCHEDULES_FILE, Occasion, Recipient, Schedules
from mergegate.flows.prefect_api.site import HEARTBEAT_S, Site
from mergegate.merge_core.errors import InvalidInput

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.client.schemas.objects import BlockDocument
    from prefect.events.schemas.automations import Automation, AutomationCore


# The server processes an event again if its database was busy the first time. This period, counted from the time of the
# event, keeps a rule from acting twice.
_ONCE_S = 10


def sync_rules(
    client: SyncPrefectClient,
    rules: Sequence[DesiredRule],
    recipients: Sequence[Recipient],
    ids: Mapping[str, str],
    site: Site,
) -> tuple[tuple[str, DeployChange], ...]:
    """Create, replace and delete rules until the server matches, and return the name and the change of each rule.

    ``recipients`` are in the order of ``schedules.yaml``. ``ids`` maps full names of deployments to their IDs.

    Raises:
        InvalidInput: An address is not in the environment, or a block does not exist in Prefect.
    """
    from prefect.events.schemas.automations import Automation as AutomationOnServer
    from prefect.events.schemas.automations import AutomationCore
    from pydantic import TypeAdapter

    # The description identifies the project, so other rules on the server stay untouched.
    owner = f"Kept by mergegate deploy in {site.root}. The next deploy reverts manual changes."
    # Prefect requires short and plain block names.
    prefix = f"mergegate-{hashlib.sha256(str(site.root).encode()).hexdigest()[:8]}-"
    documents: list[BlockDocument] = []
    while batch := client.read_block_documents(limit=200, offset=len(documents), include_secrets=False):
        documents += batch
    existing_blocks = {document.name: str(document.id) for document in documents if document.name}
    blocks = [_block(recipient, number, prefix, existing_blocks) for number, recipient in enumerate(recipients)]
    on_server: list[Automation] = []
    while page := client.request(
        "POST", "/automations/filter", json={"limit": 200, "offset": len(on_server), "sort": "NAME_ASC"}
    ).json():
        on_server += TypeAdapter(list[AutomationOnServer]).validate_python(page)
    existing_rules = {automation.name: automation for automation in on_server if automation.description == owner}
    changes: list[tuple[str, DeployChange]] = []
    for rule in rules:
        core = AutomationCore.model_validate(_rule_fields(rule, blocks, ids, owner))
        if (existing := existing_rules.get(rule.name)) is None:
            client.create_automation(core)
            changes.append((rule.name, "made"))
        elif _meaning(existing) != _meaning(core):
            # The new rule must not count events that the old one saw, so replace it.
            client.delete_automation(existing.id)
            client.create_automation(core)
            changes.append((rule.name, "changed"))
        else:
            changes.append((rule.name, "unchanged"))
    for name in sorted(existing_rules.keys() - {rule.name for rule in rules}):
        client.delete_automation(existing_rules[name].id)
        changes.append((name, "removed"))
    for document in documents:  # delete the blocks of removed recipients
        if document.name and document.name.startswith(prefix) and str(document.id) not in blocks:
            client.delete_block_document(document.id)
    return tuple(changes)


def _rule_fields(rule: DesiredRule, blocks: Sequence[str], ids: Mapping[str, str], owner: str) -> dict[str, object]:
    watched = [f"prefect.deployment.{ids[name]}" for name in rule.deployments]
    trigger: dict[str, object] = {
        "type": "event",
        "match": {"prefect.resource.id": "prefect.flow-run.*"},
        "match_related": {"prefect.resource.role": "deployment", "prefect.resource.id": watched},
        "for_each": {"prefect.resource.id"},
        "threshold": 1,
    }
    if rule.silence_s is None:
        trigger |= {"posture": "Reactive", "expect": set(rule.on), "within": timedelta(seconds=_ONCE_S)}
    else:
        # Any event of the run is a sign of life. A state that this code does not know must not count as silence.
        trigger |= {
            "posture": "Proactive",
            "after": set(rule.on),
            "expect": {"prefect.flow-run.*"},
            "within": timedelta(seconds=rule.silence_s),
        }
    then = rule.then
    action: dict[str, object]
    if isinstance(then, Message):
        block = blocks[then.recipient]
        action = {"type": "send-notification", "block_document_id": block, "subject": then.subject, "body": then.body}
    else:
        action = {"type": "change-flow-run-state", "state": then.state, "name": then.name, "message": then.message}
    return {"name": rule.name, "description": owner, "enabled": True, "trigger": trigger, "actions": [action]}


def _meaning(rule: Automation | AutomationCore) -> object:
    """Return the parts of a rule that define its effect, in comparable form. Users decide whether it is enabled."""
    trigger = rule.trigger.model_dump(mode="json", exclude={"id"})
    return _sorted(trigger), [_sorted(action.model_dump(mode="json")) for action in rule.actions]


def _sorted(value: Any) -> Any:
    """Sort all lists in ``value``, because the server returns sets as lists in any order."""
    if isinstance(value, dict):
        return {name: _sorted(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return sorted((_sorted(inner) for inner in value), key=str)
    return value


def _block(recipient: Recipient, number: int, prefix: str, existing_blocks: Mapping[str, str]) -> str:
    """Return the ID of the block that sends to the recipient.

    If the address is in the environment, create or update the block. Otherwise, use the existing one.
    ``existing_blocks`` maps names of blocks to their IDs.
    """
    from prefect.blocks.core import Block
    from prefect.blocks.notifications import CustomWebhookNotificationBlock, SlackWebhook
    from prefect.types import SecretDict
    from pydantic import SecretStr

    name = prefix + f"{recipient.to}-{recipient.variable or ''}".lower().replace("_", "-")
    if recipient.to == "block":
        try:
            block_on_server: Any = Block.load(recipient.address)
        except ValueError:
            raise InvalidInput(
                f"{SCHEDULES_FILE}: notify[{number}].address",
                found=f"Prefect does not have a block {recipient.address}",
                expected="TYPE/NAME of a notification block",
                remedy="create it on Prefect's pages (Blocks), or use to: webhook",
            ) from None
        return str(block_on_server._block_document_id)
    address = os.environ.get(recipient.variable or "", "").strip()
    kinds = ("mailto://", "mailtos://") if recipient.to == "mail" else ("http://", "https://")
    if address and not address.startswith(kinds):
        raise InvalidInput(  # the error does not show the value, which may be a secret
            f"{SCHEDULES_FILE}: notify[{number}].address",
            found=f"the environment variable {recipient.variable} does not contain such an address",
            expected=" or ".join(kinds) + "…",
        )
    if not address:
        if name not in existing_blocks:
            raise InvalidInput(
                f"{SCHEDULES_FILE}: notify[{number}].address",
                found=f"the environment variable {recipient.variable} is not set",
                expected="the address of the recipient",
                remedy=f"export {recipient.variable}=… and run mergegate deploy again; Prefect stores the address",
            )
        return existing_blocks[name]
    block: Block
    if recipient.to == "mail":
        # Prefect has no block for SMTP. This one passes any address to Apprise, which supports it.
        block = SlackWebhook(url=SecretStr(address))
    else:
        template = {"text": "{{body}}"} if recipient.to == "slack" else {"title": "{{subject}}", "text": "{{body}}"}
        block = CustomWebhookNotificationBlock(
            name="mergegate", url="{{address}}", json_data=template, secrets=SecretDict({"address": address})
        )
    return str(block.save(name, overwrite=True))


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

"""Keep the rules on the server in step with ``schedules.yaml``: notifications, and reactions to silent runs.

A rule (Prefect: automation) watches the runs of this project's deployments. Each recipient has one rule per occasion.
Three rules need no recipient. A run without a sign of life is marked as crashed, which frees its slot. The same happens
to a run that a worker took and never started. A run that is not approved in time is refused. The desired rules are a
pure function of the files (:func:`desired_rules`). The description of a rule identifies the project, so other rules on
the server stay untouched.

An address or password comes from the environment at deployment time. Prefect stores it as an encrypted block.
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
    from prefect.events.schemas.automations import Automation, AutomationCore

# Three missed heartbeats.
SILENCE_S = 3 * HEARTBEAT_S
# Time limit between a worker taking a run and the run's process reporting that it runs. If a worker dies in that time,
# it leaves a run that no other worker takes and that keeps its slot. Without this limit, no later scheduled run of the
# profile would start. The limit is long because an image may have to be pulled.
BEGIN_S = 600
# States between a worker taking a run and the end of the run. Runs in other states are waiting for a worker (Scheduled,
# Late, AwaitingRetry), waiting for a user, or finished.
TAKEN = ("Pending", "Submitting", "InfrastructurePending", "NotReady")
BEGUN = ("Running", "Retrying", "Cancelling")
# The server processes an event again if its database was busy the first time. Without a period, counted from the time
# of the event, the rule would act each time.
_ONCE_S = 10

_WHO = "{{ flow_run.name if deployment.name in " + repr(RESERVED) + " else deployment.name }}"
# A message has several lines. The first one is informative unless it only says that nothing was released.
_LINES = "{% set said = (flow_run.state.message or '').split('\\n') %}"
_WHY = (
    _LINES
    + "{{ (said[1] if 'not released' in said[0] and said | length > 1 else said[0]) | trim | truncate(160, True) }}"
)
_PAGE = " · {{ flow_run | ui_url }}"
_REFUSAL = "{{ {'RolledBack': 'rolled back'}.get(flow_run.state.name, flow_run.state.name | lower) }}"

# For each occasion: the states of the run, the message and its subject.
_NOTIFICATIONS: Mapping[Occasion, tuple[tuple[str, ...], str, str]] = {
    "released": (("Released", "Promoted"), f"✓ {_WHO}: {_WHY}{_PAGE}", f"{_WHO} {_REFUSAL}"),
    "refused": (
        ("Refused", "Invalid", "RolledBack", "Killed"),
        f"✗ {_WHO} {_REFUSAL}: {_WHY}{_PAGE}",
        f"{_WHO} {_REFUSAL}",
    ),
    "failed": (
        ("Failed", "Crashed", "TimedOut"),
        f"✗ {_WHO} {_REFUSAL}: {_WHY}{_PAGE}",
        f"{_WHO} {_REFUSAL}",
    ),
    "late": (("Late",), f"! {_WHO} is late: no worker has taken it{_PAGE}", f"{_WHO} is late"),
    "approval": (
        ("Suspended",),
        f"? {_WHO} waits for approval: mergegate approve {_WHO}{_PAGE}",
        f"{_WHO} waits for approval",
    ),
}


@dataclass(frozen=True)
class StateChange:
    """State that a silent run is set to, with the reason."""

    state: Literal["CRASHED", "FAILED"]
    name: str
    message: str


@dataclass(frozen=True)
class Message:
    """A notification to one of the recipients. The server renders subject and body with Jinja."""

    recipient: int
    subject: str
    body: str


@dataclass(frozen=True)
class DesiredRule:
    """Desired state of a rule on the server.

    Attributes:
        deployments: Full names of the deployments whose runs it watches.
        on: Events that trigger the rule.
        silence_s: If set, the rule triggers when no event follows ``on`` for this many seconds.
    """

    name: str
    deployments: tuple[str, ...]
    on: tuple[str, ...]
    then: Message | StateChange
    silence_s: float | None = None


def desired_rules(schedules: Schedules, deployments: Sequence[DesiredDeployment]) -> tuple[DesiredRule, ...]:
    """Return all rules of a project: reactions to silence first, then notifications."""
    all_names = tuple(deployment.full_name for deployment in deployments)
    rules = [
        DesiredRule(
            "mergegate: a run without a sign of life has crashed",
            all_names,
            (*(f"prefect.flow-run.{state}" for state in BEGUN), "prefect.flow-run.heartbeat"),
            StateChange("CRASHED", "Crashed", f"nothing was heard from it for {SILENCE_S} seconds"),
            SILENCE_S,
        ),
        DesiredRule(
            "mergegate: a run that was taken and not begun has crashed",
            all_names,
            tuple(f"prefect.flow-run.{state}" for state in TAKEN),
            StateChange("CRASHED", "Crashed", f"a worker took it and it did not begin within {BEGIN_S} seconds"),
            BEGIN_S,
        ),
    ]
    for deployment in deployments:
        approval = deployment.profile.asks(deployment.flow) if deployment.profile else None
        if approval is not None:
            action = "promoted" if deployment.flow == "shadow" else "published"
            message = f"nobody approved it within {approval.timeout}: nothing is {action}"
            rules.append(
                DesiredRule(
                    f"mergegate: {deployment.full_name} is refused without approval",
                    (deployment.full_name,),
                    ("prefect.flow-run.Suspended",),
                    StateChange("FAILED", "Refused", message),
                    max(10.0, approval.timeout_s),
                )
            )
    for number, recipient in enumerate(schedules.notify):
        for occasion in dict.fromkeys(recipient.events):
            states, body, subject = _NOTIFICATIONS[occasion]
            rules.append(
                DesiredRule(
                    f"mergegate: tell {_label(schedules, number)} of {occasion}",
                    all_names,
                    tuple(f"prefect.flow-run.{state}" for state in states),
                    Message(number, subject, body),
                )
            )
    return tuple(rules)


def sync_rules(
    client: SyncPrefectClient,
    rules: Sequence[DesiredRule],
    recipients: Sequence[Recipient],
    ids: Mapping[str, str],
    site: Site,
) -> tuple[tuple[str, DeployChange], ...]:
    """Create, replace and delete rules until the server matches, and return the change of each rule.

    Args:
        client: Client of the server.
        rules: Desired rules.
        recipients: Recipients in the order of ``schedules.yaml``.
        ids: Id of each deployment, by its full name.
        site: Site of the project.

    Raises:
        InvalidInput: An address is not in the environment, or a block does not exist in Prefect.
    """
    from prefect.events.schemas.automations import AutomationCore

    blocks = [_block(client, recipient, number, site) for number, recipient in enumerate(recipients)]
    owner = _owner(site)
    existing_rules = {
        rule_on_server.name: rule_on_server
        for rule_on_server in _automations(client)
        if rule_on_server.description == owner
    }
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
    _delete_unused_blocks(client, blocks, site)
    return tuple(changes)


def _label(schedules: Schedules, number: int) -> str:
    """Return ``slack``, or ``slack 2`` if there are several."""
    kinds = [recipient.to for recipient in schedules.notify]
    same = kinds[: number + 1].count(kinds[number])
    return kinds[number] + (f" {same}" if kinds.count(kinds[number]) > 1 else "")


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
    """Return the parts of a rule that define its effect, as plain comparable values.

    Whether the rule is enabled is left to the user.
    """
    trigger = rule.trigger.model_dump(mode="json", exclude={"id"})
    return _sorted(trigger), [_sorted(action.model_dump(mode="json")) for action in rule.actions]


def _sorted(value: Any) -> Any:
    """Sort lists, because the server returns sets as lists in any order."""
    if isinstance(value, dict):
        return {name: _sorted(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return sorted((_sorted(inner) for inner in value), key=str)
    return value


def _automations(client: SyncPrefectClient) -> list[Automation]:
    from prefect.events.schemas.automations import Automation as Kept
    from pydantic import TypeAdapter

    automations: list[Automation] = []
    while page := client.request(
        "POST", "/automations/filter", json={"limit": 200, "offset": len(automations), "sort": "NAME_ASC"}
    ).json():
        automations += TypeAdapter(list[Kept]).validate_python(page)
    return automations


def _owner(site: Site) -> str:
    return f"Kept by mergegate deploy in {site.root}. Changes by hand are undone by the next one."


def _prefix(site: Site) -> str:
    """Return the prefix of this project's blocks. Prefect requires short and plain block names."""
    return f"mergegate-{hashlib.sha256(str(site.root).encode()).hexdigest()[:8]}-"


def _block(client: SyncPrefectClient, recipient: Recipient, number: int, site: Site) -> str:
    """Return the id of the block that sends to the recipient.

    If the address is in the environment, create or update the block. Otherwise use the existing one.
    """
    from prefect.blocks.core import Block
    from prefect.blocks.notifications import CustomWebhookNotificationBlock, SlackWebhook
    from prefect.types import SecretDict
    from pydantic import SecretStr

    name = _prefix(site) + f"{recipient.to}-{recipient.variable or ''}".lower().replace("_", "-")
    if recipient.to == "block":
        try:
            block_on_server: Any = Block.load(recipient.address)
        except ValueError:
            raise InvalidInput(
                f"{SCHEDULES_FILE}: tell[{number}].address",
                found=f"Prefect has no block {recipient.address}",
                expected="TYPE/NAME of a notification block",
                remedy="make it on Prefect's pages (Blocks), or use to: webhook",
            ) from None
        return str(block_on_server._block_document_id)
    if not (address := _address(recipient, number)):
        ids = [document.id for document in client.read_block_documents(limit=200) if document.name == name]
        if not ids:
            raise InvalidInput(
                f"{SCHEDULES_FILE}: tell[{number}].address",
                found=f"the environment variable {recipient.variable} is not set",
                expected="what it is to be sent to",
                remedy=f"export {recipient.variable}=… and call mergegate deploy again; Prefect keeps it from then on",
            )
        return str(ids[0])
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


def _address(recipient: Recipient, number: int) -> str:
    """Return the address from the environment, or an empty string if it is not set.

    Raises:
        InvalidInput: The value is not an address. The error does not show it.
    """
    address = os.environ.get(recipient.variable or "", "").strip()
    if not address:
        return ""
    kinds = ("mailto://", "mailtos://") if recipient.to == "mail" else ("http://", "https://")
    if not address.startswith(kinds):
        raise InvalidInput(
            f"{SCHEDULES_FILE}: tell[{number}].address",
            found=f"{recipient.variable} holds no such address",
            expected=" or ".join(kinds) + "…",
        )
    return address


def _delete_unused_blocks(client: SyncPrefectClient, used: Sequence[str], site: Site) -> None:
    """Delete the blocks of removed recipients."""
    for block in client.read_block_documents(limit=200):
        if block.name and block.name.startswith(_prefix(site)) and str(block.id) not in used:
            client.delete_block_document(block.id)

"""Who is told what, and what is done about silence: rules on the server, kept in step with ``nights.yaml``.

A rule (Prefect: automation) watches the runs of this project's deployments. Each recipient has one for each occasion;
three need no recipient: a run that nothing is heard from any more has crashed, which frees its slot, so has one that a
worker took and never began, and one that nobody approved in time is refused. What should be there is a pure function of
the files (:func:`desired_rules`); rules of this project are known by their description, so whatever else is there
stays.

An address or password comes from the environment at this moment and is kept by Prefect as a block, encrypted.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

from mergegate.flows.prefect_api.deployments import DeployChange, DesiredDeployment
from mergegate.flows.prefect_api.schedules import NIGHTS, RESERVED, Occasion, Recipient, Schedules
from mergegate.flows.prefect_api.site import HEARTBEAT_S, Site
from mergegate.merge_core.errors import InvalidInput

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.events.schemas.automations import Automation, AutomationCore

# Three heartbeats that did not come.
SILENCE_S = 3 * HEARTBEAT_S
# Between a worker taking a run and its process saying that it runs. A worker that dies in these seconds leaves a run
# that no other worker takes and that holds its slot: without an end, no later night of the profile would be carried
# out. It is long because an image may have to be pulled meanwhile.
BEGIN_S = 600
# Names of the states that Prefect gives a run from when a worker takes it to its end. Others are a worker's to take
# (Scheduled, Late, AwaitingRetry), a person's to answer, or final.
TAKEN = ("Pending", "Submitting", "InfrastructurePending", "NotReady")
BEGUN = ("Running", "Retrying", "Cancelling")
# The server looks at an event again when its database was busy the first time. Without a span of time, counted from
# when the event occurred, a rule would be carried out each time.
_ONCE_S = 10

_WHO = "{{ flow_run.name if deployment.name in " + repr(RESERVED) + " else deployment.name }}"
# A message has several lines. The first says what it is about, unless it only says that nothing was released.
_LINES = "{% set said = (flow_run.state.message or '').split('\\n') %}"
_WHY = (
    _LINES
    + "{{ (said[1] if 'not released' in said[0] and said | length > 1 else said[0]) | trim | truncate(160, True) }}"
)
_PAGE = " · {{ flow_run | ui_url }}"
_REFUSAL = "{{ {'RolledBack': 'rolled back'}.get(flow_run.state.name, flow_run.state.name | lower) }}"

# Of each occasion: names of states that a run comes into, what the message says, its subject.
_TOLD: Mapping[Occasion, tuple[tuple[str, ...], str, str]] = {
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
    """What is done about silence: the run is brought into a state, with its reason."""

    state: Literal["CRASHED", "FAILED"]
    name: str
    message: str


@dataclass(frozen=True)
class Message:
    """What is sent, and to which of the recipients. Subject and body are Jinja, rendered by the server."""

    recipient: int
    subject: str
    body: str


@dataclass(frozen=True)
class DesiredRule:
    """A rule as it should stand on the server.

    Attributes:
        deployments: Full names of those whose runs it watches.
        on: Events: it is carried out when one of them is seen.
        silence_s: The other way round: it is carried out when for so many seconds after ``on`` nothing was heard.
    """

    name: str
    deployments: tuple[str, ...]
    on: tuple[str, ...]
    then: Message | StateChange
    silence_s: float | None = None


def desired_rules(nights: Schedules, deployments: Sequence[DesiredDeployment]) -> tuple[DesiredRule, ...]:
    """All rules of a project: what is done about silence, then what is said to whom."""
    everywhere = tuple(one.full_name for one in deployments)
    rules = [
        DesiredRule(
            "mergegate: a run without a sign of life has crashed",
            everywhere,
            (*(f"prefect.flow-run.{state}" for state in BEGUN), "prefect.flow-run.heartbeat"),
            StateChange("CRASHED", "Crashed", f"nothing was heard from it for {SILENCE_S} seconds"),
            SILENCE_S,
        ),
        DesiredRule(
            "mergegate: a run that was taken and not begun has crashed",
            everywhere,
            tuple(f"prefect.flow-run.{state}" for state in TAKEN),
            StateChange("CRASHED", "Crashed", f"a worker took it and it did not begin within {BEGIN_S} seconds"),
            BEGIN_S,
        ),
    ]
    for one in deployments:
        asks = one.profile.asks(one.flow) if one.profile else None
        if asks is not None:
            done = "promoted" if one.flow == "shadow" else "published"
            why = f"nobody approved it within {asks.timeout}: nothing is {done}"
            rules.append(
                DesiredRule(
                    f"mergegate: {one.full_name} is refused without approval",
                    (one.full_name,),
                    ("prefect.flow-run.Suspended",),
                    StateChange("FAILED", "Refused", why),
                    max(10.0, asks.timeout_s),
                )
            )
    for number, recipient in enumerate(nights.tell):
        for occasion in dict.fromkeys(recipient.of):
            states, body, subject = _TOLD[occasion]
            rules.append(
                DesiredRule(
                    f"mergegate: tell {_label(nights, number)} of {occasion}",
                    everywhere,
                    tuple(f"prefect.flow-run.{state}" for state in states),
                    Message(number, subject, body),
                )
            )
    return tuple(rules)


def sync_rules(
    client: SyncPrefectClient,
    wanted: Sequence[DesiredRule],
    recipients: Sequence[Recipient],
    ids: Mapping[str, str],
    site: Site,
) -> tuple[tuple[str, DeployChange], ...]:
    """Bring the rules of this project on the server in step: what was done about each.

    Args:
        ids: Of each deployment, by its full name.

    Raises:
        InvalidInput: when an address is not in the environment, or a block is not in Prefect.
    """
    from prefect.events.schemas.automations import AutomationCore

    blocks = [_block(client, recipient, number, site) for number, recipient in enumerate(recipients)]
    owner = _owner(site)
    there = {one.name: one for one in _automations(client) if one.description == owner}
    done: list[tuple[str, DeployChange]] = []
    for rule in wanted:
        core = AutomationCore.model_validate(_as_prefect_has_it(rule, blocks, ids, owner))
        if (present := there.get(rule.name)) is None:
            client.create_automation(core)
            done.append((rule.name, "made"))
        elif _meaning(present) != _meaning(core):
            # Nothing of what it has seen belongs to the new rule: it begins anew.
            client.delete_automation(present.id)
            client.create_automation(core)
            done.append((rule.name, "changed"))
        else:
            done.append((rule.name, "unchanged"))
    for name in sorted(there.keys() - {rule.name for rule in wanted}):
        client.delete_automation(there[name].id)
        done.append((name, "removed"))
    _forget_blocks(client, blocks, site)
    return tuple(done)


def _label(nights: Schedules, number: int) -> str:
    """``slack``; of several, ``slack 2``."""
    kinds = [one.to for one in nights.tell]
    same = kinds[: number + 1].count(kinds[number])
    return kinds[number] + (f" {same}" if kinds.count(kinds[number]) > 1 else "")


def _as_prefect_has_it(
    rule: DesiredRule, blocks: Sequence[str], ids: Mapping[str, str], owner: str
) -> dict[str, object]:
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
        # Any event of the run is a sign of life: a state that nobody thought of must not be taken for silence.
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
    """What of a rule decides what it does, as plain values that compare. Whether it is switched on is a person's."""
    trigger = rule.trigger.model_dump(mode="json", exclude={"id"})
    return _sorted(trigger), [_sorted(action.model_dump(mode="json")) for action in rule.actions]


def _sorted(value: Any) -> Any:
    """Sets come back as lists in any order."""
    if isinstance(value, dict):
        return {name: _sorted(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return sorted((_sorted(inner) for inner in value), key=str)
    return value


def _automations(client: SyncPrefectClient) -> list[Automation]:
    from prefect.events.schemas.automations import Automation as Kept
    from pydantic import TypeAdapter

    found: list[Automation] = []
    while page := client.request(
        "POST", "/automations/filter", json={"limit": 200, "offset": len(found), "sort": "NAME_ASC"}
    ).json():
        found += TypeAdapter(list[Kept]).validate_python(page)
    return found


def _owner(site: Site) -> str:
    return f"Kept by mergegate deploy in {site.root}. Changes by hand are undone by the next one."


def _prefix(site: Site) -> str:
    """What the blocks of this project are called; names of blocks are short and plain."""
    return f"mergegate-{hashlib.sha256(str(site.root).encode()).hexdigest()[:8]}-"


def _block(client: SyncPrefectClient, recipient: Recipient, number: int, site: Site) -> str:
    """Id of the block that sends to the recipient: made or brought up to date where its address is in the environment,
    else as it was."""
    from prefect.blocks.core import Block
    from prefect.blocks.notifications import CustomWebhookNotificationBlock, SlackWebhook
    from prefect.types import SecretDict
    from pydantic import SecretStr

    name = _prefix(site) + f"{recipient.to}-{recipient.variable or ''}".lower().replace("_", "-")
    if recipient.to == "block":
        try:
            found: Any = Block.load(recipient.address)
        except ValueError:
            raise InvalidInput(
                f"{NIGHTS}: tell[{number}].address",
                found=f"Prefect has no block {recipient.address}",
                expected="TYPE/NAME of a notification block",
                remedy="make it on Prefect's pages (Blocks), or use to: webhook",
            ) from None
        return str(found._block_document_id)
    if not (address := _address(recipient, number)):
        kept = [one.id for one in client.read_block_documents(limit=200) if one.name == name]
        if not kept:
            raise InvalidInput(
                f"{NIGHTS}: tell[{number}].address",
                found=f"the environment variable {recipient.variable} is not set",
                expected="what it is to be sent to",
                remedy=f"export {recipient.variable}=… and call mergegate deploy again; Prefect keeps it from then on",
            )
        return str(kept[0])
    block: Block
    if recipient.to == "mail":
        # Prefect has no block for SMTP; this one hands any address to Apprise, which does.
        block = SlackWebhook(url=SecretStr(address))
    else:
        told = {"text": "{{body}}"} if recipient.to == "slack" else {"title": "{{subject}}", "text": "{{body}}"}
        block = CustomWebhookNotificationBlock(
            name="mergegate", url="{{address}}", json_data=told, secrets=SecretDict({"address": address})
        )
    return str(block.save(name, overwrite=True))


def _address(recipient: Recipient, number: int) -> str:
    """From the environment; empty where it is not there.

    Raises:
        InvalidInput: for one that is no address; it is not shown.
    """
    address = os.environ.get(recipient.variable or "", "").strip()
    if not address:
        return ""
    kinds = ("mailto://", "mailtos://") if recipient.to == "mail" else ("http://", "https://")
    if not address.startswith(kinds):
        raise InvalidInput(
            f"{NIGHTS}: tell[{number}].address",
            found=f"{recipient.variable} holds no such address",
            expected=" or ".join(kinds) + "…",
        )
    return address


def _forget_blocks(client: SyncPrefectClient, used: Sequence[str], site: Site) -> None:
    """What was made for recipients that are gone."""
    for block in client.read_block_documents(limit=200):
        if block.name and block.name.startswith(_prefix(site)) and str(block.id) not in used:
            client.delete_block_document(block.id)

"""Update the automations on the server to match the rules of ``notifications``.

The description of an automation identifies its project, so other automations on the server stay untouched. The address
of a recipient comes from the environment of ``mergegate deploy``. Prefect stores it as an encrypted block.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from mergegate.flows.prefect_api.deployments import DeployChange
from mergegate.flows.prefect_api.notifications import DesiredRule, Message
from mergegate.flows.prefect_api.schedules import SCHEDULES_FILE, Recipient
from mergegate.flows.prefect_api.site import Site
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

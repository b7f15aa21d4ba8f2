"""``mergegate deploy``: keep the server in step with ``schedules.yaml``. A second call changes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from mergegate.flows.cli.output import print_answer
from mergegate.flows.prefect_api import (
    SCHEDULES_FILE,
    desired_deployments,
    desired_rules,
    find_site,
    load_schedules,
    make_pool,
    site_client,
    sync_deployments,
    sync_rules,
)

_MARKS = {"made": "+", "changed": "~", "unchanged": "=", "removed": "-"}


def deploy_schedules(console: Console, as_json: bool) -> None:
    """Create, change and remove deployments until the server matches the file, and print the changes.

    Raises:
        InvalidInput: The file or a profile is invalid, or the server does not answer or denies access.
    """
    schedules = load_schedules(Path(SCHEDULES_FILE))
    site = find_site(schedules)
    deployments = desired_deployments(schedules, site.root)
    with site_client(site) as client:
        make_pool(client)
        changes = sync_deployments(client, deployments, site)
        ids = {change.name: change.id for change in changes}
        rules = sync_rules(client, desired_rules(schedules, deployments), schedules.notify, ids, site)
    if as_json:
        more = {"server": site.address, "deployments": [change._asdict() for change in changes], "rules": dict(rules)}
        print_answer("deployed", f"{len(changes)} deployments", more)
        return
    descriptions = {deployment.full_name: deployment.told() for deployment in deployments}
    width = max(len(change.name) for change in changes)
    for change in changes:
        description = descriptions.get(change.name, "removed")
        console.print(Text(f"  {_MARKS[change.change]} {change.name:<{width}}  {description}".rstrip()))
    for name, rule_change in rules:
        if rule_change != "unchanged":
            console.print(Text(f"  {_MARKS[rule_change]} {name.removeprefix('mergegate: ')}"))
    kinds = [*(change.change for change in changes), *(rule_change for _, rule_change in rules)]
    console.print(f"{site.address}: {', '.join(_counts(kinds))}")


def _counts(changes: Sequence[str]) -> list[str]:
    return [f"{changes.count(kind)} {kind}" for kind in _MARKS if kind in changes]

"""``mergegate deploy``: the server kept in step with ``nights.yaml``. Called twice, the second time does nothing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from mergegate.flows.cli.output import print_answer
from mergegate.flows.prefect_api import (
    NIGHTS,
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


def deploy_nights(console: Console, as_json: bool) -> None:
    """Make, change and remove deployments until the server has what the file says, and print what was done.

    Raises:
        InvalidInput: for a file or a profile that means nothing, or a server that does not answer or let us in.
    """
    nights = load_schedules(Path(NIGHTS))
    site = find_site(nights)
    wanted = desired_deployments(nights, site.root)
    with site_client(site) as client:
        make_pool(client)
        done = sync_deployments(client, wanted, site)
        ids = {one.name: one.id for one in done}
        rules = sync_rules(client, desired_rules(nights, wanted), nights.tell, ids, site)
    if as_json:
        more = {"server": site.address, "deployments": [one._asdict() for one in done], "rules": dict(rules)}
        print_answer("deployed", f"{len(done)} deployments", more)
        return
    about = {one.full_name: one.told() for one in wanted}
    width = max(len(one.name) for one in done)
    for one in done:
        console.print(Text(f"  {_MARKS[one.change]} {one.name:<{width}}  {about.get(one.name, 'removed')}".rstrip()))
    for name, change in rules:
        if change != "unchanged":
            console.print(Text(f"  {_MARKS[change]} {name.removeprefix('mergegate: ')}"))
    changes = [*(one.change for one in done), *(change for _, change in rules)]
    console.print(f"{site.address}: {', '.join(_counts(changes))}")


def _counts(changes: Sequence[str]) -> list[str]:
    return [f"{changes.count(kind)} {kind}" for kind in _MARKS if kind in changes]

"""Rules that end silent runs, armed again after a restart of the server.

A rule counts from an event, and between an event and what the rule makes of it lie seconds in which it is in the
server's memory only. A machine that goes down in the moment when a night begins takes server, worker and run along;
what it leaves is a run that was taken, holds its slot, and of which no rule knows. So whoever serves says of each run
that is under way, once, what state it is in. One that lives is heard of before the rule's time is up.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING

from mergegate.flows.prefect_api.runs import site_client
from mergegate.flows.prefect_api.site import Site
from mergegate.merge_core.errors import InvalidInput

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient

_log = logging.getLogger(__name__)

_LOOK_EVERY_S = 1.0
_STARTS_WITHIN_S = 600.0


def rearm_rules_when_ready(site: Site) -> None:
    """In a thread of its own: wait until the server answers, then :func:`rearm_rules`. Never an error of the server."""
    threading.Thread(target=_rearm, args=(site,), name="rearming", daemon=True).start()


def rearm_rules(client: SyncPrefectClient) -> int:
    """Say of each deployed run that is under way what state it is in; of how many."""
    from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterState, FlowRunFilterStateType
    from prefect.client.schemas.objects import StateType
    from prefect.events.schemas.events import Event, RelatedResource, Resource

    kinds = FlowRunFilterStateType(any_=[StateType.PENDING, StateType.RUNNING, StateType.CANCELLING])
    found = client.read_flow_runs(flow_run_filter=FlowRunFilter(state=FlowRunFilterState(type=kinds)))
    said = [
        Event(
            event=f"prefect.flow-run.{run.state.name}",
            resource=Resource({"prefect.resource.id": f"prefect.flow-run.{run.id}", "prefect.resource.name": run.name}),
            related=[
                RelatedResource(
                    {
                        "prefect.resource.id": f"prefect.deployment.{run.deployment_id}",
                        "prefect.resource.role": "deployment",
                    }
                )
            ],
        )
        for run in found
        if run.state is not None and run.deployment_id is not None
    ]
    if said:
        client.request("POST", "/events", json=[event.model_dump(mode="json") for event in said])
    return len(said)


def _rearm(site: Site) -> None:
    began = time.monotonic()
    while time.monotonic() < began + _STARTS_WITHIN_S:
        try:
            with site_client(site) as client:
                rearm_rules(client)
            return
        except InvalidInput:  # it does not answer yet
            time.sleep(_LOOK_EVERY_S)
        except Exception as failure:
            _log.warning("runs that were under way when the server ended are not watched: %s", failure)
            return

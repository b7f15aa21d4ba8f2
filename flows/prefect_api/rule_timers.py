"""Rearm the rules that end silent runs after a restart of the server.

A rule counts from an event. For some seconds after the event, the count exists only in the server's memory. If the
machine goes down just as a scheduled run starts, server, worker and run all stop. A run remains that a worker took,
that keeps its slot, and that no rule watches. Therefore, the server reports the state of every active run once at its
start. A run that is alive sends another event before the rule's time is up.
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
    """Wait in a separate thread until the server answers, then call :func:`rearm_rules`. Never fails the server."""
    threading.Thread(target=_rearm, args=(site,), name="rearming", daemon=True).start()


def rearm_rules(client: SyncPrefectClient) -> int:
    """Emit an event with the current state of each active deployed run, and return the number of events."""
    from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterState, FlowRunFilterStateType
    from prefect.client.schemas.objects import StateType
    from prefect.events.schemas.events import Event, RelatedResource, Resource

    kinds = FlowRunFilterStateType(any_=[StateType.PENDING, StateType.RUNNING, StateType.CANCELLING])
    runs = client.read_flow_runs(flow_run_filter=FlowRunFilter(state=FlowRunFilterState(type=kinds)))
    events = [
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
        for run in runs
        if run.state is not None and run.deployment_id is not None
    ]
    if events:
        client.request("POST", "/events", json=[event.model_dump(mode="json") for event in events])
    return len(events)


def _rearm(site: Site) -> None:
    began = time.monotonic()
    while time.monotonic() < began + _STARTS_WITHIN_S:
        try:
            with site_client(site) as client:
                rearm_rules(client)
            return
        except InvalidInput:  # the server does not answer yet
            time.sleep(_LOOK_EVERY_S)
        except Exception as failure:
            _log.warning("runs that were under way when the server ended are not watched: %s", failure)
            return

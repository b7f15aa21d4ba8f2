"""Follow runs of deployments over Prefect's API, and find scheduled runs that a later run replaces."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from uuid import UUID

from mergegate.flows.prefect_api.site import Site, require_site
from mergegate.merge_core.errors import EXIT_CODES, state_name

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient

_POLL_S = 1.0
_SCHEDULED_TAG = "auto-scheduled"  # Prefect's own tag
_ENDED_OR_WAITING = ["COMPLETED", "FAILED", "PAUSED"]
# States that end a run without a result, so the next run must still do the work.
_STATES_WITHOUT_RESULT = frozenset({"Failed", "TimedOut"})


@dataclass(frozen=True)
class FinishedRun:
    """The end of a run.

    ``state`` is Prefect's name of the final state: Released, NothingNew, Passed, Refused, Invalid, Failed, Interrupted,
    Crashed or Cancelled. ``message`` is the reason that the run reported.
    """

    state: str
    message: str
    completed: bool

    @property
    def exit_code(self) -> int:
        """Exit code as of ``mergegate run``. A state that Prefect sets (Crashed, Cancelled) counts as a failure."""
        codes = {state_name(status): code for status, code in EXIT_CODES.items()}
        return 0 if self.completed else codes.get(self.state, EXIT_CODES["failed"])


@contextmanager
def site_client(site: Site) -> Iterator[SyncPrefectClient]:
    """Open a client of the site's server.

    Raises:
        InvalidInput: The server does not answer or denies access.
    """
    require_site(site)
    from prefect.client.orchestration import get_client
    from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL, PREFECT_UI_URL, temporary_settings

    settings: dict[Any, Any] = {
        PREFECT_API_URL: site.api,
        PREFECT_UI_URL: site.address,
        PREFECT_API_AUTH_STRING: site.secret or None,
    }
    with temporary_settings(settings), get_client(sync_client=True) as client:
        yield client


def follow_run(client: SyncPrefectClient, run: UUID, on_state: Callable[[str, float], None]) -> FinishedRun:
    """Wait until a run has ended.

    Call ``on_state`` once a second with the name of the current state and the seconds since it was first seen.
    """
    name, since = "", time.monotonic()
    while True:
        state = client.read_flow_run(run).state
        if state is not None and state.is_final():
            return FinishedRun(state.name or "", state.message or "", state.is_completed())
        if (state.name if state else "") != name:
            name, since = (state.name or "" if state else ""), time.monotonic()
        on_state(name, time.monotonic() - since)
        time.sleep(_POLL_S)


def find_replacement_run() -> str | None:
    """Return the name of a run that has already done the work of the current run, or None if there is work to do.

    Prefect keeps every run that was due while no worker was running, and later starts them all, one after the other. A
    run that started after another one was due has also done the work of that one, because it used newer inputs. After
    an outage, mergegate therefore runs only the most recent one and cancels the others.

    The replacement belongs to the same deployment, has the same parameters, started after the current run was due, and
    has ended with a result or waits for approval. Only scheduled runs are replaced. A run does its own work if a user
    started it, if it continues after an approval, or if it has no server.
    """
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import (
        FlowRunFilter,
        FlowRunFilterDeploymentId,
        FlowRunFilterStartTime,
        FlowRunFilterState,
        FlowRunFilterStateType,
    )
    from prefect.context import FlowRunContext

    context = FlowRunContext.get()
    run = context.flow_run if context else None
    if run is None or run.deployment_id is None or run.expected_start_time is None or run.run_count > 1:
        return None
    if _SCHEDULED_TAG not in run.tags:
        return None
    filters = FlowRunFilter(
        deployment_id=FlowRunFilterDeploymentId(any_=[run.deployment_id]),
        start_time=FlowRunFilterStartTime(after_=run.expected_start_time),
        state=FlowRunFilterState(type=FlowRunFilterStateType(any_=_ENDED_OR_WAITING)),
    )
    with get_client(sync_client=True) as client:
        candidates = client.read_flow_runs(flow_run_filter=filters)
    for candidate in candidates:
        has_result = candidate.state_name not in _STATES_WITHOUT_RESULT
        if candidate.id != run.id and has_result and candidate.parameters == run.parameters:
            return candidate.name
    return None

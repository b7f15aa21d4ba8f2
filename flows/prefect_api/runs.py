"""Runs of deployments, started and followed over Prefect's API; what they say is what a person reads."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from uuid import UUID

from mergegate.flows.prefect_api.site import Site, require_site
from mergegate.merge_core.errors import EXIT_CODES, state_name

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.client.schemas.objects import State

_POLL_S = 1.0


@dataclass(frozen=True)
class StartedRun:
    """A run that the server has taken: its id, its name, the address of its page."""

    id: UUID
    name: str
    page: str


@dataclass(frozen=True)
class FinishedRun:
    """How a run ended.

    Attributes:
        state: What Prefect shows: Released, NothingNew, Passed, Refused, Invalid, Failed, Interrupted, Crashed,
            Cancelled.
        message: Why, as the run said it.
    """

    state: str
    message: str
    completed: bool

    @property
    def exit_code(self) -> int:
        """As of ``mergegate run``; what no run of ours says of itself (Crashed, Cancelled) is unexpected."""
        codes = {state_name(status): code for status, code in EXIT_CODES.items()}
        return 0 if self.completed else codes.get(self.state, EXIT_CODES["failed"])


@contextmanager
def site_client(site: Site) -> Iterator[SyncPrefectClient]:
    """A client of the site's server.

    Raises:
        InvalidInput: when the server does not answer, or does not let us in.
    """
    require_site(site)
    from prefect.client.orchestration import get_client
    from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL, PREFECT_UI_URL, temporary_settings

    told: dict[Any, Any] = {
        PREFECT_API_URL: site.api,
        PREFECT_UI_URL: site.address,
        PREFECT_API_AUTH_STRING: site.secret or None,
    }
    with temporary_settings(told), get_client(sync_client=True) as client:
        yield client


def start_run(
    client: SyncPrefectClient, site: Site, deployment: UUID, parameters: Mapping[str, object], name: str
) -> StartedRun:
    """Have a deployment carried out now, by the next worker that is free.

    Args:
        name: What the run is called until it begins, and names itself.
    """
    run = client.create_flow_run_from_deployment(deployment, parameters=dict(parameters), name=name)
    return StartedRun(run.id, run.name, site.run_page(run.id))


def follow_run(client: SyncPrefectClient, run: UUID, on_state: Callable[[str, float], None]) -> FinishedRun:
    """Wait until a run has ended.

    Args:
        on_state: Told the name of the state, and for how many seconds it has been so, at each look.
    """
    name, since = "", time.monotonic()
    while True:
        state = client.read_flow_run(run).state
        if state is not None and state.is_final():
            return _ended(state)
        if (state.name if state else "") != name:
            name, since = (state.name or "" if state else ""), time.monotonic()
        on_state(name, time.monotonic() - since)
        time.sleep(_POLL_S)


def _ended(state: State[Any]) -> FinishedRun:
    return FinishedRun(state.name or "", state.message or "", state.is_completed())

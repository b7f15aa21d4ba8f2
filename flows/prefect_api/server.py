"""Run Prefect's server in this process: immediate write transactions on SQLite, and rules that survive a restart.

Prefect starts each transaction as a reader. If another transaction writes between its first read and its first write,
SQLite fails it immediately, without waiting for the time-out. This happens at the end of a run, which writes a lot.
Prefect's automation service then gives up an event after four tries within 0.2 seconds, and a notification is lost
(seen with 3.8.8: "Message failed after 4 retries"). A transaction that starts as a writer waits for the lock instead.
PostgreSQL is not affected.

A rule that ends silent runs measures the time since an event. For some seconds after the event, this measurement exists
only in the server's memory. If the machine goes down at that time, the server forgets it, and no rule ends the run,
which keeps its slot. Therefore, the server emits an event with the state of every active run once at its start. A run
that is alive sends another event before the rule's time is up.
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from mergegate.flows.prefect_api.runs import site_client
from mergegate.flows.prefect_api.site import Site
from mergegate.merge_core.errors import InvalidInput

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient
    from sqlalchemy.ext.asyncio import AsyncSession, AsyncSessionTransaction


_log = logging.getLogger(__name__)
_POLL_S = 1.0
_START_LIMIT_S = 600.0


def serve_prefect(host: str, port: int) -> None:
    """Serve the API, pages and services until the process is stopped. The settings come from the environment."""
    import uvicorn
    from prefect.server.api.server import create_app
    from prefect.server.database.configurations import SQLITE_BEGIN_MODE, AioSqliteConfiguration
    from prefect.server.database.dependencies import MODELS_DEPENDENCIES
    from prefect.settings import PREFECT_API_DATABASE_CONNECTION_URL, get_current_settings

    class WritersFirst(AioSqliteConfiguration):
        """SQLite configuration in which a transaction waits for the write lock before it reads."""

        @asynccontextmanager
        async def begin_transaction(
            self, session: AsyncSession, with_for_update: bool = False
        ) -> AsyncGenerator[AsyncSessionTransaction, None]:
            token = SQLITE_BEGIN_MODE.set("IMMEDIATE")
            try:
                async with session.begin() as transaction:
                    yield transaction
            finally:
                SQLITE_BEGIN_MODE.reset(token)

    address = str(PREFECT_API_DATABASE_CONNECTION_URL.value())
    if address.startswith("sqlite"):
        MODELS_DEPENDENCIES["database_config"] = WritersFirst(connection_url=address)
    settings = get_current_settings().server
    uvicorn.run(
        create_app(final=True),
        host=host,
        port=port,
        timeout_keep_alive=settings.api.keepalive_timeout,
        log_level=settings.logging_level.lower(),
    )


def rearm_rules(site: Site) -> None:
    """Wait until the server answers, then let it watch the active runs again.

    Run this in a separate thread. It never fails the server.
    """
    began = time.monotonic()
    while time.monotonic() < began + _START_LIMIT_S:
        try:
            with site_client(site) as client:
                _report_active_runs(client)
            return
        except InvalidInput:  # the server does not answer yet
            time.sleep(_POLL_S)
        except Exception as failure:
            _log.warning("runs that were active when the server stopped are not watched: %s", failure)
            return


def _report_active_runs(client: SyncPrefectClient) -> None:
    """Emit an event with the current state of each active deployed run."""
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

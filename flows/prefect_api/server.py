"""Prefect's server in this process, with one thing otherwise: on SQLite, whoever begins a transaction means to write.

Prefect begins transactions as readers. One that has read and then writes fails at once when somebody else has written
in between, whatever the time-out; at the end of a run, when much is written, its service of rules then gives up an
event after four tries in a fifth of a second (seen with 3.8.8: "Message failed after 4 retries", and nobody was told).
A transaction that begins as a writer waits for its turn instead. On PostgreSQL nothing is changed.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncSession, AsyncSessionTransaction


def serve_prefect(host: str, port: int) -> None:
    """Serve API, pages and services until the process is told to end. Its settings are those of the environment."""
    import uvicorn
    from prefect.server.api.server import create_app
    from prefect.settings import get_current_settings

    _begin_as_writers()
    settings = get_current_settings().server
    uvicorn.run(
        create_app(final=True),
        host=host,
        port=port,
        timeout_keep_alive=settings.api.keepalive_timeout,
        log_level=settings.logging_level.lower(),
    )


def _begin_as_writers() -> None:
    from prefect.server.database.configurations import SQLITE_BEGIN_MODE, AioSqliteConfiguration
    from prefect.server.database.dependencies import MODELS_DEPENDENCIES
    from prefect.settings import PREFECT_API_DATABASE_CONNECTION_URL

    class WritersFirst(AioSqliteConfiguration):
        """SQLite whose transactions wait for their turn before they read."""

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

"""Run Prefect's server in this process, with immediate write transactions on SQLite.

Prefect starts transactions as readers. A transaction that has read and then writes fails immediately if another one has
written in between, and ignores its time-out. At the end of a run there are many writes. Prefect's automation service
then gives up an event after four tries within 0.2 seconds, so that a notification is lost (seen with 3.8.8: "Message
failed after 4 retries"). A transaction that starts as a writer waits for the lock instead. PostgreSQL is not affected.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncSession, AsyncSessionTransaction


def serve_prefect(host: str, port: int) -> None:
    """Serve the API, pages and services until the process is stopped. The settings come from the environment."""
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

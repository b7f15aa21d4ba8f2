"""Serve an ASGI application on loopback, in a thread, for the duration of a block."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn


@contextmanager
def serving_asgi(
    application: Any, make_server: Callable[[uvicorn.Config], uvicorn.Server] = uvicorn.Server
) -> Iterator[str]:
    """Serve an ASGI application on a free loopback port and yield its URL."""
    quiet = {"log_config": None, "access_log": False, "server_header": False, "date_header": False}
    server = make_server(uvicorn.Config(application, "127.0.0.1", 0, timeout_graceful_shutdown=1, **quiet))
    ready = threading.Event()
    original = server.startup

    async def startup(sockets: Any = None) -> None:
        await original(sockets)
        ready.set()

    server.startup = startup  # type: ignore[method-assign]  # to be notified instead of asking again and again
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    assert ready.wait(30)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(15)

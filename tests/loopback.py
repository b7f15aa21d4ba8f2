"""Run a server of the standard library on loopback, in a thread, for the duration of a block."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from socketserver import BaseServer
from typing import TypeVar

Server = TypeVar("Server", bound=BaseServer)
POLL_S = 0.02  # Interval at which the server checks for shutdown, in seconds.


@contextmanager
def answering(server: Server) -> Iterator[Server]:
    """Run `server` in a thread; afterwards the thread has ended and the port is closed."""
    thread = threading.Thread(target=server.serve_forever, args=(POLL_S,))
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()

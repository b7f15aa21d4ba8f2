"""A server of the standard library that answers on loopback from a thread, for as long as a block runs."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from socketserver import BaseServer
from typing import TypeVar

Server = TypeVar("Server", bound=BaseServer)
POLL_S = 0.02  # how soon it notices that it is to end


@contextmanager
def answering(server: Server) -> Iterator[Server]:
    """``server`` while it answers; afterwards its thread has ended and its port is closed."""
    thread = threading.Thread(target=server.serve_forever, args=(POLL_S,))
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()

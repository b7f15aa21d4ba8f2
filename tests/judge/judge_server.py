"""A scripted chat server on a real loopback socket that records the requests it receives."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from loopback import answering


@dataclass(frozen=True)
class Response:
    """One answer of the server."""

    status: int = 200
    body: str = ""
    headers: tuple[tuple[str, str], ...] = ()


Script = Callable[[dict[str, Any]], Response]


@dataclass
class Asked:
    """The requests that the server received."""

    url: str
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)


def completion(content: object, model: str = "judge-1") -> Response:
    """Return a chat completion whose text is ``content``, encoded as JSON unless it is a string or None."""
    text = content if isinstance(content, str) or content is None else json.dumps(content)
    return Response(body=json.dumps({"model": model, "choices": [{"message": {"content": text}}]}))


@contextmanager
def serving(script: Script) -> Iterator[Asked]:
    """Answer every POST with the result of ``script``."""
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:  # http.server requires this name.
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                asked.bodies.append(body)
                asked.headers.append({name.lower(): value for name, value in self.headers.items()})
                asked.paths.append(self.path)
                response = script(body)
            self.send_response(response.status)
            for name, value in (*response.headers, ("Content-Length", str(len(response.body.encode())))):
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(response.body.encode())

        def log_message(self, format: str, *args: object) -> None:
            """Log nothing; the test reads ``Asked``."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    asked = Asked(f"http://127.0.0.1:{server.server_address[1]}/v1")
    with answering(server):
        yield asked

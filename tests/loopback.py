"""Run a fake HTTP server on loopback, in a thread, for the duration of a block.

::

    def models(request: Request, name: str) -> object:
        return {"id": name}

    with answering(FakeServer({"GET /v1/models/(?P<name>[^/]+)": models})) as server:
        ...  # server.url, server.log[0].json, server.set_faults([Fault("fail", status=429)])
"""

from __future__ import annotations

import json
import re
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import BaseServer
from typing import Any, TypeVar
from urllib.parse import parse_qsl, unquote, urlsplit

from patience import HANG_S

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


@dataclass
class Request:
    """A request in the form that handlers receive. ``status`` is that of the answer, and 0 if there is none."""

    method: str
    path: str  # with the query
    headers: Message
    body: bytes
    status: int = 0

    @property
    def route(self) -> str:
        """Path without the query."""
        return urlsplit(self.path).path

    @property
    def query(self) -> dict[str, str]:
        return dict(parse_qsl(urlsplit(self.path).query))

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def url(self) -> str:
        """Base URL of the server, as the client addressed it."""
        return f"http://{self.headers['Host']}"

    @property
    def token(self) -> str:
        """Bearer token, or an empty string."""
        return str(self.headers.get("Authorization", "")).removeprefix("Bearer ")

    @property
    def authorised(self) -> bool:
        return "Authorization" in self.headers


@dataclass(frozen=True)
class Answer:
    """An HTTP response. Pieces of a body are sent one by one, until the client closes the connection."""

    status: int = 200
    body: bytes | Iterator[bytes] = b""
    headers: Mapping[str, str] = field(default_factory=dict)


def json_answer(content: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Answer:
    return Answer(status, json.dumps(content).encode(), {"Content-Type": "application/json", **(headers or {})})


Handler = Callable[..., object]  # Receives the request and the named groups of the pattern; returns Answer or JSON.


@dataclass(frozen=True)
class Fault:
    """Fault that the server injects into requests.

    Attributes:
        kind: One of these faults. ``fail``: answer with ``status`` and do nothing. ``before``: close the connection and
            do nothing. ``silence``: do nothing until the faults are replaced, and then close the connection. ``drop``:
            do the work, then close the connection. ``call``: do the work, then call ``call`` instead of answering.
        nth: Index of the first affected request among those that match ``method`` and ``path``, from 0.
        times: Number of consecutive matching requests affected.
        path: Regular expression that is searched in the path.
    """

    kind: str
    nth: int = 0
    times: int = 1
    method: str = ""
    path: str = ""
    status: int = 503
    body: str = "injected fault"
    call: Callable[[], None] | None = None


class FakeServer(ThreadingHTTPServer):
    """An HTTP/1.1 server whose answers come from a table. ``log`` has all requests since `begin`.

    Args:
        routes: Handlers by a regular expression for method and path, such as ``GET /v1/models``. The first match
            answers. HEAD requests use the handlers of GET.
        port: Port, or 0 for a free one.
    """

    daemon_threads = True

    def __init__(self, routes: Mapping[str, Handler] | None = None, *, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), _Conversation)
        self.routes = dict(routes or {})
        self.log: list[Request] = []
        self.lock = threading.RLock()
        self._faults: list[Fault] = []
        self._matched: Counter[int] = Counter()
        self.silence = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def set_faults(self, faults: Sequence[Fault]) -> None:
        """Replace the faults and restart their counts."""
        with self.lock:
            self._faults = list(faults)
            self._matched.clear()
            self.silence.set()
            self.silence = threading.Event()

    def begin(self, *faults: Fault) -> None:
        """Clear the log, replace the faults and restart their counts."""
        with self.lock:
            self.log.clear()
            self.set_faults(faults)

    def receive(self, request: Request) -> Fault | None:
        """Log a request, and return the fault to inject into it."""
        with self.lock:
            self.log.append(request)
            for number, fault in enumerate(self._faults):
                if fault.method in ("", request.method) and re.search(fault.path, request.route):
                    count = self._matched[number]
                    self._matched[number] += 1
                    if fault.nth <= count < fault.nth + fault.times:
                        return fault
        return None

    def answer(self, request: Request) -> Answer:
        """Return the answer of the first route that matches the request."""
        method = "GET" if request.method == "HEAD" else request.method
        for pattern, handler in self.routes.items():
            if found := re.fullmatch(pattern, f"{method} {request.route}"):
                groups = {name: unquote(value) for name, value in found.groupdict().items() if value is not None}
                content = handler(request, **groups)
                return content if isinstance(content, Answer) else json_answer(content)
        return json_answer({"error": f"no route {request.method} {request.path}"}, 404)

    def after_answer(self, request: Request) -> None:
        """React to a request after the work is done, but before the answer is sent. Subclasses may override this."""

    def server_close(self) -> None:
        self.silence.set()
        super().server_close()

    def handle_error(self, *arguments: Any) -> None:
        """Print errors of handlers. Ignore broken connections, because tests kill clients and let them time out."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(*arguments)


class _Conversation(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # otherwise every answer waits 40 ms for the client's acknowledgment
    server: FakeServer

    def log_message(self, *_: object) -> None:
        """Print nothing."""

    def converse(self) -> None:
        request = Request(self.command, self.path, self.headers, self._body())
        fault = self.server.receive(request)
        kind = fault.kind if fault else ""
        self.close_connection = kind in ("before", "silence", "drop", "call") or self.close_connection
        if kind == "silence":
            self.server.silence.wait(HANG_S)
        if kind in ("before", "silence"):
            return
        injected = Answer(fault.status, fault.body.encode()) if fault and kind == "fail" else None
        answer = injected or self.server.answer(request)
        request.status = answer.status
        self.server.after_answer(request)
        if fault and fault.call:
            fault.call()
        if kind not in ("drop", "call"):
            self._send(answer)

    do_GET = do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = do_OPTIONS = converse  # noqa: N815  # names of http.server

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def _send(self, answer: Answer) -> None:
        headers = dict(answer.headers)
        if isinstance(answer.body, bytes):
            headers.setdefault("Content-Length", str(len(answer.body)))
        else:
            headers["Connection"] = "close"
        self.send_response_only(answer.status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            for piece in [answer.body] if isinstance(answer.body, bytes) else answer.body:
                self.wfile.write(piece)

"""Run a proxy on loopback in front of any test server and inject a chosen fault at the k-th request.

Every target gets the same faults, and the server behind the proxy can be a real one.
"""

from __future__ import annotations

import http.client
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

from loopback import answering
from patience import HANG_S

FAULTS = ("before", "after", "500", "503", "silence")


@dataclass(frozen=True)
class ProxyFault:
    """Fault that the proxy injects into a request.

    Attributes:
        kind: One of these faults. ``before``: close the connection without forwarding. ``after``: forward, then close
            the connection without an answer. A status code: answer with it without forwarding. ``silence``: do not
            forward and never answer. ``call``: forward, then call ``call`` instead of answering.
        nth: Index of the first affected request, from 0.
        times: Number of consecutive requests affected.
    """

    kind: str
    nth: int
    times: int = 1
    call: Callable[[], None] | None = None


class FaultyProxy(ThreadingHTTPServer):
    """Proxy that listens on loopback, forwards requests to ``upstream`` and counts them.

    Args:
        refuse: Function that checks a request (method, path, headers, body) before it is forwarded. If it returns a
            status and a body, the proxy answers with them instead.
    """

    daemon_threads = True

    def __init__(
        self,
        upstream: str,
        refuse: Callable[[str, str, dict[str, str], bytes], tuple[int, bytes] | None] = lambda *request: None,
    ) -> None:
        super().__init__(("127.0.0.1", 0), _Forwarding)
        self.upstream, self.refuse = upstream, refuse
        self.lock = threading.Lock()
        self.log: list[tuple[str, str]] = []
        self.fault: ProxyFault | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def begin(self, fault: ProxyFault | None) -> None:
        """Restart the count at 0 and set the next fault."""
        with self.lock:
            self.log, self.fault = [], fault

    def next_fault(self, method: str, path: str) -> ProxyFault | None:
        with self.lock:
            number, fault = len(self.log), self.fault
            self.log.append((method, path))
        return fault if fault and fault.nth <= number < fault.nth + fault.times else None

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore broken connections, because tests kill clients and let them time out."""


class _Forwarding(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # Nagle's algorithm would delay the second part of an answer by 40 ms
    server: FaultyProxy

    def forward(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        fault = self.server.next_fault(self.command, self.path)
        kind = fault.kind if fault else ""
        if kind == "before":
            return self.hang_up()
        if kind == "silence":
            self.connection.settimeout(HANG_S)
            self.connection.recv(1)  # until the client gives up
            return self.hang_up()
        if kind.isdigit():
            return self.answer(int(kind), b"injected fault", {})
        headers = {name: value for name, value in self.headers.items() if name.lower() not in ("connection", "expect")}
        if refused := self.server.refuse(self.command, self.path, headers, body):
            return self.answer(*refused, {"Content-Type": "application/xml"})
        upstream = http.client.HTTPConnection(urlsplit(self.server.upstream).netloc, timeout=HANG_S)
        upstream.request(self.command, self.path, body, headers)
        reply = upstream.getresponse()
        content = reply.read()
        upstream.close()
        if fault and fault.call:
            fault.call()
        if kind in ("after", "call"):
            return self.hang_up()
        return self.answer(reply.status, content, dict(reply.getheaders()))

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = do_PATCH = forward  # noqa: N815  # names of the base class

    def answer(self, status: int, content: bytes, headers: dict[str, str]) -> None:
        self.send_response_only(status)
        for name, value in headers.items():
            if name.lower() not in ("connection", "transfer-encoding", "content-length"):
                self.send_header(name, value)
        length = next((value for name, value in headers.items() if name.lower() == "content-length"), None)
        self.send_header("Content-Length", length if self.command == "HEAD" and length else str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def hang_up(self) -> None:
        self.close_connection = True

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""


@contextmanager
def faulty_proxy(
    upstream: str,
    refuse: Callable[[str, str, dict[str, str], bytes], tuple[int, bytes] | None] = lambda *request: None,
) -> Iterator[FaultyProxy]:
    """Run the proxy for the duration of a block."""
    with answering(FaultyProxy(upstream, refuse)) as proxy:
        yield proxy

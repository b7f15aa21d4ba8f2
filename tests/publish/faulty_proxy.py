"""A proxy on loopback in front of any server of the tests, that lets the k-th request go wrong in a chosen way.

So the same faults come to every target, and the server behind it may be a real one.
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
    """What happens to a request.

    Attributes:
        kind: ``before``: the connection is closed, and nothing is done; ``after``: it is done, and the connection
            closed; a status: answered with it, and nothing is done; ``silence``: nothing is done, and no answer comes;
            ``call``: it is done, then ``call`` is called in place of an answer.
        nth: The how many-th request, from 0.
        times: How many in a row.
    """

    kind: str
    nth: int
    times: int = 1
    call: Callable[[], None] | None = None


class FaultyProxy(ThreadingHTTPServer):
    """Listens on loopback, forwards to ``upstream``, and counts.

    Args:
        refuse: Looks at a request before it is forwarded (method, path, headers, body); a status and a body that it
            returns are the answer.
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
        """Count from 0 again, with this fault ahead."""
        with self.lock:
            self.log, self.fault = [], fault

    def next_fault(self, method: str, path: str) -> ProxyFault | None:
        with self.lock:
            number, fault = len(self.log), self.fault
            self.log.append((method, path))
        return fault if fault and fault.nth <= number < fault.nth + fault.times else None

    def handle_error(self, request: object, client_address: object) -> None:
        """Clients that are killed or give up are what this is for."""


class _Forwarding(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # an answer is written in two pieces: 40 ms between them otherwise
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
        """Not on the screen."""


@contextmanager
def faulty_proxy(
    upstream: str,
    refuse: Callable[[str, str, dict[str, str], bytes], tuple[int, bytes] | None] = lambda *request: None,
) -> Iterator[FaultyProxy]:
    """The proxy while a block runs."""
    with answering(FaultyProxy(upstream, refuse)) as proxy:
        yield proxy

"""Run a proxy on loopback in front of any test server and inject a chosen fault at the k-th request."""

from __future__ import annotations

import http.client
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

from loopback import Answer, FakeServer, Fault, Request, answering
from patience import HANG_S

FAULTS = {
    "before": Fault("before"), "drop": Fault("drop"), "500": Fault("fail", status=500), "503": Fault("fail"),
    "silence": Fault("silence"), "down": Fault("fail", times=1 << 30),
}  # fmt: skip


class FaultyProxy(FakeServer):
    """Proxy that forwards requests to ``upstream``, unless ``refuse`` answers them."""

    def __init__(self, upstream: str, refuse: Callable[[Request], Answer | None]) -> None:
        super().__init__({".*": self.forward})
        self.upstream, self.refuse = urlsplit(upstream).netloc, refuse

    def written(self, *methods: str) -> list[str]:
        """Return the paths of all logged requests with one of these methods."""
        return [request.path for request in self.log if request.method in methods]

    def forward(self, request: Request) -> Answer:
        if refused := self.refuse(request):
            return refused
        headers = {name: text for name, text in request.headers.items() if name.lower() not in ("connection", "expect")}
        upstream = http.client.HTTPConnection(self.upstream, timeout=HANG_S)
        upstream.request(request.method, request.path, request.body, headers)
        reply = upstream.getresponse()
        content = reply.read()
        upstream.close()
        ours = ("connection", "transfer-encoding", "content-length")
        headers = {name: value for name, value in reply.getheaders() if name.lower() not in ours}
        if request.method == "HEAD":
            headers["Content-Length"] = reply.getheader("Content-Length", "0")
        return Answer(reply.status, content, headers)


@contextmanager
def faulty_proxy(
    upstream: str, refuse: Callable[[Request], Answer | None] = lambda request: None
) -> Iterator[FaultyProxy]:
    """Run the proxy for the duration of a block."""
    with answering(FaultyProxy(upstream, refuse)) as proxy:
        yield proxy

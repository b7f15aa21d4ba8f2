"""Forward requests from the proxy to one server, and return its answers.

Bodies are forwarded as bytes, and headers keep their order. Only hop-by-hop headers (RFC 9110, 7.6.1) are removed.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import httpx

from mergegate.merge_core.errors import InvalidInput
from mergegate.tasks.shadow.settings import ShadowServer

Headers = list[tuple[bytes, bytes]]
_IDLE_S = 2.0  # Servers close idle connections after five seconds, so the proxy stops reusing them earlier.
_HOP_BY_HOP_HEADERS = frozenset(
    (
        b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection", b"te",
        b"trailer", b"transfer-encoding", b"upgrade",
    )
)  # fmt: skip
_API = "/v1"
KEY_HEADERS = {b"authorization", b"api-key", b"x-api-key"}


class Upstream:
    """Client of one server with its own connections, so that a server that hangs does not block the other one.

    ``timeout`` is the longest time without a byte, ``connect`` the timeout for opening a connection, both in seconds.

    Raises:
        InvalidInput: The environment variable for the API key is not set.
    """

    def __init__(self, server: ShadowServer, timeout: float, connect: float) -> None:
        self.server = server
        self._key = read_key(server.api_key_env)  # replaces the client's key, if it is not empty
        self._url = httpx.URL(server.url)
        self._client = httpx.AsyncClient(
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=256, keepalive_expiry=_IDLE_S),
            timeout=httpx.Timeout(timeout, connect=connect),
            trust_env=False,
        )

    async def send(self, method: str, path: bytes, query: bytes, headers: Headers, body: bytes | Any) -> httpx.Response:
        """Send a request and return the response before its body has been read.

        In ``path``, which is the client's, ``/v1`` is replaced by the path of the server's URL. ``body`` is bytes or an
        asynchronous iterator of bytes.

        Raises:
            httpx.HTTPError: The server does not respond.
        """
        request_path = path.decode("latin-1")
        if request_path == _API or request_path.startswith(f"{_API}/"):
            request_path = self._url.raw_path.decode("latin-1").rstrip("/") + request_path[len(_API) :]
        url = self._url.copy_with(raw_path=request_path.encode("latin-1") + (b"?" + query if query else b""))
        # httpx sets the length of a body in memory, because the new model name may have changed it.
        removed = {b"host", b"content-length"} if isinstance(body, bytes) else {b"host"}
        removed |= KEY_HEADERS if self._key else set()
        forwarded = [(name, value) for name, value in headers if name not in removed]
        if self._key and path.decode("latin-1") in self.server.key_paths:  # as sent, so that no encoding evades this
            forwarded.append((b"authorization", f"Bearer {self._key}".encode()))
        request = httpx.Request(method, url, headers=forwarded, content=body)
        return await self._client.send(request, stream=True)

    async def close(self) -> None:
        await self._client.aclose()


def read_key(variable: str | None) -> str:
    """Return the value of an environment variable with a key, or an empty string without a variable.

    Raises:
        InvalidInput: The variable is not set or empty.
    """
    key = os.environ.get(variable, "").strip() if variable else ""
    if variable and not key:
        raise InvalidInput(
            f"shadow: {variable}",
            found="an environment variable that is not set or empty",
            expected="the API key of the server or the keys of the clients in this variable",
        )
    return key


def end_to_end_headers(headers: Iterable[tuple[bytes, bytes]]) -> Headers:
    """Return the headers without hop-by-hop headers, which include those named by ``Connection``."""
    lower_case = [(name.lower(), value) for name, value in headers]
    hop_by_hop = {
        part.strip().lower() for name, value in lower_case if name == b"connection" for part in value.split(b",")
    } | _HOP_BY_HOP_HEADERS
    return [(name, value) for name, value in lower_case if name not in hop_by_hop]

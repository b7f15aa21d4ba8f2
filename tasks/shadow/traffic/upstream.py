"""One of the two servers, as the proxy asks it: what a request becomes on its way there, and an answer on its way back.

Bodies pass as bytes and headers in their order; only what belongs to one connection (RFC 9110, 7.6.1) stays there.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from typing import Any

import httpx

from mergegate.merge_core.errors import InvalidInput
from mergegate.tasks.shadow.settings import ShadowServer

Headers = list[tuple[bytes, bytes]]
_IDLE_S = 2.0  # Servers close idle connections after five seconds: none is used again when that is near.
_OF_ONE_CONNECTION = frozenset(
    (
        b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection", b"te",
        b"trailer", b"transfer-encoding", b"upgrade",
    )
)  # fmt: skip
_API = "/v1"


class Upstream:
    """A server with connections of its own: one that hangs takes nobody else's.

    Args:
        server: Where it is, and what it calls the model.
        timeout: Seconds that may pass without a byte.
        connect: Seconds until there is a connection.
    """

    def __init__(self, server: ShadowServer, timeout: float, connect: float) -> None:
        self.server = server
        self._key = key_of(server)
        self._url = httpx.URL(server.url)
        self._client = httpx.AsyncClient(
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=256, keepalive_expiry=_IDLE_S),
            timeout=httpx.Timeout(timeout, connect=connect),
            trust_env=False,
        )

    async def send(self, method: str, path: bytes, query: bytes, headers: Headers, body: bytes | Any) -> httpx.Response:
        """The beginning of an answer; its body is yet to come.

        Args:
            path: As the client wrote it; what is below ``/v1`` is below the server's own address.
            body: Bytes, or an asynchronous iterator of them.

        Raises:
            httpx.HTTPError: There is none.
        """
        request = httpx.Request(method, self._address(path, query), headers=self._own(headers, body), content=body)
        return await self._client.send(request, stream=True)

    def renamed(self, body: bytes, document: Mapping[str, Any] | None) -> bytes:
        """A body with the name that this server has for the model; the same bytes where it has none of its own."""
        if document is None or self.server.model is None or document.get("model") == self.server.model:
            return body
        return json.dumps({**document, "model": self.server.model}, ensure_ascii=False).encode()

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    def _address(self, path: bytes, query: bytes) -> httpx.URL:
        own = path.decode("latin-1")
        if own == _API or own.startswith(f"{_API}/"):
            whole = self._url.raw_path.decode("latin-1").rstrip("/") + own[len(_API) :]
        else:
            whole = own
        return self._url.copy_with(raw_path=whole.encode("latin-1") + (b"?" + query if query else b""))

    def _own(self, headers: Headers, body: bytes | Any) -> Headers:
        # Of a body that is held the length is counted; it may have been renamed.
        counted = {b"host", b"content-length"} if isinstance(body, bytes) else {b"host"}
        kept = [(name, value) for name, value in headers if name not in counted]
        if self._key:
            kept = [(name, value) for name, value in kept if name != b"authorization"]
            kept.append((b"authorization", f"Bearer {self._key}".encode()))
        return kept


def passed_on(headers: Iterable[tuple[bytes, bytes]]) -> Headers:
    """Headers less those of one connection, also those that ``Connection`` names."""
    found = [(name.lower(), value) for name, value in headers]
    named = {
        part.strip().lower() for name, value in found if name == b"connection" for part in value.split(b",")
    } | _OF_ONE_CONNECTION
    return [(name, value) for name, value in found if name not in named]


def key_of(server: ShadowServer) -> str:
    """The key that the proxy sends in place of the client's; empty: the client's own passes.

    Raises:
        InvalidInput: when the variable that is to hold it is not set.
    """
    if server.api_key_env is None:
        return ""
    key = os.environ.get(server.api_key_env, "").strip()
    if not key:
        raise InvalidInput(
            f"shadow: {server.api_key_env}", found="not set, or empty", expected="the key of a server in this variable"
        )
    return key

"""Define a request that passes through the proxy, and its outcome at one arm."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from starlette.types import Receive, Scope

from mergegate.tasks.shadow.traffic.arm import session_key
from mergegate.tasks.shadow.traffic.effects import is_a_question
from mergegate.tasks.shadow.traffic.upstream import Headers, passed_on

Arm: TypeAlias = Literal["parent", "candidate"]
ID_HEADER = b"x-request-id"
MOST_BODY = 64 << 20  # bytes of a question, which is held in memory; other bodies are streamed
_LONGEST_ID = 200


@dataclass(frozen=True)
class AskedRequest:
    """Request that the proxy forwards and records.

    Attributes:
        scope: ASGI scope of the request.
        headers: Headers to forward, without those of the client's connection. They include a request ID.
        body: Complete body of a question, or an iterator over the body of any other request.
        document: Parsed body, if it is a JSON object.
        key: Key of the session that the request belongs to.
        request_id: Request ID sent by the client, otherwise generated.
        exchange: Generated ID that all records of this request share.
        at: Time of arrival, as Unix time.
    """

    scope: Scope
    headers: Headers
    body: bytes | AsyncIterator[bytes]
    document: dict[str, Any] | None
    key: str
    request_id: str
    exchange: str = field(default_factory=lambda: uuid.uuid4().hex)
    at: float = field(default_factory=time.time)

    @property
    def method(self) -> str:
        """HTTP method."""
        return str(self.scope["method"])

    @property
    def path(self) -> str:
        """Path without the query."""
        return str(self.scope["path"])

    @property
    def is_question(self) -> bool:
        """Whether the request asks a model for text. Other requests are neither recorded nor compared."""
        return is_a_question(self.method, self.path)


@dataclass
class ArmAnswer:
    """Outcome of a request at one arm, updated while the answer arrives.

    Attributes:
        arm: Server that received the request.
        began: Start of the request, as a ``time.perf_counter`` value.
        status: HTTP status, or 0 if the server sent none.
        first_byte: Seconds until the first byte of the body, or None if no body arrived.
        body: Recorded part of the body.
        error: Failure of the server or of the connection. Empty if there was none.
        fallback: Whether the candidate failed and the parent answered instead.
        whole: Whether the complete body arrived.
    """

    arm: Arm
    began: float = field(default_factory=time.perf_counter)
    status: int = 0
    first_byte: float | None = None
    body: bytearray = field(default_factory=bytearray)
    error: str = ""
    fallback: bool = False
    whole: bool = False

    def took(self) -> float:
        """Return the seconds since the start of the request."""
        return time.perf_counter() - self.began

    def add(self, piece: bytes, most: int) -> None:
        """Add a piece of the body.

        If the body is longer than ``most`` bytes, one additional byte is stored, which marks it as too long.
        """
        if self.first_byte is None:
            self.first_byte = self.took()
        self.body += piece[: max(0, most + 1 - len(self.body))]


async def read_request(scope: Scope, receive: Receive, session_header: str) -> AskedRequest | None:
    """Read a request. Return None if it is a question that is too long to hold in memory.

    Args:
        scope: ASGI scope of the request.
        receive: ASGI function that receives the body.
        session_header: Name of the session header.
    """
    by_name = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
    headers = [pair for pair in passed_on(scope["headers"]) if pair[0] != ID_HEADER]
    body: bytes | AsyncIterator[bytes] = b""
    document = None
    if is_a_question(scope["method"], scope["path"]):
        content = bytearray()
        async for piece in _body_pieces(receive):
            content += piece
            if len(content) > MOST_BODY:
                return None
        body = bytes(content)
        with suppress(ValueError, RecursionError):
            document = json.loads(body)
    elif "content-length" in by_name or "transfer-encoding" in by_name:
        body = _body_pieces(receive)
    document = document if isinstance(document, dict) else None
    request_id = by_name.get(ID_HEADER.decode(), "")[:_LONGEST_ID] or uuid.uuid4().hex
    headers.append((ID_HEADER, request_id.encode("latin-1")))
    client = scope["client"][0] if scope.get("client") else ""
    return AskedRequest(
        scope, headers, body, document, session_key(by_name, document, session_header, client), request_id
    )


async def _body_pieces(receive: Receive) -> AsyncIterator[bytes]:
    """Yield the pieces of a body as they arrive."""
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        if piece := message.get("body", b""):
            yield piece
        if not message.get("more_body", False):
            return

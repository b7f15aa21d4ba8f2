"""One request on its way through the proxy, and what became of it at an arm."""

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
MOST_BODY = 64 << 20  # bytes of a question, which is held; anything else passes in pieces
_LONGEST_ID = 200


@dataclass(frozen=True)
class AskedRequest:
    """A request: what of it is sent on, and what is kept.

    Attributes:
        headers: Less those of the client's connection; with its request id, the client's or ours.
        body: Of a question all of it; else as it arrives.
        document: The body, where it is an object of JSON.
        key: What the request belongs to.
        exchange: Ours alone: joins all that becomes of it.
        at: Unix time.
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
        """Of HTTP."""
        return str(self.scope["method"])

    @property
    def path(self) -> str:
        """Without its query."""
        return str(self.scope["path"])

    @property
    def is_question(self) -> bool:
        """Whether a model is asked for text: nothing else is kept or compared."""
        return is_a_question(self.method, self.path)


@dataclass
class ArmAnswer:
    """What became of a request at one arm, while it becomes it.

    Attributes:
        first_byte: Seconds until the body began.
        body: As much of it as is kept.
        whole: Whether all of it came.
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
        """Seconds until now."""
        return time.perf_counter() - self.began

    def add(self, piece: bytes, most: int) -> None:
        """A piece has come. Of a body that is longer than ``most`` bytes, one byte too many is kept: that tells."""
        if self.first_byte is None:
            self.first_byte = self.took()
        self.body += piece[: max(0, most + 1 - len(self.body))]


async def read_request(scope: Scope, receive: Receive, session_header: str) -> AskedRequest | None:
    """The request; None when it is a question that is too long to be held.

    Args:
        session_header: The header that names a session.
    """
    named = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
    headers = [pair for pair in passed_on(scope["headers"]) if pair[0] != ID_HEADER]
    body: bytes | AsyncIterator[bytes] = b""
    document = None
    if is_a_question(scope["method"], scope["path"]):
        held = bytearray()
        async for piece in _pieces(receive):
            held += piece
            if len(held) > MOST_BODY:
                return None
        body = bytes(held)
        with suppress(ValueError, RecursionError):
            document = json.loads(body)
    elif "content-length" in named or "transfer-encoding" in named:
        body = _pieces(receive)
    document = document if isinstance(document, dict) else None
    number = named.get(ID_HEADER.decode(), "")[:_LONGEST_ID] or uuid.uuid4().hex
    headers.append((ID_HEADER, number.encode("latin-1")))
    client = scope["client"][0] if scope.get("client") else ""
    return AskedRequest(scope, headers, body, document, session_key(named, document, session_header, client), number)


async def _pieces(receive: Receive) -> AsyncIterator[bytes]:
    """A body as it arrives."""
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        if piece := message.get("body", b""):
            yield piece
        if not message.get("more_body", False):
            return

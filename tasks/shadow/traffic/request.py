"""Read a client's request, identify its sender, decide whether it may be copied, and forward it to one server.

Only requests on an allowlist are copied, because the effects of other requests are unknown. Bodies are forwarded as
bytes, and headers keep their order. Only hop-by-hop headers (RFC 9110, 7.6.1) are removed.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import os
import re
import secrets
import time
import uuid
from collections.abc import AsyncIterator, Collection, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import httpx
from pydantic import Field, TypeAdapter
from starlette.types import Message, Receive, Scope, Send

from mergegate.merge_core.errors import InvalidInput
from mergegate.merge_core.files import read_state, state_directory, write_state
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
    """Return the value of an environment variable with a key, or an empty string without a variable."""
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


Arm: TypeAlias = Literal["parent", "candidate"]
ID_HEADER = b"x-request-id"
MAX_BODY_BYTES = 64 << 20  # largest body of a generation request, which is held in memory; other bodies are streamed
_MAX_ID_LENGTH = 200
_SECRET = TypeAdapter(tuple[float, Annotated[str, Field(min_length=64)]])  # Unix time of its creation, and the secret
_BYTES_PER_S = 16 << 10  # Each byte of a client pays for this part of a second of waiting.
_GENERATION_PATHS = ("/chat/completions", "/completions")
# These fields make a server store or look up data, which a copy would do a second time.
_EFFECTS = ("store", "previous_response_id", "conversation", "container", "background")


@dataclass(frozen=True)
class ProxiedRequest:
    """A request that the proxy forwards and records."""

    scope: Scope
    headers: Headers  # to forward, without those of the client's connection; they include a request ID
    body: bytes | AsyncIterator[bytes]  # complete body of a generation request, or an iterator over any other body
    document: dict[str, Any] | None  # parsed body, if it is a JSON object
    key: str  # of the session that the request belongs to
    request_id: str  # sent by the client, or else generated
    exchange: str = field(default_factory=lambda: uuid.uuid4().hex)  # ID that all records of this request share
    at: float = field(default_factory=time.time)  # time of arrival, as Unix time

    @property
    def method(self) -> str:
        return str(self.scope["method"])

    @property
    def path(self) -> str:
        """Path without the query."""
        return str(self.scope["path"])

    @property
    def is_generation(self) -> bool:
        """Whether the request prompts a model for text. Other requests are neither recorded nor compared."""
        return is_generation(self.method, self.path)


@dataclass
class ArmAnswer:
    """Outcome of a request at one arm, updated while the answer arrives. ``ArmRow`` explains its fields."""

    arm: Arm
    started: float = field(default_factory=time.perf_counter)
    status: int = 0
    first_byte: float | None = None
    body: bytearray = field(default_factory=bytearray)  # the recorded part
    error: str = ""
    fallback: bool = False
    is_complete: bool = False  # whether the complete body arrived

    def elapsed_seconds(self) -> float:
        """Return the seconds since the start of the request."""
        return time.perf_counter() - self.started

    def add(self, piece: bytes, limit: int) -> None:
        """Add a piece of the body.

        A body longer than ``limit`` bytes is cut to ``limit + 1`` bytes, which marks it as too long.
        """
        if self.first_byte is None:
            self.first_byte = self.elapsed_seconds()
        self.body += piece[: max(0, limit + 1 - len(self.body))]


def is_generation(method: str, path: str) -> bool:
    """Return whether a request with this method and path prompts a model for text."""
    return method == "POST" and path.rstrip("/").endswith(_GENERATION_PATHS)


def may_be_copied(method: str, path: str, body: Mapping[str, Any] | None) -> bool:
    """Return whether a copy of the request may be sent to a second server.

    Tools of type ``function`` run at the client, which never sees the copy's answer. All other tools run at the server,
    so requests with such tools are not copied.
    """
    if not is_generation(method, path) or body is None:
        return False
    if any(body.get(key) not in (None, False) for key in _EFFECTS):
        return False
    tools = body.get("tools") or ()
    return isinstance(tools, (list, tuple)) and all(
        isinstance(tool, Mapping) and tool.get("type", "function") == "function" for tool in tools
    )


def session_key(headers: Mapping[str, str], body: Mapping[str, Any] | None, header: str, client: str) -> str:
    """Return the key of the session that a request belongs to.

    The first available source wins: the session header, the ``user`` field of the body, the token, the client address.
    ``headers`` has lower-case names, and ``header`` is the name of the session header.
    """
    if session := headers.get(header.lower()):
        return f"session {session}"
    if body and isinstance(user := body.get("user"), str) and user:
        return f"user {user}"
    if token := headers.get("authorization") or headers.get("api-key"):
        return f"token {token}"
    return f"client {client}"


class SlowClient(Exception):
    """A client sends its body or reads its answer too slowly."""


class ClientConnection:
    """The two ASGI functions of a request, which raise SlowClient if the client is slow.

    A client is slow if the proxy has waited for it for ``timeout`` seconds in total, not counting the time that its
    bytes need at 16 KiB/s.
    """

    def __init__(self, receive: Receive, send: Send, timeout: float) -> None:
        self._receive, self._send, self._timeout = receive, send, timeout
        self._wait: asyncio.Timeout | None = None
        self._wait_began = self._earlier_delay_s = 0.0

    @property
    def delay_s(self) -> float:
        """Seconds that the client is behind with the current body."""
        return self._earlier_delay_s + (time.monotonic() - self._wait_began if self._wait else 0.0)

    def drop(self) -> None:
        """Raise SlowClient in the current wait for the client or in the next one."""
        self._timeout = 0.0
        if self._wait:
            self._wait.reschedule(0.0)

    async def receive(self) -> Message:
        async with self._waiting():
            message = await self._receive()
        self._count_bytes(message)
        return message

    async def send(self, message: Message) -> None:
        async with self._waiting():
            await self._send(message)
        self._count_bytes(message)

    @asynccontextmanager
    async def _waiting(self) -> AsyncIterator[None]:
        self._wait_began = time.monotonic()
        try:
            async with asyncio.timeout(self._timeout - self._earlier_delay_s) as self._wait:
                yield
        except TimeoutError:
            raise SlowClient from None
        finally:
            self._earlier_delay_s, self._wait = self.delay_s, None

    def _count_bytes(self, message: Message) -> None:
        delay_s = self._earlier_delay_s - len(message.get("body", b"")) / _BYTES_PER_S
        self._earlier_delay_s = max(0.0, delay_s) if message.get("more_body") else 0.0


def session_hash(key: str, candidate: str, secret: bytes) -> str:
    """Return the form of a session key for records: an HMAC that only shows which requests belong together."""
    return hmac.digest(secret, f"{candidate}:{key}".encode(errors="surrogatepass"), "sha256")[:12].hex()


class SessionSecret:
    """Secret key of a project's session hashes, which is replaced when it is ``lifetime_s`` old.

    It is stored in ``file``, so that a restarted proxy recognizes sessions, or only in memory if there is no file.
    """

    def __init__(self, file: Path | None, lifetime_s: float) -> None:
        self._file, self._lifetime_s = file, lifetime_s
        self._since, self._secret = 0.0, ""

    def current(self) -> bytes:
        """Return the secret. If there is none, or if it is too old, create one."""
        if self._is_old() and self._file:
            with suppress(OSError):  # Without a disk, a secret lasts as long as the process.
                stored = read_state(self._file, _SECRET.validate_json)
                self._since, self._secret = stored if isinstance(stored, tuple) else (0.0, "")
        if self._is_old():
            self._since, self._secret = time.time(), secrets.token_hex(32)
            with suppress(OSError):
                if self._file:
                    state_directory(self._file.parent, private=True)
                    write_state(self._file, _SECRET.dump_json((self._since, self._secret)))
                    self._file.chmod(0o600)
        return self._secret.encode()

    def _is_old(self) -> bool:
        return not 0 <= time.time() - self._since < self._lifetime_s


def has_key(scope: Scope, keys: Collection[bytes]) -> bool:
    """Return whether a request has one of the keys, as a bearer token or in another header for keys."""
    sent = [re.sub(rb"^(?i:bearer) ", b"", value) for name, value in scope["headers"] if name in KEY_HEADERS]
    return any(hmac.compare_digest(value, key) for value in sent for key in keys)


async def read_request(scope: Scope, receive: Receive, session_header: str) -> ProxiedRequest | None:
    """Read a request, or return None if its body is too long to hold in memory."""
    by_name = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
    headers = [pair for pair in end_to_end_headers(scope["headers"]) if pair[0] != ID_HEADER]
    body: bytes | AsyncIterator[bytes] = b""
    document = None
    if is_generation(scope["method"], scope["path"]):
        content = bytearray()
        async for piece in _body_pieces(receive):
            content += piece
            if len(content) > MAX_BODY_BYTES:
                return None
        body = bytes(content)
        with suppress(ValueError, RecursionError):
            document = json.loads(body)
    elif "content-length" in by_name or "transfer-encoding" in by_name:
        body = _body_pieces(receive)
    document = document if isinstance(document, dict) else None
    request_id = by_name.get(ID_HEADER.decode(), "")[:_MAX_ID_LENGTH] or uuid.uuid4().hex
    headers.append((ID_HEADER, request_id.encode("latin-1")))
    client = scope["client"][0] if scope.get("client") else ""
    return ProxiedRequest(
        scope, headers, body, document, session_key(by_name, document, session_header, client), request_id
    )


async def _body_pieces(receive: Receive) -> AsyncIterator[bytes]:
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        if piece := message.get("body", b""):
            yield piece
        if not message.get("more_body", False):
            return

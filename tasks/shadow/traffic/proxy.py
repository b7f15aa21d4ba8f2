"""Proxy requests to the parent or the candidate, and record answers for comparing the two servers.

::

    app = ShadowProxy(settings, routing, recorder).application()      # an ASGI application, served by uvicorn

**mirror**: The parent answers. After the client has its answer, the proxy sends a copy of the request to the candidate
and only records the result, so the candidate cannot affect users. **split**: The candidate answers its share of the
users. If it fails before its first byte, the parent answers instead, and the proxy records both results as a fallback.

A client waits only for the server that answers it. Copies, records and the kill switch have limits, and the proxy
counts everything that exceeds them.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import deque
from collections.abc import AsyncIterator, MutableMapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Literal

import httpx
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Mount, Route
from starlette.types import Receive, Scope, Send

from mergegate.tasks.shadow.arms import ArmRow, ShadowRecord, kill_reason
from mergegate.tasks.shadow.routing import FollowedRouting, goes_to_candidate
from mergegate.tasks.shadow.settings import ShadowSettings
from mergegate.tasks.shadow.traffic.records import DAY_S, Recorder
from mergegate.tasks.shadow.traffic.request import (
    ID_HEADER,
    MAX_BODY_BYTES,
    Arm,
    ArmAnswer,
    ClientConnection,
    ProxiedRequest,
    SessionSecret,
    SlowClient,
    Upstream,
    end_to_end_headers,
    has_key,
    may_be_copied,
    read_key,
    read_request,
    session_hash,
)

_COPY_TIMEOUT_S = 600.0
# A busy parent gets more time because it has no replacement. The parent replaces a candidate that does not connect.
_PARENT_CONNECT_S, _CANDIDATE_CONNECT_S = 30.0, 2.0
_PENDING_COPIES_S = 2.0
_SWITCH_INTERVAL_S = 1.0
_SLOW_S = 0.5  # delay after which a client makes room for another one
_FAULT = 500
_DISCONNECTED = "client left"  # not an error of a server


class _BrokenAnswer(Exception):  # not a failure of the proxy: raised to abort the client's connection
    """A server stopped in the middle of its answer, so the proxy also aborts the client's connection."""


class ShadowProxy:
    """ASGI application that forwards user requests to the parent or the candidate."""

    def __init__(
        self, settings: ShadowSettings, routing: FollowedRouting, recorder: Recorder, secret_file: Path | None = None
    ) -> None:
        self._settings, self._routing, self._recorder = settings, routing, recorder
        self._secret = SessionSecret(secret_file, settings.retention_days * DAY_S)
        self._client_keys = read_key(settings.client_keys_env).encode().split()
        self._servers: dict[Arm, Upstream] = {
            "parent": Upstream(settings.parent, settings.timeout, _PARENT_CONNECT_S),
            "candidate": Upstream(settings.candidate, settings.timeout, _CANDIDATE_CONNECT_S),
        }
        self._clients: set[ClientConnection] = set()
        self._copies: set[asyncio.Task[None]] = set()
        self._recent_rows: dict[Arm, deque[ArmRow]] = {
            arm: deque(maxlen=settings.kill_switch.window) for arm in self._servers
        }
        self._switch_checked = 0.0
        self._started = time.time()

    def application(self) -> Starlette:
        """Return the ASGI application, which serves ``/shadow/status`` and proxies all other paths."""

        @asynccontextmanager
        async def lifespan(_: Starlette) -> AsyncIterator[None]:
            yield
            await self.close()

        routes = [Route("/shadow/status", self._status), Mount("", app=self)]
        return Starlette(routes=routes, lifespan=lifespan)

    async def close(self) -> None:
        """Wait briefly for pending copies, cancel the rest, write queued records and close all connections."""
        if self._copies:
            await asyncio.wait(self._copies, timeout=_PENDING_COPIES_S)
        for task in self._copies:
            task.cancel()
        await asyncio.gather(*self._copies, return_exceptions=True)
        await asyncio.to_thread(self._recorder.close)
        for server in self._servers.values():
            await server.close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one HTTP request through one of the servers."""
        if scope["type"] != "http":
            return
        if self._client_keys and not has_key(scope, self._client_keys):
            self._count("answered 401: no client key")
            await _send_error(send, 401, "the request has no valid key", ((b"www-authenticate", b"Bearer"),))
            return
        if len(self._clients) >= self._settings.max_requests:
            slowest = max(self._clients, key=lambda client: client.delay_s)
            if slowest.delay_s < _SLOW_S:
                self._count("answered 503: too many in flight")
                await _send_error(send, 503, "too many concurrent requests", ((b"retry-after", b"1"),))
                return
            slowest.drop()
            self._clients.discard(slowest)
        client = ClientConnection(receive, send, self._settings.client_timeout)
        self._clients.add(client)
        try:
            request = await read_request(scope, client.receive, self._settings.session_header)
            if request is None:
                await _send_error(send, 413, f"the body exceeds {MAX_BODY_BYTES} bytes")
                return
            await self._answer(request, receive, client.send)
        except SlowClient:
            self._count("answered 408: slow client")
            await _send_error(send, 408, "the body arrived too slowly", ((b"connection", b"close"),))
        finally:
            self._clients.discard(client)

    async def _answer(self, request: ProxiedRequest, receive: Receive, send: Send) -> None:
        routing = self._routing.now()
        arm: Arm = "parent"
        if routing.serving == "promoted":
            arm = "candidate"
        elif routing.watching and routing.mode == "split" and isinstance(request.body, bytes):
            arm = "candidate" if goes_to_candidate(request.key, routing.candidate, routing.share) else "parent"
        self._count("requests")
        if arm == "candidate":
            answer, reply = await self._send_to_arm(request, arm)
            if reply is not None and (answer.status < _FAULT or routing.serving == "promoted"):
                await self._forward_answer(request, answer, reply, receive, send)
                return
            if reply is not None:
                await reply.aclose()
            if not isinstance(request.body, bytes):  # The body has been consumed, so the request cannot be sent again.
                await self._answer_502(request, answer, send)
                return
            answer.fallback = True
            self._record(request, answer, "answer")
            self._count("fallbacks")
        answer, reply = await self._send_to_arm(request, "parent")
        answer.fallback = arm == "candidate"
        if reply is None:
            await self._answer_502(request, answer, send)
            return
        await self._forward_answer(request, answer, reply, receive, send)
        if not (routing.watching and routing.mode == "mirror" and request.is_generation) or answer.error:
            return
        if not goes_to_candidate(request.exchange, routing.candidate, routing.share):
            return
        if not may_be_copied(request.method, request.path, request.document):
            self._count("not copied: may have effects")
        elif len(self._copies) >= self._settings.max_copies:
            self._count("not copied: too many copies")
        else:
            task = asyncio.create_task(self._copy_to_candidate(request))
            self._copies.add(task)
            task.add_done_callback(self._copies.discard)

    async def _send_to_arm(self, request: ProxiedRequest, arm: Arm) -> tuple[ArmAnswer, httpx.Response | None]:
        """Send a request to one arm. Without a response, the second value is None and the answer has an ``error``."""
        answer, server = ArmAnswer(arm), self._servers[arm]
        scope = request.scope
        path = scope.get("raw_path") or scope["path"].encode()
        body, document, model = request.body, request.document, server.server.model
        if isinstance(body, bytes) and document is not None and model is not None and document.get("model") != model:
            body = json.dumps({**document, "model": model}).encode()  # the server's own name
        try:
            reply = await server.send(scope["method"], path, scope["query_string"], request.headers, body)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            answer.error = type(error).__name__
            return answer, None
        answer.status = reply.status_code
        return answer, reply

    async def _forward_answer(
        self, request: ProxiedRequest, answer: ArmAnswer, reply: httpx.Response, receive: Receive, send: Send
    ) -> None:
        """Stream a server's response to the client, and record it."""
        headers = end_to_end_headers(reply.headers.raw)
        max_body_bytes = self._settings.max_body_bytes if request.is_generation else 0
        if not any(name == ID_HEADER for name, _ in headers):
            headers.append((ID_HEADER, request.request_id.encode("latin-1")))

        async def stream_answer() -> None:
            await send({"type": "http.response.start", "status": reply.status_code, "headers": headers})
            async for piece in reply.aiter_raw():
                answer.add(piece, max_body_bytes)
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            answer.is_complete = True  # A client that disconnects after this point has the complete answer.
            await send({"type": "http.response.body", "body": b""})

        async def wait_for_disconnect() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass

        transfer = asyncio.ensure_future(stream_answer())
        disconnect = asyncio.ensure_future(wait_for_disconnect())
        try:
            await asyncio.wait((transfer, disconnect), return_when=asyncio.FIRST_COMPLETED)
            if not transfer.done() and not answer.is_complete:
                answer.error = _DISCONNECTED
                transfer.cancel()
            with suppress(asyncio.CancelledError, OSError):
                await transfer
        except (httpx.HTTPError, SlowClient) as error:
            answer.error = _DISCONNECTED if isinstance(error, SlowClient) else type(error).__name__
            raise _BrokenAnswer from None
        finally:
            disconnect.cancel()
            transfer.cancel()
            with suppress(Exception):
                await asyncio.shield(reply.aclose())
            self._record(request, answer, "answer")

    async def _answer_502(self, request: ProxiedRequest, answer: ArmAnswer, send: Send) -> None:
        self._count(f"answered 502: {answer.arm}")
        self._record(request, answer, "answer")
        await _send_error(send, 502, f"the server did not answer: {answer.error}")

    async def _copy_to_candidate(self, request: ProxiedRequest) -> None:
        answer = ArmAnswer("candidate")
        try:
            async with asyncio.timeout(_COPY_TIMEOUT_S):
                answer, reply = await self._send_to_arm(request, "candidate")
                if reply is not None:
                    try:
                        async for piece in reply.aiter_raw():
                            answer.add(piece, self._settings.max_body_bytes)
                    finally:
                        await reply.aclose()
        except (httpx.HTTPError, TimeoutError) as error:
            answer.error = type(error).__name__
        self._count("copies")
        self._record(request, answer, "copy")

    def _record(self, request: ProxiedRequest, answer: ArmAnswer, role: Literal["answer", "copy"]) -> None:
        if not request.is_generation:
            return
        routing = self._routing.now()
        record = ShadowRecord(
            exchange=request.exchange,
            candidate=routing.candidate,
            role=role,
            arm=answer.arm,
            request_id=request.request_id,
            session=session_hash(request.key, routing.candidate, self._secret.current()),
            at=request.at,
            path=request.path,
            request=request.body if role == "answer" and isinstance(request.body, bytes) else b"",
            status=answer.status,
            response=bytes(answer.body),
            error="" if answer.error == _DISCONNECTED else answer.error,
            fallback=answer.fallback,
            first_byte=answer.first_byte,
            seconds=answer.elapsed_seconds(),
        )
        if answer.error == _DISCONNECTED:
            self._count("clients that left")
        self._recorder.enqueue(record)
        self._recent_rows[answer.arm].append(record.row)
        if answer.arm != "candidate" or not routing.watching:
            return
        now, failed = time.monotonic(), bool(record.error) or record.status >= _FAULT
        if failed or now - self._switch_checked >= _SWITCH_INTERVAL_S:
            self._switch_checked = now
            rows = tuple(self._recent_rows["candidate"]), tuple(self._recent_rows["parent"])
            if (reason := kill_reason(*rows, self._settings.kill_switch)) is not None:
                self._count("switched off")
                self._routing.decide("killed", reason)

    def _count(self, name: str) -> None:
        self._recorder.count(self._routing.now().candidate, name)

    async def _status(self, _: Request) -> JSONResponse:
        routing = self._routing.now()
        return JSONResponse(
            {
                **routing.model_dump(mode="json"),
                "running_s": round(time.time() - self._started, 1),
                "in_flight": len(self._clients),
                "copies_in_flight": len(self._copies),
                "counts": self._recorder.counts(),
            }
        )


async def _send_error(send: Send, status: int, message: str, headers: Sequence[tuple[bytes, bytes]] = ()) -> None:
    """Send an error of the proxy itself, in the format of the OpenAI protocol."""
    error = {"message": f"shadow: {message}", "type": "shadow", "param": None, "code": status}
    body = json.dumps({"error": error}).encode()
    start: MutableMapping[str, Any] = {
        "type": "http.response.start",
        "status": status,
        "headers": [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()), *headers],
    }
    await send(start)
    await send({"type": "http.response.body", "body": body})

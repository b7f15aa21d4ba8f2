"""The proxy before two servers: it answers from one, and lets the other be compared with it.

::

    app = ShadowProxy(settings, routing, recorder).application()      # an ASGI application; uvicorn serves it

**mirror**: the parent answers; when the client has its answer, the candidate is asked the same, and what it says is
only kept. So nothing that the candidate does, or does not do, is felt by anybody. **split**: the candidate answers its
share of the users; where it fails before its first byte, the parent answers in its place, and both are kept as a
fallback.

A client waits for the server that answers it, and for nothing else: copies, records and the switch are bounded, and
what does not fit is counted.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import deque
from collections.abc import AsyncIterator, MutableMapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, Literal

import httpx
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Mount, Route
from starlette.types import Receive, Scope, Send

from mergegate.tasks.shadow.arms import ArmRow
from mergegate.tasks.shadow.recorded_traffic import ShadowRecord
from mergegate.tasks.shadow.routing import FollowedRouting, Routing
from mergegate.tasks.shadow.settings import ShadowSettings
from mergegate.tasks.shadow.switch import kill_reason
from mergegate.tasks.shadow.traffic.arm import goes_to_candidate, session_of
from mergegate.tasks.shadow.traffic.effects import may_be_copied
from mergegate.tasks.shadow.traffic.exchange import ID_HEADER, MOST_BODY, Arm, ArmAnswer, AskedRequest, read_request
from mergegate.tasks.shadow.traffic.recorder import Recorder
from mergegate.tasks.shadow.traffic.upstream import Headers, Upstream, passed_on

_COPY_S = 600.0
# Nobody stands in for the parent, which may be busy; for the candidate the parent does.
_PARENT_CONNECT_S, _CANDIDATE_CONNECT_S = 30.0, 2.0
_LAST_COPIES_S = 2.0
_SWITCH_EVERY_S = 1.0
_FAULT = 500
_LEFT = "client left"  # its own affair, and no error of a server


class _Broken(Exception):  # no error of ours: how a connection is ended that a server ended
    """A server stopped in the middle of its answer; the client's connection ends as it would have ended there."""


class ShadowProxy:
    """All requests go through here.

    Args:
        settings: The servers and the bounds.
        routing: Where requests go.
        recorder: Keeps what they became.
    """

    def __init__(self, settings: ShadowSettings, routing: FollowedRouting, recorder: Recorder) -> None:
        self._settings, self._routing, self._recorder = settings, routing, recorder
        self._servers: dict[Arm, Upstream] = {
            "parent": Upstream(settings.parent, settings.timeout, _PARENT_CONNECT_S),
            "candidate": Upstream(settings.candidate, settings.timeout, _CANDIDATE_CONNECT_S),
        }
        self._in_flight = 0
        self._copies: set[asyncio.Task[None]] = set()
        self._last: dict[Arm, deque[ArmRow]] = {arm: deque(maxlen=settings.switch.of) for arm in self._servers}
        self._switched = 0.0
        self._began = time.time()

    def application(self) -> Starlette:
        """The ASGI application: ``/shadow/status``, and everything else."""

        @asynccontextmanager
        async def lifespan(_: Starlette) -> AsyncIterator[None]:
            yield
            await self.close()

        routes = [Route("/shadow/status", self._status), Mount("", app=self)]
        return Starlette(routes=routes, lifespan=lifespan)

    async def close(self) -> None:
        """Wait a moment for copies, end those that are still asked for, write what waits, close all connections."""
        if self._copies:
            await asyncio.wait(self._copies, timeout=_LAST_COPIES_S)
        for task in self._copies:
            task.cancel()
        await asyncio.gather(*self._copies, return_exceptions=True)
        await asyncio.to_thread(self._recorder.close)
        for server in self._servers.values():
            await server.close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http":
            return
        if self._in_flight >= self._settings.in_flight:
            self._count("answered 503: too many in flight")
            await _say(send, 503, "too many requests at once", ((b"retry-after", b"1"),))
            return
        self._in_flight += 1
        try:
            asked = await read_request(scope, receive, self._settings.session_header)
            if asked is None:
                await _say(send, 413, f"a body of more than {MOST_BODY} bytes")
                return
            await self._answer(asked, receive, send)
        finally:
            self._in_flight -= 1

    async def _answer(self, asked: AskedRequest, receive: Receive, send: Send) -> None:
        routing = self._routing.now()
        arm = self._arm(asked, routing)
        self._count("requests")
        if arm == "candidate":
            answer, reply = await self._ask(asked, arm)
            if reply is not None and (answer.status < _FAULT or routing.serving == "promoted"):
                await self._pass_on(asked, answer, reply, receive, send)
                return
            if reply is not None:
                await reply.aclose()
            if not isinstance(asked.body, bytes):  # It has been read; nobody can be asked again.
                await self._no_answer(asked, answer, send)
                return
            answer.fallback = True
            self._keep(asked, answer, "answer")
            self._count("fallbacks")
        answer, reply = await self._ask(asked, "parent")
        answer.fallback = arm == "candidate"
        if reply is None:
            await self._no_answer(asked, answer, send)
            return
        await self._pass_on(asked, answer, reply, receive, send)
        if routing.watching and routing.mode == "mirror" and asked.is_question and not answer.error:
            self._copy(asked, routing)

    def _arm(self, asked: AskedRequest, routing: Routing) -> Arm:
        if routing.serving == "promoted":
            return "candidate"
        split = routing.watching and routing.mode == "split" and isinstance(asked.body, bytes)
        return "candidate" if split and goes_to_candidate(asked.key, routing.candidate, routing.share) else "parent"

    async def _ask(self, asked: AskedRequest, arm: Arm) -> tuple[ArmAnswer, httpx.Response | None]:
        """The beginning of a server's answer; None, and why in ``error``, where there is none."""
        answer, server = ArmAnswer(arm), self._servers[arm]
        scope = asked.scope
        path = scope.get("raw_path") or scope["path"].encode()
        body = server.renamed(asked.body, asked.document) if isinstance(asked.body, bytes) else asked.body
        try:
            reply = await server.send(scope["method"], path, scope["query_string"], asked.headers, body)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            answer.error = type(error).__name__
            return answer, None
        answer.status = reply.status_code
        return answer, reply

    async def _pass_on(
        self, asked: AskedRequest, answer: ArmAnswer, reply: httpx.Response, receive: Receive, send: Send
    ) -> None:
        """Give the client what a server says, piece by piece, and keep it."""
        headers, most = passed_on(reply.headers.raw), self._settings.body_limit if asked.is_question else 0
        if not any(name == ID_HEADER for name, _ in headers):
            headers.append((ID_HEADER, asked.request_id.encode("latin-1")))
        passing = asyncio.ensure_future(self._send_all(answer, reply, headers, send, most))
        leaving = asyncio.ensure_future(_left(receive))
        try:
            await asyncio.wait((passing, leaving), return_when=asyncio.FIRST_COMPLETED)
            if not passing.done() and not answer.whole:
                answer.error = _LEFT
                passing.cancel()
            with suppress(asyncio.CancelledError, OSError):
                await passing
        except httpx.HTTPError as error:
            answer.error = type(error).__name__
            raise _Broken from None
        finally:
            leaving.cancel()
            passing.cancel()
            with suppress(Exception):
                await asyncio.shield(reply.aclose())
            self._keep(asked, answer, "answer")

    @staticmethod
    async def _send_all(answer: ArmAnswer, reply: httpx.Response, headers: Headers, send: Send, most: int) -> None:
        await send({"type": "http.response.start", "status": reply.status_code, "headers": headers})
        async for piece in reply.aiter_raw():
            answer.add(piece, most)
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        answer.whole = True  # Whoever hangs up from here on has all of it.
        await send({"type": "http.response.body", "body": b""})

    async def _no_answer(self, asked: AskedRequest, answer: ArmAnswer, send: Send) -> None:
        self._count(f"answered 502: {answer.arm}")
        self._keep(asked, answer, "answer")
        await _say(send, 502, f"the server did not answer: {answer.error}")

    def _copy(self, asked: AskedRequest, routing: Routing) -> None:
        """Ask the candidate the same, and tell nobody."""
        if not goes_to_candidate(asked.exchange, routing.candidate, routing.share):
            return
        if not may_be_copied(asked.method, asked.path, asked.document):
            self._count("not copied: may have effects")
            return
        if len(self._copies) >= self._settings.copies:
            self._count("not copied: too many copies")
            return
        task = asyncio.create_task(self._compare(asked))
        self._copies.add(task)
        task.add_done_callback(self._copies.discard)

    async def _compare(self, asked: AskedRequest) -> None:
        answer = ArmAnswer("candidate")
        try:
            async with asyncio.timeout(_COPY_S):
                answer, reply = await self._ask(asked, "candidate")
                if reply is not None:
                    try:
                        async for piece in reply.aiter_raw():
                            answer.add(piece, self._settings.body_limit)
                    finally:
                        await reply.aclose()
        except (httpx.HTTPError, TimeoutError) as error:
            answer.error = type(error).__name__
        self._count("copies")
        self._keep(asked, answer, "copy")

    def _keep(self, asked: AskedRequest, answer: ArmAnswer, role: Literal["answer", "copy"]) -> None:
        if not asked.is_question:
            return
        routing = self._routing.now()
        record = ShadowRecord(
            exchange=asked.exchange,
            candidate=routing.candidate,
            role=role,
            arm=answer.arm,
            request_id=asked.request_id,
            session=session_of(asked.key, routing.candidate),
            at=asked.at,
            path=asked.path,
            request=asked.body if role == "answer" and isinstance(asked.body, bytes) else b"",
            status=answer.status,
            response=bytes(answer.body),
            error="" if answer.error == _LEFT else answer.error,
            fallback=answer.fallback,
            first_byte=answer.first_byte,
            seconds=answer.took(),
        )
        if answer.error == _LEFT:
            self._count("clients that left")
        self._recorder.put(record)
        self._last[answer.arm].append(record.row)
        if answer.arm == "candidate":
            self._look_at_the_switch(routing, at_once=bool(record.error) or record.status >= _FAULT)

    def _look_at_the_switch(self, routing: Routing, *, at_once: bool) -> None:
        now = time.monotonic()
        if not routing.watching or (now - self._switched < _SWITCH_EVERY_S and not at_once):
            return
        self._switched = now
        why = kill_reason(tuple(self._last["candidate"]), tuple(self._last["parent"]), self._settings.switch)
        if why is not None:
            self._count("switched off")
            self._routing.decide("killed", why)

    def _count(self, what: str) -> None:
        self._recorder.count(self._routing.now().candidate, what)

    async def _status(self, _: Request) -> JSONResponse:
        routing = self._routing.now()
        return JSONResponse(
            {
                **routing.model_dump(mode="json"),
                "running_s": round(time.time() - self._began, 1),
                "in_flight": self._in_flight,
                "copies_in_flight": len(self._copies),
                "counts": self._recorder.counts(),
            }
        )


async def _left(receive: Receive) -> None:
    """Returns when the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _say(send: Send, status: int, message: str, headers: Sequence[tuple[bytes, bytes]] = ()) -> None:
    """An answer of the proxy itself, as OpenAI's clients read errors."""
    error = {"message": f"shadow: {message}", "type": "shadow", "param": None, "code": status}
    body = json.dumps({"error": error}).encode()
    start: MutableMapping[str, Any] = {
        "type": "http.response.start",
        "status": status,
        "headers": [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()), *headers],
    }
    await send(start)
    await send({"type": "http.response.body", "body": body})

"""Run an OpenAI-compatible server on loopback with optional faults.

An answer is ``NAME echo QUESTION``, as JSON or as a stream, so it identifies the server and the request. ``fault``
selects what goes wrong.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

PIECES = 4


@dataclass
class Stub:
    """A server that runs in a thread of this process.

    Attributes:
        fault: ``hang`` (before the answer), ``error`` (500), ``garbage`` (invalid JSON), ``cut`` (stops in
        mid-stream),
            ``stall`` (hangs in mid-stream). Default: none.
        seen: Headers and bodies of the received requests, in order.
    """

    name: str
    fault: str = ""
    url: str = ""
    seen: list[tuple[dict[str, str], bytes]] = field(default_factory=list)
    others: list[tuple[str, str, bytes]] = field(default_factory=list)
    released: asyncio.Event = field(default_factory=asyncio.Event)
    loop: asyncio.AbstractEventLoop | None = None

    def release(self) -> None:
        """Let hanging requests continue; callable from any thread."""
        if self.loop is not None:
            self.loop.call_soon_threadsafe(self.released.set)

    def application(self) -> Starlette:
        """Return the ASGI application: chat, completions, and a catch-all route."""
        return Starlette(
            routes=[
                Route("/v1/chat/completions", self._answer, methods=["POST"]),
                Route("/v1/completions", self._answer, methods=["POST"]),
                Route("/{path:path}", self._other, methods=["GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS"]),
            ]
        )

    async def _answer(self, request: Request) -> Response:
        self.loop = asyncio.get_running_loop()
        content = await request.body()
        self.seen.append((dict(request.headers), content))
        if self.fault == "hang":
            await self.released.wait()
        if self.fault == "error":
            return JSONResponse({"error": {"message": "out of order"}}, 500)
        if self.fault == "garbage":
            return Response(b"\x00\xff no JSON \xfe", media_type="application/octet-stream")
        try:
            body = json.loads(content)
        except ValueError:
            return JSONResponse({"error": {"message": "no JSON"}}, 400)
        chat = request.url.path.endswith("chat/completions")
        said = body["messages"][-1]["content"] if chat else body["prompt"]
        text = f"{self.name} echo {said}"
        extra = {"x-served-by": self.name, "x-request-id": request.headers.get("x-request-id", "none")}
        if body.get("stream"):
            return StreamingResponse(self._events(text, chat), media_type="text/event-stream", headers=extra)
        choice: dict[str, Any] = {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
        return JSONResponse(
            {"object": "chat.completion", "model": body.get("model"), "choices": [{"index": 0, **choice}]},
            headers=extra,
        )

    async def _events(self, text: str, chat: bool) -> AsyncIterator[bytes]:
        step = -(-len(text) // PIECES)
        for number, start in enumerate(range(0, len(text), step)):
            if number == 2 and self.fault == "cut":
                raise ConnectionAbortedError
            if number == 2 and self.fault == "stall":
                await self.released.wait()
            piece = text[start : start + step]
            choice = {"delta": {"content": piece}} if chat else {"text": piece}
            yield b"data: " + json.dumps({"choices": [{"index": 0, **choice}]}).encode() + b"\n\n"
            await asyncio.sleep(0)
        yield b"data: [DONE]\n\n"

    async def _other(self, request: Request) -> Response:
        self.others.append((request.method, str(request.url.path), await request.body()))
        return Response(
            f"{self.name} {request.method} {request.url.path}?{request.url.query}", headers={"x-of": self.name}
        )


@contextmanager
def serving(application: Any, lifespan: str = "auto") -> Iterator[str]:
    """Serve an ASGI application on a free loopback port and yield its URL."""
    config = uvicorn.Config(
        application, "127.0.0.1", 0, log_config=None, access_log=False, server_header=False, date_header=False,
        lifespan=lifespan, timeout_graceful_shutdown=1,
    )  # fmt: skip
    server = uvicorn.Server(config)
    ready = threading.Event()
    original = server.startup

    async def startup(sockets: Any = None) -> None:
        await original(sockets)
        ready.set()

    server.startup = startup  # type: ignore[method-assign]  # to be told instead of asking again and again
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    assert ready.wait(30)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(15)


@contextmanager
def stub(name: str, fault: str = "") -> Iterator[Stub]:
    """Run a stub server with that name."""
    made = Stub(name, fault)
    with serving(made.application(), "off") as url:
        made.url = url
        try:
            yield made
        finally:
            made.release()

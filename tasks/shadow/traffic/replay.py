"""Replay traffic from a file: send requests to a proxy as users would, with limits on rate and concurrency.

Each line of the file is one conversation or one request::

    {"messages": [{"role": "user", "content": "…"}], "session": "u7"}     a chat request; other keys are sent as well
    {"prompt": "…"}                                                      one message of a user
    {"turns": ["…", "…"]}                                                MT-Bench format: all messages of a user
    {"path": "/v1/completions", "body": {…}, "session": "u7"}             any request
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

from mergegate.merge_core.errors import InvalidInput
from mergegate.merge_core.parsing import MAX_DATA_BYTES, line_location, parse_line, read_plain

_CHAT = "/v1/chat/completions"
_OWN_KEYS = ("session", "path", "body", "turns", "prompt")  # not sent with a chat request
_FORMS = "lines with messages, prompt, turns, or path and body"


@dataclass(frozen=True)
class Traffic:
    """Requests of one user, sent one after another."""

    session: str  # value of the session header
    path: str
    body: Mapping[str, Any]  # of the first request
    turns: tuple[str, ...] = ()  # further messages; each becomes a request that includes the answers so far


@dataclass
class ReplayResult:
    """Duration of a replay in seconds, and number of requests by HTTP status or error type."""

    statuses: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0

    @property
    def request_count(self) -> int:
        return sum(self.statuses.values())


def read_traffic(file: Path, model: str) -> tuple[Traffic, ...]:
    """Read a JSON Lines file in the formats of the module docstring. ``model`` is the default model name for requests.

    Raises:
        InvalidInput: A line has an unknown format, or the file contains no request.
    """
    traffic = []
    for number, text in enumerate(read_plain(file, MAX_DATA_BYTES).splitlines(), start=1):
        if not text.strip():
            continue
        line = parse_line(text, file, number)
        session = str(line.get("session", line.get("question_id", f"replayed-{number}")))
        turns = [line["prompt"]] if isinstance(line.get("prompt"), str) else line.get("turns")
        if isinstance(line.get("body"), dict) and str(line.get("path", "")).startswith("/"):
            traffic.append(Traffic(session, line["path"], {"model": model, **line["body"]}))
        elif isinstance(line.get("messages"), list):
            fields = {key: value for key, value in line.items() if key not in _OWN_KEYS}
            traffic.append(Traffic(session, _CHAT, {"model": model, **fields}))
        elif isinstance(turns, list) and turns and all(isinstance(turn, str) for turn in turns):
            body = {"model": model, "messages": [{"role": "user", "content": turns[0]}]}
            traffic.append(Traffic(session, _CHAT, body, tuple(turns[1:])))
        else:
            keys = f"a line with the keys {', '.join(sorted(map(str, line)))}"
            raise InvalidInput(line_location(file, number), found=keys, expected=_FORMS)
    if not traffic:
        raise InvalidInput(str(file), found="a file without requests", expected=_FORMS)
    return tuple(traffic)


@dataclass(frozen=True)
class ReplaySettings:
    """Settings of a replay."""

    header: str  # name of the session header
    rate: float  # number of users that start per second
    concurrency: int  # largest number of concurrent requests
    rounds: int = 1  # number of repetitions, each with its own sessions
    stream: bool = False  # whether to request streamed answers
    key: str = ""  # of a client, if the proxy requires one


async def replay(traffic: Sequence[Traffic], url: str, settings: ReplaySettings) -> ReplayResult:
    """Send the requests of all users to a proxy or server at ``url`` (without ``/v1``), and count the responses."""
    import httpx

    result, slots, started = ReplayResult(), asyncio.Semaphore(settings.concurrency), time.perf_counter()
    limits = httpx.Limits(max_connections=settings.concurrency)
    headers = {"Authorization": f"Bearer {settings.key}"} if settings.key else None
    async with httpx.AsyncClient(base_url=url, headers=headers, limits=limits, timeout=600, trust_env=False) as client:

        async def send_requests(user: Traffic, session: str) -> None:
            body: dict[str, Any] = {**user.body, **({"stream": True} if settings.stream else {})}
            for turn in (None, *user.turns):
                if turn is not None:
                    body = {**body, "messages": [*body["messages"], {"role": "user", "content": turn}]}
                async with slots:
                    try:
                        answer = await client.post(user.path, json=body, headers={settings.header: session})
                    except httpx.HTTPError as error:
                        result.statuses[type(error).__name__] += 1
                        return
                result.statuses[str(answer.status_code)] += 1
                if not answer.is_success:
                    return
                if user.turns:
                    text = ""  # the replay does not parse streamed answers
                    with suppress(ValueError, KeyError, IndexError, TypeError):
                        text = str(answer.json()["choices"][0]["message"]["content"])
                    body = {**body, "messages": [*body["messages"], {"role": "assistant", "content": text}]}

        async with asyncio.TaskGroup() as group:
            for number, (repetition, user) in enumerate(product(range(settings.rounds), traffic)):
                delay = started + number / settings.rate - time.perf_counter()
                if delay > 0:
                    await asyncio.sleep(delay)
                session = user.session if repetition == 0 else f"{user.session}-{repetition + 1}"
                group.create_task(send_requests(user, session))
    result.seconds = time.perf_counter() - started
    return result

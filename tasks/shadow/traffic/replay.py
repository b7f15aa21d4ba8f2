"""Traffic from a file: requests sent to a proxy as users would have sent them, so many a second, so many at a time.

A line of the file is one conversation or one request::

    {"messages": [{"role": "user", "content": "…"}], "session": "u7"}     a chat request; other keys are sent, too
    {"prompt": "…"}                                                      what one user says
    {"turns": ["…", "…"]}                                                MT-Bench's form: a conversation by turns
    {"path": "/v1/completions", "body": {…}, "session": "u7"}             any request
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mergegate.merge_core.errors import InvalidInput
from mergegate.merge_core.parsing import MAX_DATA_BYTES, line_location, parse_line, read_plain

_CHAT = "/v1/chat/completions"
_FORMS = "a line with messages, prompt, turns, or path and body"


@dataclass(frozen=True)
class Traffic:
    """One user's requests, sent one after another.

    Attributes:
        session: What the header of sessions says.
        path, body: The first request.
        turns: What the user says next, for as many further requests, each with the answers so far.
    """

    session: str
    path: str
    body: Mapping[str, Any]
    turns: tuple[str, ...] = ()


@dataclass
class Replayed:
    """What came of it."""

    statuses: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0

    @property
    def sent(self) -> int:
        """Requests."""
        return sum(self.statuses.values())


def read_traffic(file: Path, model: str) -> tuple[Traffic, ...]:
    """The traffic of a file.

    Args:
        model: What requests that name none ask for.

    Raises:
        InvalidInput: for a line that is none of the known forms.
    """
    found = []
    for number, line in enumerate(read_plain(file, MAX_DATA_BYTES).splitlines(), start=1):
        if line.strip():
            found.append(_traffic(parse_line(line, file, number), line_location(file, number), model, number))
    if not found:
        raise InvalidInput(str(file), found="no request", expected=_FORMS)
    return tuple(found)


def _traffic(line: Mapping[str, Any], where: str, model: str, number: int) -> Traffic:
    session = str(line.get("session", line.get("question_id", f"replayed-{number}")))
    rest = {key: value for key, value in line.items() if key not in ("session", "path", "body", "turns", "prompt")}
    if isinstance(line.get("body"), dict) and str(line.get("path", "")).startswith("/"):
        return Traffic(session, line["path"], {"model": model, **line["body"]})
    if isinstance(line.get("messages"), list):
        return Traffic(session, _CHAT, {"model": model, **rest})
    said = [line["prompt"]] if isinstance(line.get("prompt"), str) else line.get("turns")
    if isinstance(said, list) and said and all(isinstance(turn, str) for turn in said):
        body = {"model": model, "messages": [{"role": "user", "content": said[0]}]}
        return Traffic(session, _CHAT, body, tuple(said[1:]))
    raise InvalidInput(where, found=f"keys {', '.join(sorted(map(str, line)))}", expected=_FORMS)


def replay(
    traffic: Sequence[Traffic],
    url: str,
    *,
    header: str,
    rate: float,
    at_once: int,
    rounds: int = 1,
    stream: bool = False,
) -> Replayed:
    """Send the traffic, and count what came back.

    Args:
        url: Of a proxy or server, without ``/v1``.
        header: That names a session.
        rate: Users that begin in a second.
        at_once: Requests at a time, at most.
        rounds: How often; each round has sessions of its own.
        stream: Whether answers are asked for as streams.
    """
    return asyncio.run(_replay(list(_rounds(traffic, rounds)), url, header, rate, at_once, stream))


def _rounds(traffic: Sequence[Traffic], rounds: int) -> Iterator[Traffic]:
    for number in range(rounds):
        for one in traffic:
            session = one.session if number == 0 else f"{one.session}-{number + 1}"
            yield Traffic(session, one.path, one.body, one.turns)


async def _replay(users: Sequence[Traffic], url: str, header: str, rate: float, at_once: int, stream: bool) -> Replayed:
    import httpx

    done, room, began = Replayed(), asyncio.Semaphore(at_once), time.perf_counter()
    limits = httpx.Limits(max_connections=at_once)
    async with httpx.AsyncClient(base_url=url, limits=limits, timeout=600, trust_env=False) as client:

        async def user(one: Traffic) -> None:
            body: dict[str, Any] = {**one.body, **({"stream": True} if stream else {})}
            for turn in (None, *one.turns):
                if turn is not None:
                    body = {**body, "messages": [*body["messages"], {"role": "user", "content": turn}]}
                async with room:
                    try:
                        answer = await client.post(one.path, json=body, headers={header: one.session})
                    except httpx.HTTPError as error:
                        done.statuses[type(error).__name__] += 1
                        return
                done.statuses[str(answer.status_code)] += 1
                if not answer.is_success:
                    return
                if one.turns:
                    body = {**body, "messages": [*body["messages"], {"role": "assistant", "content": _text(answer)}]}

        async with asyncio.TaskGroup() as group:
            for number, one in enumerate(users):
                late = began + number / rate - time.perf_counter()
                if late > 0:
                    await asyncio.sleep(late)
                group.create_task(user(one))
    done.seconds = time.perf_counter() - began
    return done


def _text(answer: Any) -> str:
    """What was said; nothing of a stream, whose pieces a replay does not read."""
    try:
        return str(answer.json()["choices"][0]["message"]["content"])
    except (ValueError, KeyError, IndexError, TypeError):
        return ""

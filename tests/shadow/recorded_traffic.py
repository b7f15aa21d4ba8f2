"""Build requests and answers as a proxy records them, and run a judge that can tell right from wrong."""

from __future__ import annotations

import json
import re
from typing import Any

from loopback import Answer
from openai_server import completion

from mergegate.tasks.shadow.recorded_traffic import RecordedAnswer, RecordedPair

CHAT = "/v1/chat/completions"


def chat(*messages: str, **fields: Any) -> bytes:
    """Return a chat request in which user and assistant alternate, starting with the user."""
    roles = ("user", "assistant")
    body = [{"role": roles[at % 2], "content": text} for at, text in enumerate(messages)]
    return json.dumps({"model": "m", "messages": body, **fields}).encode()


def answer(text: str, **more: Any) -> bytes:
    """Return the body of a non-streaming answer."""
    choice = {"index": 0, "message": {"role": "assistant", "content": text, **more}, "finish_reason": "stop"}
    return json.dumps({"choices": [choice]}).encode()


def stream(*pieces: str, ends: bool = True, newline: str = "\n") -> bytes:
    """Return the body of the same answer as a stream of events."""
    events = [{"choices": [{"index": 0, "delta": {"content": piece}, "finish_reason": None}]} for piece in pieces]
    if ends:
        events.append({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
    lines = [f"data: {json.dumps(event)}" for event in events] + (["data: [DONE]"] if ends else [])
    return "".join(line + 2 * newline for line in lines).encode()


def recorded_answer(body: bytes | str, status: int = 200, error: str = "") -> RecordedAnswer:
    """Return an arm's recorded answer."""
    return RecordedAnswer(status, body if isinstance(body, bytes) else answer(body), 0.02, 0.1, error)


def pair(
    number: int,
    session: str = "",
    *,
    request: bytes | None = None,
    parent: RecordedAnswer | str = "good",
    candidate: RecordedAnswer | str = "good",
    path: str = CHAT,
    at: float | None = None,
) -> RecordedPair:
    """Return a recorded pair, in a session of its own unless `session` is given."""
    arms = [recorded_answer(arm) if isinstance(arm, str) else arm for arm in (parent, candidate)]
    at, session = 1000.0 + number if at is None else at, session or f"session-{number}"
    return RecordedPair(f"request-{number}", session, at, path, request or chat(f"question {number}"), *arms)


def prefer_good_answers(body: dict[str, Any]) -> Answer:
    """Prefer the answer with the word 'good', which a damaged copy lacks."""
    shown = body["messages"][1]["content"]
    answers = dict(re.findall(r"<<< answer ([AB]) \w+\n(.*?)\n>>>", shown, re.DOTALL))
    is_good = {name: bool(re.search(r"\bgood\b", text)) for name, text in answers.items()}
    better = is_good["A"] - is_good["B"]
    verdict = {1: "A", -1: "B", 0: "tie"}[better]
    return completion({"reasoning": "one of them <b>is</b> good", "verdict": verdict})

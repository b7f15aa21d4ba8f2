"""Build requests and answers as a proxy records them, and run a judge that can tell right from wrong."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parents[1]
sys.path.append(str(TESTS / "judge"))

from judge_server import Asked, Response, completion, serving  # noqa: E402  # from the tests of the judge

from mergegate.tasks.shadow.recorded_traffic import RecordedAnswer, RecordedPair  # noqa: E402

__all__ = [
    "CHAT",
    "Asked",
    "RecordedPair",
    "Response",
    "answer",
    "chat",
    "completion",
    "pair",
    "prefer_good_answers",
    "recorded_answer",
    "serving",
    "stream",
]

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
    """Return a recorded pair, in a session of its own unless `session` is recorded_answer."""
    return RecordedPair(
        f"request-{number}",
        session or f"session-{number}",
        1000.0 + number if at is None else at,
        path,
        request or chat(f"question {number}"),
        recorded_answer(parent) if isinstance(parent, str) else parent,
        recorded_answer(candidate) if isinstance(candidate, str) else candidate,
    )


def prefer_good_answers(body: dict[str, Any]) -> Response:
    """Prefer the answer with the word 'good', which a damaged copy lacks."""
    shown = body["messages"][1]["content"]
    a, b = (re.search(rf"<<< answer {name} \w+\n(.*?)\n>>>", shown, re.DOTALL) for name in "AB")
    assert a is not None
    assert b is not None
    better = bool(re.search(r"\bgood\b", a[1])) - bool(re.search(r"\bgood\b", b[1]))
    verdict = {1: "A", -1: "B", 0: "tie"}[better]
    return completion({"reasoning": "one of them <b>is</b> good", "verdict": verdict})

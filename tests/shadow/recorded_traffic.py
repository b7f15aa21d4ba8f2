"""Build requests and answers as a proxy records them, and run a judge that can tell right from wrong."""

from __future__ import annotations

import json
import re
from typing import Any

from loopback import Answer
from openai_server import completion

from mergegate.tasks.shadow.arms import RecordedPair, ShadowRecord

CHAT = "/v1/chat/completions"
VERSION = "1a2b3c4d5e6f"


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


def recorded_answer(body: bytes | str, status: int = 200, error: str = "") -> dict[str, Any]:
    """Return the fields of a record for an arm's answer."""
    response = body if isinstance(body, bytes) else answer(body)
    return {"status": status, "response": response, "error": error, "first_byte": 0.02, "seconds": 0.1}


def pair(
    number: int,
    session: str = "",
    *,
    request: bytes | None = None,
    parent: dict[str, Any] | str = "good",
    candidate: dict[str, Any] | str = "good",
    path: str = CHAT,
    at: float | None = None,
) -> RecordedPair:
    """Return a recorded pair, in a session of its own unless `session` is given."""
    fields: dict[str, Any] = {"exchange": f"request-{number}", "candidate": VERSION, "request_id": "r", "path": path}
    fields |= {"at": 1000.0 + number if at is None else at, "session": session or f"session-{number}"}
    fields["request"] = request or chat(f"question {number}")
    answers = [recorded_answer(arm) if isinstance(arm, str) else arm for arm in (parent, candidate)]
    return RecordedPair(
        ShadowRecord(**fields, arm="parent", role="answer", **answers[0]),
        ShadowRecord(**fields, arm="candidate", role="copy", **answers[1]),
    )


def prefer_good_answers(body: dict[str, Any]) -> Answer:
    """Prefer the answer with the word 'good', which a damaged copy lacks."""
    shown = body["messages"][1]["content"]
    answers = dict(re.findall(r"<<< answer ([AB]) \w+\n(.*?)\n>>>", shown, re.DOTALL))
    is_good = {name: bool(re.search(r"\bgood\b", text)) for name, text in answers.items()}
    better = is_good["A"] - is_good["B"]
    verdict = {1: "A", -1: "B", 0: "tie"}[better]
    return completion({"reasoning": "one of them <b>is</b> good", "verdict": verdict})

"""What was asked and answered, as text: bodies of OpenAI's protocol, whole or as a stream of events. Pure functions.

Chat and completions are read. A message may have several parts, as long as they are text; a call of a tool is read as
its name and arguments, so that two equal calls are equal texts. What cannot be shown to a judge as text (pictures,
tokens, several answers to one request) is :class:`Unreadable`, which says why in few words: they are counted by that.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

CHAT, COMPLETION = "/chat/completions", "/completions"
_LARGEST = 32 << 20  # bytes of a body that was compressed, unpacked
_GZIP = b"\x1f\x8b"
_WHO = {"system": "System", "developer": "System", "user": "User", "assistant": "Assistant", "tool": "Tool"}


class Unreadable(ValueError):
    """A body that cannot be shown to a judge; its text is the reason, alike for all of a kind."""


def question_in(path: str, body: bytes) -> str:
    """What was asked: of a chat with one message that message, else the conversation with its speakers named; the
    tools that may be called stand before it.

    Args:
        path: Of the request: ``/v1/chat/completions``.

    Raises:
        Unreadable: for another endpoint, and for what is no text.
    """
    where = path.partition("?")[0].rstrip("/")
    if not where.endswith(COMPLETION):
        raise Unreadable("neither chat nor completion")
    asked = _object(body, "a request that is no JSON")
    if asked.get("n") not in (None, 1) or asked.get("best_of") not in (None, 1):
        raise Unreadable("several answers to one request")
    if not where.endswith(CHAT):
        return _prompt(asked)
    messages = asked.get("messages")
    if not isinstance(messages, list) or not messages or not all(isinstance(one, dict) for one in messages):
        raise Unreadable("a chat without messages")
    if messages[-1].get("role") == "assistant":
        raise Unreadable("an answer that goes on with one that was begun")
    said = [(_WHO.get(str(one.get("role"))), _said_in(one)) for one in messages]
    tools = _tools(asked)
    if len(said) == 1 and not tools:
        return said[0][1]
    if None in (who for who, _ in said):
        raise Unreadable("a message of nobody that is known")
    return "\n\n".join([*([f"Tools: {tools}"] if tools else []), *(f"{who}: {text}" for who, text in said)])


def answer_in(path: str, body: bytes) -> str:
    """What was answered to a request that :func:`question_in` can read.

    Raises:
        Unreadable: when it was cut off, says that something went wrong, or is no text.
    """
    is_chat = path.partition("?")[0].rstrip("/").endswith(CHAT)
    body = _unpacked(body)
    if body.lstrip()[:1] == b"{":
        answer = _object(body, "an answer that was cut off")
        if "error" in answer and not answer.get("choices"):
            raise Unreadable("an error in place of an answer")
        choices = answer.get("choices")
        if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
            raise Unreadable("an answer that is not one")
        found = choices[0].get("message") if is_chat else {"content": choices[0].get("text")}
        return _said_in(found if isinstance(found, dict) else {})
    return _streamed(body, is_chat)


def _prompt(asked: Mapping[str, Any]) -> str:
    prompt = asked.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1:
        prompt = prompt[0]
    if not isinstance(prompt, str):
        raise Unreadable("a prompt that is no text")
    if asked.get("suffix"):
        raise Unreadable("a gap to be filled")
    return prompt


def _said_in(message: Mapping[str, Any]) -> str:
    """The text of a message: what it says, and which tools it calls."""
    content = message.get("content")
    parts = content if isinstance(content, list) else [] if content is None else [content]
    texts = [_text(part) for part in parts]
    if isinstance(refusal := message.get("refusal"), str) and refusal:
        texts.append(refusal)
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list):
        raise Unreadable("a call of a tool that is not understood")
    if isinstance(old := message.get("function_call"), dict):
        calls = [*calls, {"function": old}]
    return "\n".join([text for text in texts if text] + [_call(one) for one in calls])


def _text(part: object) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, dict):
        text = part.get("refusal" if part.get("type") == "refusal" else "text")
        if part.get("type") in ("text", "refusal", "input_text", "output_text") and isinstance(text, str):
            return text
    raise Unreadable("parts that are no text")


def _call(call: object) -> str:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise Unreadable("a call of a tool that is not understood")
    arguments = function.get("arguments", "")
    try:  # order of keys and spaces mean nothing
        arguments = json.dumps(json.loads(arguments), sort_keys=True, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        arguments = str(arguments)
    return f"[calls {function['name']}({arguments})]"


def _tools(asked: Mapping[str, Any]) -> str:
    """Names of the tools that an answer may call."""
    tools = asked.get("tools")
    found = [one.get("function") for one in tools if isinstance(one, dict)] if isinstance(tools, list) else []
    return ", ".join(str(one["name"]) for one in found if isinstance(one, dict) and "name" in one)


def _streamed(body: bytes, is_chat: bool) -> str:
    """The pieces of a stream put together, which must have come to its end."""
    texts: list[str] = []
    calls: dict[int, dict[str, str]] = {}
    ended = False
    for data in _events(body):
        if data == "[DONE]":
            ended = True
            break
        event = _object(data.encode(), "a stream that was cut off")
        if "error" in event:
            raise Unreadable("an error in place of an answer")
        choices = event.get("choices")
        if choices in (None, []):  # what was used, at the end
            continue
        if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
            raise Unreadable("an answer that is not one")
        choice = choices[0]
        if choice.get("index") not in (None, 0):
            raise Unreadable("several answers to one request")
        delta = choice.get("delta") if is_chat else {"content": choice.get("text")}
        delta = delta if isinstance(delta, dict) else {}
        texts += [_text(delta[name]) for name in ("content", "refusal") if delta.get(name) is not None]
        _add_calls(calls, delta.get("tool_calls"))
        ended = ended or choice.get("finish_reason") is not None
    if not ended:
        raise Unreadable("a stream that was cut off")
    called = [{"function": calls[index]} for index in sorted(calls)]
    return _said_in({"content": "".join(texts), "tool_calls": called})


def _add_calls(calls: dict[int, dict[str, str]], pieces: object) -> None:
    for piece in pieces if isinstance(pieces, Sequence) and not isinstance(pieces, str) else ():
        function = piece.get("function") if isinstance(piece, dict) else None
        if not isinstance(function, dict) or not isinstance(piece.get("index", 0), int):
            raise Unreadable("a call of a tool that is not understood")
        call = calls.setdefault(piece.get("index", 0), {"name": "", "arguments": ""})
        for name in call:
            call[name] += str(function.get(name) or "")


def _events(body: bytes) -> Iterator[str]:
    """The data of each server-sent event (WHATWG HTML, 9.2.6): lines end with CR, LF or both, an empty line ends an
    event, and what has no empty line after it did not come whole."""
    text = body.decode(errors="replace").replace("\r\n", "\n").replace("\r", "\n")
    *whole, rest = text.split("\n\n")
    for event in [*whole, *([rest] if rest.strip() == "data: [DONE]" else [])]:
        lines = [line for line in event.split("\n") if line.startswith("data:")]
        if lines:
            yield "\n".join(line.removeprefix("data:").removeprefix(" ") for line in lines)


def _unpacked(body: bytes) -> bytes:
    """Recorded as it was sent: some clients take gzip."""
    if not body.startswith(_GZIP):
        return body
    unpack = zlib.decompressobj(wbits=31)
    try:
        whole = unpack.decompress(body, _LARGEST)
    except zlib.error:
        raise Unreadable("an answer that was cut off") from None
    if not unpack.eof:
        raise Unreadable("an answer that was cut off")
    return whole


def _object(body: bytes, reason: str) -> dict[str, Any]:
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        raise Unreadable(reason) from None
    if not isinstance(found, dict):
        raise Unreadable(reason)
    return found

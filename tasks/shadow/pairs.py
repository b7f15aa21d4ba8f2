"""Sample recorded pairs for the judge, and convert requests and answers of the OpenAI protocol to text. Pure functions.

Each session has one pair, selected by a hash and never by the answers. Requests of one user resemble each other, so
only one request per session counts. A hash of session and request selects it among the requests that can be shown to a
judge. Only then does mergegate read the answers. If one of them failed (a status other than 200, a truncated stream) or
is not text, the pair is left out and counted: failures of a candidate show in its error rate, not in its win rate. Once
a session is in the ledger, later looks never replace its pair.

mergegate reads the records twice, first the requests and then the answers to the selected requests. So memory holds at
most the user text that one look can judge.

Chat and completion endpoints are supported, both as a single JSON body and as an event stream. A message may have
several parts if all of them are text. A tool call becomes its name and arguments, so equal calls are equal texts.
Content that a judge cannot read as text (images, tokens, several answers to one request) is :class:`Unreadable`, with a
short reason, and pairs are counted by reason.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from bisect import insort
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from mergegate.tasks.quality.judge import RecordedAnswerPair
from mergegate.tasks.shadow.arms import RecordedPair

CHAT, COMPLETION = "/chat/completions", "/completions"
_MAX_UNPACKED_BYTES = 32 << 20  # bytes of a decompressed body
_SPEAKERS = {"system": "System", "developer": "System", "user": "User", "assistant": "Assistant", "tool": "Tool"}
_UNKNOWN_CALL = "an unknown form of a tool call"


class Unreadable(ValueError):
    """A body cannot be shown to a judge. The message is the reason, worded the same for all bodies of a kind."""


def question_in(path: str, body: bytes) -> str:
    """Return the question in a request as text.

    A chat with one message and no tools becomes the text of that message. Any other chat becomes a conversation with
    named speakers, after a list of the available tools. ``path`` is the path of the request: ``/v1/chat/completions``.

    Raises:
        Unreadable: The endpoint is not supported or the body is not text.
    """
    endpoint = path.partition("?")[0].rstrip("/")
    if not endpoint.endswith(COMPLETION):
        raise Unreadable("neither a chat nor a completion request")
    request = _parse_object(body, "the request is not JSON")
    if request.get("n") not in (None, 1) or request.get("best_of") not in (None, 1):
        raise Unreadable("several answers to one request")
    if not endpoint.endswith(CHAT):
        prompt = request.get("prompt")
        if isinstance(prompt, list) and len(prompt) == 1:
            prompt = prompt[0]
        if not isinstance(prompt, str):
            raise Unreadable("a prompt that is not text")
        if request.get("suffix"):
            raise Unreadable("a request to fill a gap")
        return prompt
    messages = request.get("messages")
    if not isinstance(messages, list) or not messages or not all(isinstance(message, dict) for message in messages):
        raise Unreadable("a chat without messages")
    if messages[-1].get("role") == "assistant":
        raise Unreadable("a request to continue a partial answer")
    turns = [(_SPEAKERS.get(str(message.get("role"))), _message_text(message)) for message in messages]
    declared = request.get("tools") if isinstance(request.get("tools"), list) else []
    functions = [tool.get("function") for tool in declared or [] if isinstance(tool, dict)]
    tools = ", ".join(str(tool["name"]) for tool in functions if isinstance(tool, dict) and "name" in tool)
    if len(turns) == 1 and not tools:
        return turns[0][1]
    if None in (speaker for speaker, _ in turns):
        raise Unreadable("a message with an unknown role")
    return "\n\n".join([*([f"Tools: {tools}"] if tools else []), *(f"{speaker}: {text}" for speaker, text in turns)])


class AnswerText(NamedTuple):
    """Text of an answer, and whether the token limit cut it off, as the server reports."""

    text: str
    cut_off: bool = False


def answer_in(path: str, body: bytes) -> AnswerText:
    """Return the answer to a request that :func:`question_in` can read.

    Raises:
        Unreadable: The answer is truncated, reports an error, or is not text.
    """
    is_chat = path.partition("?")[0].rstrip("/").endswith(CHAT)
    if body.startswith(b"\x1f\x8b"):  # Bodies are recorded as they were sent, and some clients accept gzip.
        decompressor, content = zlib.decompressobj(wbits=31), b""
        with suppress(zlib.error):
            content = decompressor.decompress(body, _MAX_UNPACKED_BYTES)
        if not decompressor.eof:
            raise Unreadable("a truncated answer")
        body = content
    if body.lstrip()[:1] == b"{":
        answer = _parse_object(body, "a truncated answer")
        if "error" in answer and not answer.get("choices"):
            raise Unreadable("an error instead of an answer")
        choices = answer.get("choices")
        if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
            raise Unreadable("an answer without exactly one choice")
        message = choices[0].get("message") if is_chat else {"content": choices[0].get("text")}
        text = _message_text(message if isinstance(message, dict) else {})
        return AnswerText(text, choices[0].get("finish_reason") == "length")
    return _stream_answer(body, is_chat)


def _message_text(message: Mapping[str, Any]) -> str:
    """Return the text of a message, followed by its tool calls."""
    content = message.get("content")
    parts = content if isinstance(content, list) else [] if content is None else [content]
    texts = [_part_text(part) for part in parts]
    if isinstance(refusal := message.get("refusal"), str) and refusal:
        texts.append(refusal)
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list):
        raise Unreadable(_UNKNOWN_CALL)
    if isinstance(function_call := message.get("function_call"), dict):
        calls = [*calls, {"function": function_call}]
    texts = [text for text in texts if text]
    for call in calls:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise Unreadable(_UNKNOWN_CALL)
        arguments = function.get("arguments", "")
        try:  # Key order and whitespace have no meaning.
            arguments = json.dumps(json.loads(arguments), sort_keys=True, ensure_ascii=False)
        except (TypeError, ValueError, RecursionError):
            arguments = str(arguments)
        texts.append(f"[calls {function['name']}({arguments})]")
    return "\n".join(texts)


def _part_text(part: object) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, dict):
        text = part.get("refusal" if part.get("type") == "refusal" else "text")
        if part.get("type") in ("text", "refusal", "input_text", "output_text") and isinstance(text, str):
            return text
    raise Unreadable("content that is not text")


def _stream_answer(body: bytes, is_chat: bool) -> AnswerText:
    """Return the answer in a stream of server-sent events (WHATWG HTML, 9.2.6), which must be complete.

    Lines end with CR, LF or both, and an empty line ends an event. An event without an empty line after it is
    incomplete and is skipped, unless it is the end marker ``[DONE]``.
    """
    text = body.decode(errors="replace").replace("\r\n", "\n").replace("\r", "\n")
    *events, last = text.split("\n\n")
    if last.strip() == "data: [DONE]":
        events.append(last)

    texts: list[str] = []
    calls: dict[int, dict[str, str]] = {}
    ended = cut_off = False
    for lines in events:
        fields = [line for line in lines.split("\n") if line.startswith("data:")]
        if not fields:
            continue
        data = "\n".join(field.removeprefix("data:").removeprefix(" ") for field in fields)
        if data == "[DONE]":
            ended = True
            break
        event = _parse_object(data.encode(), "a truncated stream")
        if "error" in event:
            raise Unreadable("an error instead of an answer")
        choices = event.get("choices")
        if choices in (None, []):  # token usage, at the end of the stream
            continue
        if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
            raise Unreadable("an answer without exactly one choice")
        choice = choices[0]
        if choice.get("index") not in (None, 0):
            raise Unreadable("several answers to one request")
        delta = choice.get("delta") if is_chat else {"content": choice.get("text")}
        delta = delta if isinstance(delta, dict) else {}
        texts += [_part_text(delta[name]) for name in ("content", "refusal") if delta.get(name) is not None]
        pieces = delta.get("tool_calls")
        for piece in pieces if isinstance(pieces, Sequence) and not isinstance(pieces, str) else ():
            function = piece.get("function") if isinstance(piece, dict) else None
            if not isinstance(function, dict) or not isinstance(piece.get("index", 0), int):
                raise Unreadable(_UNKNOWN_CALL)
            call = calls.setdefault(piece.get("index", 0), {"name": "", "arguments": ""})
            for name in call:
                call[name] += str(function.get(name) or "")
        ended = ended or choice.get("finish_reason") is not None
        cut_off = cut_off or choice.get("finish_reason") == "length"
    if not ended:
        raise Unreadable("a truncated stream")
    tool_calls = [{"function": calls[index]} for index in sorted(calls)]
    return AnswerText(_message_text({"content": "".join(texts), "tool_calls": tool_calls}), cut_off)


def _parse_object(body: bytes, reason: str) -> dict[str, Any]:
    try:
        document = json.loads(body)
    except (ValueError, RecursionError):
        raise Unreadable(reason) from None
    if not isinstance(document, dict):
        raise Unreadable(reason)
    return document


SAME_SESSION = "another request of the same session"
FAILED = "not answered by both servers"


class SampledPair(NamedTuple):
    """A pair to be judged. ``answers.reference`` is the parent's answer, ``answers.merge`` the candidate's."""

    session: str
    at: float
    answers: RecordedAnswerPair

    @property
    def ledger_fields(self) -> tuple[str, str, float]:
        """Request ID, session and time, which the ledger stores for a pair."""
        return self.answers.id, self.session, self.at

    @property
    def measured_facts(self) -> dict[str, Any]:
        """Facts about the parent's and the candidate's answer, which the ledger stores.

        They are the lengths in characters, and whether the token limit cut off the answers.
        """
        cut_off = ("reference" in self.answers.cut_off, "merge" in self.answers.cut_off)
        return {"lengths": (len(self.answers.reference), len(self.answers.merge)), "cut_off": cut_off}


class Sample(NamedTuple):
    """Pairs for one interim look."""

    pairs: tuple[SampledPair, ...]  # half-judged pairs first, then the oldest
    waiting: int  # number of pairs left for the next look
    left_out: Mapping[str, int]  # number of pairs by reason


def sample_pairs(
    read_pairs: Callable[[], Iterable[RecordedPair]],
    *,
    judged_requests: Mapping[str, str],
    half_judged: Collection[str] = (),
    limit: int,
) -> Sample:
    """Return the pairs for one interim look: half-judged pairs first, then the oldest.

    Args:
        read_pairs: Function that returns all recorded pairs. It is called twice.
        judged_requests: ID of the judged request of each session in the ledger.
        half_judged: IDs of requests whose pairs an interrupted look judged in only one order.
        limit: Largest number of pairs in one look.
    """
    left_out: Counter[str] = Counter()
    # First pass: in each session without a pair, select the readable request with the smallest hash.
    selected: dict[str, tuple[bytes, str]] = {}
    for record, _ in read_pairs():
        if record.session in judged_requests:
            left_out[SAME_SESSION] += judged_requests[record.session] != record.exchange
            continue
        try:
            question_in(record.path, record.request)
        except Unreadable as reason:
            left_out[str(reason)] += 1
            continue
        rank = hashlib.sha256(f"{record.session}\n{record.exchange}".encode()).digest()
        previous = selected.get(record.session)
        left_out[SAME_SESSION] += previous is not None
        if previous is None or rank < previous[0]:
            selected[record.session] = rank, record.exchange
    request_ids = {request_id for _, request_id in selected.values()} | set(half_judged)

    # Second pass: hold in memory only the first ``limit`` of the selected pairs whose answers are readable.
    pairs: list[SampledPair] = []
    readable_count = 0
    for pair in read_pairs():
        record = pair.parent
        if record.exchange not in request_ids:
            continue
        if any(each.status != 200 or each.error for each in pair):
            left_out[FAILED] += 1
            continue
        try:
            question = question_in(record.path, record.request)
            parent, candidate = (answer_in(record.path, each.response) for each in pair)
        except Unreadable as reason:
            left_out[str(reason)] += 1
            continue
        readable_count += 1
        cut_off = tuple(name for name, side in (("reference", parent), ("merge", candidate)) if side.cut_off)
        answers = RecordedAnswerPair(record.exchange, question, parent.text, candidate.text, cut_off)
        sampled = SampledPair(record.session, record.at, answers)
        insort(pairs, sampled, key=lambda item: (item.answers.id not in half_judged, item.at, item.answers.id))
        del pairs[limit:]
    return Sample(tuple(pairs), readable_count - len(pairs), dict((+left_out).most_common()))

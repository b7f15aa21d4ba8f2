"""Ask a server the same question about two pictures, and check that the pictures change its answers.

A server may accept pictures and ignore them, for example because the processor's files are missing. Its answers look
healthy, but they are the same for every picture. The two pictures are drawn here, so no image library is needed.
"""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Callable
from typing import Any

from mergegate.tasks.serve.checks import NOT_OFFERED, ServedSubject
from mergegate.tasks.serve.client import Completion, parse_completion
from mergegate.tasks.serve.verdict import Check

_NAME, _EXPECTED = "two pictures", "answers that depend on the picture"
_SIDE = 112  # pixels; a multiple of 14, 16 and 28, the patch sizes of most families
_QUESTION = "What is in this picture?"
_TOKENS = 8
_NOISE = 3  # Smallest ratio of effect to noise that counts.
_Color = tuple[int, int, int]


def check_pictures(subject: ServedSubject) -> list[Check]:
    """Compare the answers about two pictures with each other, and with a repeated answer about the first."""
    if not subject.reads_pictures:
        return []
    if subject.reference is not None and subject.reference.chat is None:
        return [Check.not_offered(_NAME, "the checkpoint has no chat template, which inserts a picture", _EXPECTED)]
    halves = draw_png(lambda x, _: (220, 30, 30) if x < _SIDE // 2 else (30, 30, 220))
    stripes = draw_png(lambda _, y: (250, 250, 250) if y // 14 % 2 else (20, 120, 20))
    replies: list[Completion] = []
    for picture in (halves, stripes, halves):
        answer = subject.client.request("/v1/chat/completions", _request(subject.model, picture))
        if answer.status in NOT_OFFERED:
            return [Check.not_offered(_NAME, answer.complaint, _EXPECTED)]
        reply = parse_completion(answer, is_chat=True)
        if reply is None:
            remedy = "copy the processor's files from a parent (preprocessor_config.json, processor_config.json), and "
            remedy += "check that the server supports pictures for this family"
            return [Check.failed_check(_NAME, answer.complaint, "an answer about a picture", remedy)]
        replies.append(reply)
    return [compare_answers(*replies)]


def compare_answers(first: Completion, second: Completion, repetition: Completion) -> Check:
    """Decide whether the answers depend on the picture. ``repetition`` is another answer about the first picture."""
    if first.text != repetition.text:
        return Check.not_offered(_NAME, "the answers to two equal requests differ", _EXPECTED)
    if first.text != second.text:
        return Check.passed_check(_NAME, "different answers to one question", _EXPECTED)
    effect, noise = _distance(first, second), _distance(first, repetition)
    if effect is None or noise is None:
        return Check.not_offered(_NAME, "equal texts, and the server returns no log-probabilities", _EXPECTED)
    seen = f"log-probabilities differ by up to {effect:.2g} nats between two pictures"
    if effect > _NOISE * noise:
        return Check.passed_check(_NAME, seen, _EXPECTED)
    return Check.failed_check(
        _NAME,
        f"the server ignores pictures: {seen}, and by up to {noise:.2g} between equal requests",
        _EXPECTED,
        "compare the processor's files and image_token_id in config.json with a parent's",
    )


def _distance(first: Completion, second: Completion) -> float | None:
    """Return the largest difference between the log-probabilities of two equal texts, in nats. None: unknown."""
    if first.logprobs is None or second.logprobs is None or len(first.logprobs) != len(second.logprobs):
        return None
    return max((abs(left - right) for left, right in zip(first.logprobs, second.logprobs, strict=True)), default=None)


def _request(model: str, picture: bytes) -> dict[str, Any]:
    url = f"data:image/png;base64,{base64.b64encode(picture).decode()}"
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": _QUESTION}]
    messages = [{"role": "user", "content": content}]
    options = {"max_tokens": _TOKENS, "temperature": 0, "logprobs": True, "seed": 0}
    return {"model": model, "messages": messages, **options}


def draw_png(color: Callable[[int, int], _Color], side: int = _SIDE) -> bytes:
    """Return a square picture as a PNG file. ``color`` returns red, green and blue (0 to 255) at a column and a row."""
    rows = (b"\0" + bytes(part for x in range(side) for part in color(x, y)) for y in range(side))  # 0: no filter

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)  # 8 bits for each of red, green and blue
    parts = (chunk(b"IHDR", header), chunk(b"IDAT", zlib.compress(b"".join(rows))), chunk(b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)

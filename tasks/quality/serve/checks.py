"""Send requests to a running server, check its answers, and measure its speed.

Each function checks one property, however the server was started. It raises ``Unreachable`` if the server does not
answer.
"""

from __future__ import annotations

import base64
import math
import re
import struct
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from mergegate.tasks.base.http import Answer, JsonClient
from mergegate.tasks.quality.serve.answers import Completion, Reference, parse_completion
from mergegate.tasks.quality.serve.settings import ServeSettings
from mergegate.tasks.quality.serve.verdict import Check, ServingCost

NOT_OFFERED = (404, 405, 501)  # statuses with which a server rejects a path that it does not have
_NON_FINITE = re.compile(r"JSON compliant|\bnan\b|\binf(?:inity)?\b", re.IGNORECASE)
_LONGEST_PATTERN = 4  # tokens; with greedy decoding, healthy models repeat longer patterns too
_SHORT = 8  # tokens
_MAX_LOOP_SHARE = 0.5  # share of a continuation that repeats one pattern, above which it is a loop
_BROKEN_MODEL = "look for NaN, zeroed or exchanged weights, and compare them with the parents"


@dataclass(frozen=True)
class ServedSubject:
    """A running server and the facts about its model."""

    client: JsonClient
    model: str
    settings: ServeSettings
    reference: Reference | None  # None if only the server's address is known
    longest: int | None  # longest request in tokens, or None if unknown
    extended: bool = True  # whether the server accepts or ignores vLLM's additional fields
    base: str | None = None  # name under which the server lists the model without the adapter, if it does
    reads_pictures: bool = False  # whether the model reads pictures and writes text

    def complete(self, prompt: str | Sequence[int], max_tokens: int, *, extension: Any = (), **fields: Any) -> Answer:
        """Request a greedy continuation of a text or of token ids.

        ``extension`` holds fields that only vLLM knows; they are omitted if the server rejects them. ``fields`` are
        other fields of the request.
        """
        body = {"model": self.model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, **fields}
        return self.client.request("/v1/completions", body | (dict(extension) if self.extended else {}))


def check_generation(subject: ServedSubject) -> list[Check]:
    """Continue every prompt twice, greedily. Check for text, finite log-probabilities, equal results and loops."""
    first: list[Completion] = []
    again: list[Completion] = []
    for prompt in subject.settings.prompts:
        for completions in (first, again):
            answer = subject.complete(
                prompt, subject.settings.max_tokens, extension={"return_token_ids": True}, logprobs=1, seed=0
            )
            completion = parse_completion(answer)
            if completion is None:
                if _NON_FINITE.search(answer.complaint):
                    return [Check.failed_check("finite logprobs", answer.complaint, "finite numbers", _BROKEN_MODEL)]
                seen = f"after {_quoted(prompt)}: {answer.complaint}"
                return [Check.failed_check("text", seen, "HTTP 200", _BROKEN_MODEL)]
            completions.append(completion)

    name, expected = "finite logprobs", "finite numbers"
    numbers = [number for completion in first for number in completion.logprobs or ()]
    broken = sum(not math.isfinite(number) for number in numbers)
    if not numbers:
        checks = [Check.not_offered(name, "the server returns no log-probabilities")]
    elif broken:
        checks = [Check.failed_check(name, f"{broken} of {len(numbers)} are not finite", expected, _BROKEN_MODEL)]
    else:
        checks = [Check.passed_check(name, f"{len(numbers)} tokens", expected)]

    name, expected = "text", f"after at least half of {len(first)} prompts"
    texts = [completion.text.strip() for completion in first if completion.text.strip()]
    if 2 * len(texts) < len(first) or not texts:
        empty = f"nothing after {len(first) - len(texts)} of {len(first)} prompts"
        checks.append(Check.failed_check(name, empty, expected, _BROKEN_MODEL))
    else:
        checks.append(Check.passed_check(name, _quoted(texts[0]), expected))

    name, unit = "greedy twice", "token ids" if all(completion.exact for completion in first) else "text"
    expected = f"equal {unit} both times"
    for position, (original, repeat) in enumerate(zip(first, again, strict=True)):
        if original.identity != repeat.identity:
            seen = f"prompt {position + 1}: {_quoted(original.text)}, then {_quoted(repeat.text)}"
            remedy = "use a deterministic server, and check the weights for NaN"
            checks.append(Check.failed_check(name, seen, expected, remedy))
            break
    else:
        tokens = sum(completion.tokens for completion in first)
        checks.append(Check.passed_check(name, f"{tokens} tokens after {len(first)} prompts", expected))

    name, expected = "no loop", f"at most half of them over {100 * _MAX_LOOP_SHARE:.0f} % one pattern"
    if all(len(completion.identity) < 2 <= completion.tokens for completion in first):
        return [*checks, Check.not_offered(name, "the server does not return single tokens", expected)]
    # A continuation that ends after a few tokens does not count as a loop.
    shares = [looped_share(item.identity) if len(item.identity) >= _SHORT else 0.0 for item in first]
    loops = [item for item in first if is_loop(item.identity)]
    seen = f"{len(loops)} of {len(shares)}; {100 * max(shares):.0f} % at most"
    if 2 * len(loops) > len(shares):
        return [*checks, Check.failed_check(name, seen, expected, _BROKEN_MODEL)]
    return [*checks, Check.passed_check(name, seen, expected)]


def is_loop(tokens: Sequence[Any]) -> bool:
    """Return whether a continuation mostly repeats one pattern. A short one never counts as a loop."""
    return len(tokens) >= _SHORT and looped_share(tokens) > _MAX_LOOP_SHARE


def looped_share(tokens: Sequence[Any]) -> float:
    """Return the share of ``tokens`` in the longest run that repeats a pattern of at most four tokens, from 0 to 1."""
    longest = 0
    for period in range(1, _LONGEST_PATTERN + 1):
        run = 0
        for position in range(period, len(tokens)):
            run = run + 1 if tokens[position] == tokens[position - period] else 0
            if run >= period:  # at least twice the pattern
                longest = max(longest, run + period)
    return longest / len(tokens) if tokens else 0.0


def check_parity(subject: ServedSubject) -> list[Check]:
    """Compare the likelihood of fixed texts with transformers, token by token. This is the strongest check."""
    name, limit = "parity", subject.settings.max_difference
    expected = f"≤ {limit:g} nats a token from transformers"
    if subject.reference is None or not subject.reference.texts:
        return [Check.not_offered(name, "no checkpoint to compare with", expected)]
    differences = _differences(subject, subject.reference)
    if isinstance(differences, Answer):
        if differences.status != 200:
            return [Check.failed_check(name, differences.complaint, expected, _BROKEN_MODEL)]
        return [Check.not_offered(name, "the server does not return the likelihood of a prompt", expected)]
    mean = fmean(differences) if all(map(math.isfinite, differences)) else math.nan
    seen = f"{mean:.4f} on average of {len(differences)} tokens, {max(differences):.3f} at most"
    if mean <= limit:
        return [Check.passed_check(name, seen, expected)]
    remedy = (
        "the server and transformers compute different models from these files; compare config.json with a parent's"
    )
    return [Check.failed_check(name, seen, expected, remedy)]


def check_adapter(subject: ServedSubject) -> list[Check]:
    """Check that an adapter that is served together with its base takes full effect.

    A server that ignores an adapter or some of its factors answers as the base does, and the parity check does not
    notice this if the adapter has a small effect. The reference includes the adapter. Therefore, the answers with the
    adapter must be at most half as far from the reference as the answers of the base.
    """
    if subject.base is None or subject.reference is None or not subject.reference.texts:
        return []
    name, expected = "adapter", "at most half as far from transformers as the base without it"
    distances: list[float] = []
    for side in (subject, replace(subject, model=subject.base)):
        differences = _differences(side, subject.reference)
        if isinstance(differences, Answer):
            return [Check.not_offered(name, "the server does not return the likelihood of a prompt", expected)]
        distances.append(fmean(differences))
    own, without = distances
    seen = f"{own:.4f} nats a token with it, {without:.4f} without"
    if own <= without / 2:
        return [Check.passed_check(name, seen, expected)]
    if without <= subject.settings.max_difference:
        return [Check.not_offered(name, f"{seen}; the effect is too small to measure", expected)]
    return [Check.failed_check(name, seen, expected, "serve it merged: name base+adapter in a recipe of its own")]


def _differences(subject: ServedSubject, reference: Reference) -> list[float] | Answer:
    """Return the absolute difference from the reference for each token of its texts, in nats.

    If the server does not return log-probabilities for a text, return its answer to that request.
    """
    differences: list[float] = []
    for text in reference.texts:
        # Use vLLM's field or, if the server ignores it, the old fields of OpenAI. The first token has no likelihood.
        ids = list(text.ids)
        answer = subject.complete(ids, 1, extension={"prompt_logprobs": 0})
        completion = parse_completion(answer)
        logprobs = completion.prompt_logprobs if completion else None
        if answer.status == 200 and logprobs is None:
            echoed = parse_completion(subject.complete(ids, 1, echo=True, logprobs=1))
            if echoed is not None and echoed.logprobs is not None and len(echoed.logprobs) >= len(ids):
                logprobs = echoed.logprobs[1 : len(ids)]
        if answer.status != 200 or logprobs is None or len(logprobs) != len(text.logprobs):
            return answer
        differences += [abs(ours - theirs) for ours, theirs in zip(logprobs, text.logprobs, strict=True)]
    return differences


def check_tokenizer(subject: ServedSubject) -> list[Check]:
    """Check that the server splits a text into the same tokens as the checkpoint's tokenizer."""
    if subject.reference is None or not subject.reference.texts:
        return []
    text = subject.reference.texts[0]
    ids = _tokenize(subject, prompt=text.text)
    return [_compare_ids("tokenizer", ids and ids[: len(text.ids)], text.ids)]


def check_chat(subject: ServedSubject) -> list[Check]:
    """Check that the server renders a chat with the checkpoint's own template and answers it."""
    must_chat, chat = subject.settings.chat, subject.reference.chat if subject.reference else None
    if must_chat is False:
        return []
    if subject.reference is not None and chat is None:
        # If a chat is required, the static checks have already failed.
        return [Check.not_offered("chat", "the checkpoint has no chat template")]
    remedy = "set 'chat_template' in the recipe to auto or to the name of a known template"
    if chat is not None and chat.problem:
        return [Check.failed_check("chat", chat.problem, "a template that renders", remedy)]
    messages = list(chat.messages) if chat else [{"role": "user", "content": subject.settings.prompts[0]}]
    body = {"model": subject.model, "messages": messages, "max_tokens": subject.settings.max_tokens, "temperature": 0}
    answer = subject.client.request("/v1/chat/completions", body | {"logprobs": True, "seed": 0})
    if answer.status in NOT_OFFERED:
        if must_chat:
            expected = "an answer, because serve.chat is true"
            return [Check.failed_check("chat", answer.complaint, expected, "use a server that supports chats")]
        return [Check.not_offered("chat", answer.complaint)]
    reply = parse_completion(answer, is_chat=True)
    if reply is None:
        return [Check.failed_check("chat", answer.complaint, "an answer", remedy)]
    if reply.logprobs is not None and not all(map(math.isfinite, reply.logprobs)):
        return [Check.failed_check("chat", "log-probabilities that are not finite", "finite numbers", _BROKEN_MODEL)]
    if not reply.text.strip():
        return [
            Check.failed_check("chat", "an empty answer", "some text", "compare the template with that of a parent")
        ]
    checks = [Check.passed_check("chat", _quoted(reply.text), "some text")]
    if chat is not None:
        ids = _tokenize(subject, messages=messages, add_generation_prompt=True)
        checks.append(_compare_ids("chat template", ids, chat.ids))
    return checks


def _tokenize(subject: ServedSubject, **fields: Any) -> list[int] | None:
    answer = subject.client.request("/tokenize", {"model": subject.model, **fields})
    ids = answer.body.get("tokens") if answer.status == 200 and isinstance(answer.body, dict) else None
    return ids if isinstance(ids, list) else None


def _compare_ids(name: str, theirs: Sequence[int] | None, ours: Sequence[int]) -> Check:
    expected = f"the checkpoint's own {len(ours)} ids"
    if theirs is None:
        return Check.not_offered(name, "the server does not tokenize", expected)
    if tuple(theirs) != tuple(ours):
        first = next((index for index, pair in enumerate(zip(theirs, ours, strict=False)) if pair[0] != pair[1]), None)
        seen = f"id {first} is {theirs[first]}, not {ours[first]}" if first is not None else f"{len(theirs)} ids"
        return Check.failed_check(
            name, seen, expected, "compare tokenizer.json and tokenizer_config.json with a parent's"
        )
    return Check.passed_check(name, f"{len(theirs)} ids agree", expected)


def check_ends(subject: ServedSubject) -> list[Check]:
    """Check that generation stops at each end-of-sequence id, after a turn, and after each prompt in ``stops``."""
    name, field, reference = "end of sequence", "generation_config.json: eos_token_id", subject.reference
    checks: list[Check] = []
    if reference is not None and not reference.ends:
        seen, remedy = "no file specifies which token ends a sequence", "set eos_token_id as in the parents"
        checks = [Check.failed_check(name, seen, "an id", remedy, field)]
    elif reference and reference.chat and (turn := reference.chat.turn_ends) and turn[0] not in reference.ends:
        number, token = turn
        seen = f"a turn of the chat template ends with {token!r} (id {number}), which does not end the sequence"
        expected = f"{number} among {list(reference.ends)}"
        checks = [Check.failed_check(name, seen, expected, f"add {number} to eos_token_id", field)]
    elif reference is not None:
        checks = [Check.passed_check(name, f"stops at {', '.join(map(str, reference.ends))}", "stop")]
        prompt = subject.settings.prompts[0]
        for end in reference.ends:
            # A bias forces this id, independent of the model. The server must stop there.
            answer = subject.complete(prompt, 4, logit_bias={str(end): 100}, seed=0)
            completion = parse_completion(answer)
            if completion is None:
                checks = [Check.not_offered(name, answer.complaint)]
                break
            if completion.finish_reason != "stop":
                unbiased = parse_completion(subject.complete(prompt, 4, seed=0))
                if unbiased is not None and unbiased.identity == completion.identity:
                    checks = [Check.not_offered(name, "the server ignores logit_bias")]
                else:
                    seen = f"the server continues after id {end}: {completion.finish_reason}"
                    checks = [Check.failed_check(name, seen, "stop", "compare eos_token_id with the parents'", field)]
                break

    for prompt in subject.settings.stops:
        completion = parse_completion(answer := subject.complete(prompt, subject.settings.max_tokens))
        seen = f"after {_quoted(prompt)}: " + (
            f"{completion.finish_reason} at {completion.tokens} tokens" if completion else answer.complaint
        )
        expected = "a stop without reaching the limit"
        if completion is None or completion.finish_reason != "stop":
            remedy = "compare eos_token_id with the parents', or increase serve.max_tokens"
            return [*checks, Check.failed_check("stops", seen, expected, remedy)]
        checks.append(Check.passed_check("stops", seen, expected))
    return checks


def check_length_limit(subject: ServedSubject) -> list[Check]:
    """Check that the server rejects an over-long prompt with HTTP 4xx and answers the next prompt."""
    name, expected = "over-long prompt", "HTTP 4xx, then an answer"
    if subject.longest is None:
        return [Check.not_offered(name, "the server does not report its longest request")]
    length = subject.longest + 16
    filler: str | list[int] = "a " * length
    if subject.reference and subject.reference.texts:
        filler = (list(subject.reference.texts[0].ids) * length)[:length]
    answer = subject.complete(filler, 1)
    after = subject.complete(subject.settings.prompts[0], 1)
    seen = f"HTTP {answer.status} to {length:,} tokens, then HTTP {after.status}"
    if 400 <= answer.status < 500 and after.status == 200:
        return [Check.passed_check(name, seen, expected)]
    remedy = "set serve.max_model_len to at most the length that the model supports"
    return [Check.failed_check(name, seen, expected, remedy)]


def _quoted(text: str) -> str:
    short = " ".join(text.split())
    return repr(short if len(short) <= 40 else short[:39] + "…")


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


_TRIES = 3  # the fastest counts, because other load on the machine is not the model's fault
_ENOUGH = 15.0  # seconds after which no further try starts


def measure_speed(subject: ServedSubject) -> tuple[Check, ServingCost]:
    """Measure the speed of one stream, and compare it with ``min_tokens_per_second`` if that is set.

    The fastest of up to three tries counts. The time of a stream includes reading the prompt.
    """
    floor = subject.settings.min_tokens_per_second
    expected = f"≥ {floor:g} tokens/s" if floor is not None else ""
    first: list[float] = []
    rates: list[float] = []
    began = time.monotonic()
    for _ in range(_TRIES):
        answer, seconds = _timed(subject, 1)
        if parse_completion(answer) is not None:
            first.append(seconds)
        answer, seconds = _timed(subject, subject.settings.max_tokens)
        completion = parse_completion(answer)
        if completion is None or not completion.tokens:
            seen = answer.complaint if completion is None else "the server does not report the number of tokens"
            return Check.not_offered("throughput", seen, expected), ServingCost()
        rates.append(completion.tokens / max(seconds, 1e-6))
        if time.monotonic() - began > _ENOUGH:
            break
    cost = ServingCost(seconds_to_first_token=min(first, default=None), tokens_per_second=max(rates))
    if floor is not None and max(rates) < floor:
        remedy = "use a faster machine, or decrease serve.min_tokens_per_second"
        return Check.failed_check("throughput", cost.throughput, expected, remedy), cost
    return Check.passed_check("throughput", cost.throughput, expected), cost


def _timed(subject: ServedSubject, tokens: int) -> tuple[Answer, float]:
    """Request ``tokens`` tokens, and return the answer and the seconds. vLLM generates exactly that many."""
    began = time.monotonic()
    answer = subject.complete(subject.settings.prompts[0], tokens, extension={"ignore_eos": True})
    return answer, time.monotonic() - began


# The checks of a server that answers, in the order in which they run, by what the progress shows.
CHECKS: tuple[tuple[str, Callable[[ServedSubject], list[Check]]], ...] = (
    ("text", check_generation),
    ("parity", check_parity),
    ("the effect of the adapter", check_adapter),
    ("tokenizer", check_tokenizer),
    ("chat", check_chat),
    ("two pictures", check_pictures),
    ("end of sequence", check_ends),
    ("over-long prompt", check_length_limit),
)

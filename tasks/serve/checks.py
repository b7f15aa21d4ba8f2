"""Send requests to a running server and check its answers.

Each function covers one property and returns its checks. None of them depends on how the server was started. If the
server does not answer, they raise ``Unreachable``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from mergegate.tasks.http import Answer
from mergegate.tasks.serve.client import Client, Completion, chat_logprobs_of, chat_text_of, completion_of
from mergegate.tasks.serve.reference import Reference
from mergegate.tasks.serve.settings import ServeSettings
from mergegate.tasks.serve.verdict import Check

_NOT_OFFERED = (404, 405, 501)  # statuses with which a server rejects a path that it does not have
_NO_NUMBER = re.compile(r"JSON compliant|\bnan\b|\binf(?:inity)?\b", re.IGNORECASE)
_LONGEST_PATTERN = 4  # tokens; with greedy decoding, healthy models repeat longer patterns too
_SHORT = 8  # tokens
_LOOPED = 0.5  # share of a continuation that repeats one pattern, above which it is a loop
_BROKEN_MODEL = "look for NaN, zeroed or exchanged weights; compare with the parents"


@dataclass(frozen=True)
class ServedSubject:
    """A running server and the facts about its model.

    Args:
        client: Client that sends the requests.
        model: Name of the model on the server.
        settings: Prompts, texts and limits of the checks.
        reference: Expected answers; None if only the server's address is known.
        longest: Longest request in tokens; None if unknown.
        extended: Whether the server accepts or ignores vLLM's additional fields.
        base: Name under which the server lists the model without the adapter; None if it does not.
    """

    client: Client
    model: str
    settings: ServeSettings
    reference: Reference | None
    longest: int | None
    extended: bool = True
    base: str | None = None

    def complete(self, prompt: str | Sequence[int], max_tokens: int, *, extension: Any = (), **fields: Any) -> Answer:
        """Request a greedy continuation of a text or of token ids.

        Args:
            extension: Fields that only vLLM knows, omitted if the server rejects them.
            fields: Additional fields of the request.
        """
        body = {"model": self.model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, **fields}
        return self.client.request("/v1/completions", body | (dict(extension) if self.extended else {}))


ServerQuestion = Callable[[ServedSubject], list[Check]]


def takes_extensions(subject: ServedSubject) -> bool:
    """Return whether the server accepts or ignores vLLM's additional fields. The request also warms the server up.

    It uses the longest prompt. vLLM 0.32 on a CPU with AMX may use AMX only from the first larger multiplication on,
    and dies of SIGILL if its very first prompt has only a few tokens.
    """
    prompt = max(subject.settings.prompts, key=len)
    answer = subject.complete(prompt, 1, extension={"return_token_ids": True})
    return not (answer.status in (400, 422) and replace(subject, extended=False).complete(prompt, 1).status == 200)


def ask_generation(subject: ServedSubject) -> list[Check]:
    """Continue every prompt twice, greedily. Check for text, finite numbers, equal results and loops."""
    first: list[Completion] = []
    again: list[Completion] = []
    for prompt in subject.settings.prompts:
        for completions in (first, again):
            answer = subject.complete(
                prompt, subject.settings.max_tokens, extension={"return_token_ids": True}, logprobs=1, seed=0
            )
            completion = completion_of(answer)
            if completion is None:
                return [_no_answer(prompt, answer)]
            completions.append(completion)
    return [_finite(first), _text(first), _deterministic(first, again), _loops(first)]


def ask_parity(subject: ServedSubject) -> list[Check]:
    """Compare the likelihood of fixed texts with transformers, token by token. This is the strongest check."""
    name, limit = "parity", subject.settings.max_difference
    expected = f"≤ {limit:g} nats a token from transformers"
    if subject.reference is None or not subject.reference.texts:
        return [Check(name=name, outcome="not offered", seen="no checkpoint to compare with", expected=expected)]
    differences: list[float] = []
    for text in subject.reference.texts:
        answer, seen = _prompt_logprobs(subject, text.ids)
        if answer.status != 200:
            return [Check(name=name, outcome="fail", seen=answer.complaint, expected=expected, remedy=_BROKEN_MODEL)]
        if seen is None or len(seen) != len(text.logprobs):
            return [Check(name=name, outcome="not offered", seen="no likelihood of a prompt", expected=expected)]
        differences += [abs(ours - theirs) for ours, theirs in zip(seen, text.logprobs, strict=True)]
    mean = fmean(differences) if all(map(math.isfinite, differences)) else math.nan
    seen_text = f"{mean:.4f} on average of {len(differences)} tokens, {max(differences):.3f} at most"
    if mean <= limit:
        return [Check(name=name, outcome="pass", seen=seen_text, expected=expected)]
    remedy = (
        "the server and transformers compute different models from these files: compare config.json with a parent's"
    )
    return [Check(name=name, outcome="fail", seen=seen_text, expected=expected, remedy=remedy)]


def ask_adapter(subject: ServedSubject) -> list[Check]:
    """Check that an adapter that is served together with its base takes full effect.

    A server that ignores an adapter, or some of its factors, answers as the base does. The parity check does not notice
    this if the adapter is small. Therefore the answers must be at most half as far from the reference, which includes
    the adapter, as the answers of the base are.
    """
    if subject.base is None or subject.reference is None or not subject.reference.texts:
        return []
    name, expected = "adapter", "at most half as far from transformers as the base without it"
    distances: list[float] = []
    for side in (subject, replace(subject, model=subject.base)):
        differences: list[float] = []
        for text in subject.reference.texts:
            _, seen = _prompt_logprobs(side, text.ids)
            if seen is None or len(seen) != len(text.logprobs):
                return [Check(name=name, outcome="not offered", seen="no likelihood of a prompt", expected=expected)]
            differences += [abs(ours - theirs) for ours, theirs in zip(seen, text.logprobs, strict=True)]
        distances.append(fmean(differences))
    own, without = distances
    seen_text = f"{own:.4f} nats a token with it, {without:.4f} without"
    if own <= without / 2:
        return [Check(name=name, outcome="pass", seen=seen_text, expected=expected)]
    if without <= subject.settings.max_difference:
        return [Check(name=name, outcome="not offered", seen=f"{seen_text}: too little to tell", expected=expected)]
    return [_failed(name, seen_text, expected, "serve it merged: name base+adapter in a recipe of its own")]


def ask_tokenizer(subject: ServedSubject) -> list[Check]:
    """Check that the server splits a text into the same tokens as the checkpoint's tokenizer."""
    if subject.reference is None or not subject.reference.texts:
        return []
    text = subject.reference.texts[0]
    ids = _tokenize(subject, prompt=text.text)
    ours = text.ids if ids is None else tuple(ids[: len(text.ids)])
    return [_compare_ids("tokenizer", ids, ours, text.ids)]


def ask_chat(subject: ServedSubject) -> list[Check]:
    """Check that the server renders a chat with the checkpoint's own template and answers it."""
    must_chat, chat = subject.settings.chat, subject.reference.chat if subject.reference else None
    if must_chat is False:
        return []
    if subject.reference is not None and chat is None:
        # If a chat is required, the static checks have already failed.
        return [Check(name="chat", outcome="not offered", seen="the checkpoint has no chat template")]
    remedy = "recipe: chat_template: auto, or the name of a known one"
    if chat is not None and chat.problem:
        return [_failed("chat", chat.problem, "a template that renders", remedy)]
    messages = list(chat.messages) if chat else [{"role": "user", "content": subject.settings.prompts[0]}]
    body = {"model": subject.model, "messages": messages, "max_tokens": subject.settings.max_tokens, "temperature": 0}
    answer = subject.client.request("/v1/chat/completions", body | {"logprobs": True, "seed": 0})
    if answer.status in _NOT_OFFERED:
        if must_chat:
            return [_failed("chat", answer.complaint, "an answer: serve.chat is true", "a server that offers chats")]
        return [Check(name="chat", outcome="not offered", seen=answer.complaint)]
    text = chat_text_of(answer)
    if text is None:
        return [_failed("chat", answer.complaint, "an answer", remedy)]
    numbers = chat_logprobs_of(answer)
    if numbers is not None and not all(map(math.isfinite, numbers)):
        return [_failed("chat", "log-probabilities that are no numbers", "finite ones", _BROKEN_MODEL)]
    if not text.strip():
        return [_failed("chat", "an empty answer", "some text", "compare the template with that of a parent")]
    checks = [Check(name="chat", outcome="pass", seen=_quoted(text), expected="some text")]
    if chat is not None:
        ids = _tokenize(subject, messages=messages, add_generation_prompt=True)
        checks.append(_compare_ids("chat template", ids, tuple(ids or ()), chat.ids))
    return checks


def ask_end(subject: ServedSubject) -> list[Check]:
    """Check that a sequence ends at every id that should end it, after a turn, and after each prompt in ``stops``."""
    checks = []
    reference = subject.reference
    if reference is not None:
        checks.append(_end_tokens(subject, reference))
    for prompt in subject.settings.stops:
        completion = completion_of(answer := subject.complete(prompt, subject.settings.max_tokens))
        seen = f"after {_quoted(prompt)}: " + (
            f"{completion.finish_reason} at {completion.tokens} tokens" if completion else answer.complaint
        )
        if completion is None or completion.finish_reason != "stop":
            remedy = "compare eos_token_id with the parents', or raise serve.max_tokens"
            return [*checks, _failed("stops", seen, "stop, by itself", remedy)]
        checks.append(Check(name="stops", outcome="pass", seen=seen, expected="stop, by itself"))
    return checks


def ask_too_long(subject: ServedSubject) -> list[Check]:
    """Check that the server rejects an over-long prompt with HTTP 4xx and answers the next prompt."""
    name, expected = "over-long prompt", "HTTP 4xx, then an answer"
    if subject.longest is None:
        return [Check(name=name, outcome="not offered", seen="the server does not say how long a request may be")]
    filler: str | list[int] = "a " * (subject.longest + 16)
    if subject.reference and subject.reference.texts:
        filler = (list(subject.reference.texts[0].ids) * (subject.longest + 16))[: subject.longest + 16]
    answer = subject.complete(filler, 1)
    after = subject.complete(subject.settings.prompts[0], 1)
    seen = f"HTTP {answer.status} to {subject.longest + 16:,} tokens, then HTTP {after.status}"
    if 400 <= answer.status < 500 and after.status == 200:
        return [Check(name=name, outcome="pass", seen=seen, expected=expected)]
    return [_failed(name, seen, expected, "serve.max_model_len must not exceed what the model was made for")]


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


def _finite(completions: Sequence[Completion]) -> Check:
    numbers = [number for completion in completions for number in completion.logprobs or ()]
    if not numbers:
        return Check(name="finite logprobs", outcome="not offered", seen="the server gives no log-probabilities")
    broken = sum(not math.isfinite(number) for number in numbers)
    if broken:
        return _failed("finite logprobs", f"{broken} of {len(numbers)} are no numbers", "finite ones", _BROKEN_MODEL)
    return Check(name="finite logprobs", outcome="pass", seen=f"{len(numbers)} tokens", expected="finite ones")


def _text(completions: Sequence[Completion]) -> Check:
    name, expected = "text", f"after at least half of {len(completions)} prompts"
    texts = [completion.text.strip() for completion in completions if completion.text.strip()]
    if 2 * len(texts) < len(completions) or not texts:
        empty = f"nothing after {len(completions) - len(texts)} of {len(completions)} prompts"
        return _failed(name, empty, expected, _BROKEN_MODEL)
    return Check(name=name, outcome="pass", seen=_quoted(texts[0]), expected=expected)


def _deterministic(first: Sequence[Completion], again: Sequence[Completion]) -> Check:
    name, unit = "greedy twice", "token ids" if all(completion.exact for completion in first) else "text"
    expected = f"equal {unit} both times"
    for position, (original, repeat) in enumerate(zip(first, again, strict=True)):
        if original.identity != repeat.identity:
            seen = f"prompt {position + 1}: {_quoted(original.text)}, then {_quoted(repeat.text)}"
            return _failed(name, seen, expected, "a server that is deterministic, or a model whose numbers are")
    tokens = sum(completion.tokens for completion in first)
    return Check(name=name, outcome="pass", seen=f"{tokens} tokens after {len(first)} prompts", expected=expected)


def _loops(completions: Sequence[Completion]) -> Check:
    name, expected = "no loop", f"at most half of them over {100 * _LOOPED:.0f} % one pattern"
    if all(len(completion.identity) < 2 <= completion.tokens for completion in completions):
        return Check(name=name, outcome="not offered", seen="the server tells no tokens apart", expected=expected)
    # A continuation that ends after a few tokens does not count as a loop.
    shares = [looped_share(item.identity) if len(item.identity) >= _SHORT else 0.0 for item in completions]
    loops = [share for share in shares if share > _LOOPED]
    seen = f"{len(loops)} of {len(shares)}; {100 * max(shares):.0f} % at most"
    if 2 * len(loops) > len(shares):
        return _failed(name, seen, expected, _BROKEN_MODEL)
    return Check(name=name, outcome="pass", seen=seen, expected=expected)


def _no_answer(prompt: str, answer: Answer) -> Check:
    if _NO_NUMBER.search(answer.complaint):
        return _failed("finite logprobs", answer.complaint, "finite ones", _BROKEN_MODEL)
    return _failed("text", f"after {_quoted(prompt)}: {answer.complaint}", "HTTP 200", _BROKEN_MODEL)


def _prompt_logprobs(subject: ServedSubject, ids: Sequence[int]) -> tuple[Answer, tuple[float, ...] | None]:
    """Request log-probabilities of the prompt's tokens except the first, with vLLM's field or the old OpenAI fields."""
    answer = subject.complete(list(ids), 1, extension={"prompt_logprobs": 0})
    completion = completion_of(answer)
    if answer.status != 200 or (completion is not None and completion.prompt_logprobs is not None):
        return answer, completion.prompt_logprobs if completion else None
    echoed = subject.complete(list(ids), 1, echo=True, logprobs=1)
    numbers = completion.logprobs if (completion := completion_of(echoed)) else None
    if numbers is None or len(numbers) < len(ids):
        return answer, None
    return echoed, numbers[1 : len(ids)]


def _tokenize(subject: ServedSubject, **fields: Any) -> list[int] | None:
    answer = subject.client.request("/tokenize", {"model": subject.model, **fields})
    ids = answer.body.get("tokens") if answer.status == 200 and isinstance(answer.body, dict) else None
    return ids if isinstance(ids, list) else None


def _compare_ids(name: str, ids: list[int] | None, theirs: tuple[int, ...], ours: tuple[int, ...]) -> Check:
    expected = f"the checkpoint's own {len(ours)} ids"
    if ids is None:
        return Check(name=name, outcome="not offered", seen="the server does not tokenize", expected=expected)
    if theirs != ours:
        first = next((index for index, pair in enumerate(zip(theirs, ours, strict=False)) if pair[0] != pair[1]), None)
        seen = f"id {first} is {theirs[first]}, not {ours[first]}" if first is not None else f"{len(theirs)} ids"
        return _failed(name, seen, expected, "compare tokenizer.json and tokenizer_config.json with a parent's")
    return Check(name=name, outcome="pass", seen=f"{len(theirs)} ids agree", expected=expected)


def _end_tokens(subject: ServedSubject, reference: Reference) -> Check:
    name, field = "end of sequence", "generation_config.json: eos_token_id"
    if not reference.ends:
        seen, remedy = "nothing says which token ends a sequence", "set eos_token_id, as the parents have it"
        return _failed(name, seen, "an id", remedy, where=field)
    if reference.chat and reference.chat.turn_ends and reference.chat.turn_ends[0] not in reference.ends:
        number, token = reference.chat.turn_ends
        seen = f"a turn of the chat template ends with {token!r} (id {number}), at which nothing stops"
        return _failed(
            name, seen, f"{number} among {list(reference.ends)}", f"add {number} to eos_token_id", where=field
        )
    for end in reference.ends:
        # A bias forces this id, independent of the model. The server must stop there.
        completion = completion_of(
            answer := subject.complete(subject.settings.prompts[0], 4, logit_bias={str(end): 100}, seed=0)
        )
        if completion is None:
            return Check(name=name, outcome="not offered", seen=answer.complaint)
        if completion.finish_reason != "stop":
            if _ignores_bias(subject, completion):
                return Check(name=name, outcome="not offered", seen="the server overlooks logit_bias")
            seen = f"goes on after id {end}: {completion.finish_reason}"
            return _failed(name, seen, "stop", "compare eos_token_id with the parents'", where=field)
    return Check(name=name, outcome="pass", seen=f"stops at {', '.join(map(str, reference.ends))}", expected="stop")


def _ignores_bias(subject: ServedSubject, biased: Completion) -> bool:
    """Return whether the continuation is the same without bias, which means that the server ignored the bias."""
    plain = completion_of(subject.complete(subject.settings.prompts[0], 4, seed=0))
    return plain is not None and plain.identity == biased.identity


def _failed(name: str, seen: str, expected: str, remedy: str, where: str = "") -> Check:
    return Check(name=name, outcome="fail", seen=seen, expected=expected, remedy=remedy, where=where)


def _quoted(text: str) -> str:
    short = " ".join(text.split())
    return repr(short if len(short) <= 40 else short[:39] + "…")

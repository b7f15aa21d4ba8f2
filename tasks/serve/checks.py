"""What a running server is asked, and what its answers must be.

Each function asks one thing and returns its checks; none knows how the server was started. A server that gives no
answer raises ``Unreachable`` out of them.
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

_NOT_OFFERED = (404, 405, 501)  # what a server says to a path that it does not have
_NO_NUMBER = re.compile(r"JSON compliant|\bnan\b|\binf(?:inity)?\b", re.IGNORECASE)
_LONGEST_PATTERN = 4  # tokens; longer ones are repeated by healthy models, too, when asked greedily
_SHORT = 8  # tokens
_LOOPED = 0.5  # share of a continuation that is one pattern over and over
_BROKEN_MODEL = "look for NaN, zeroed or exchanged weights; compare with the parents"


@dataclass(frozen=True)
class ServedSubject:
    """A running server and what is known about its model.

    Args:
        client: Where to ask.
        model: What the server calls it.
        settings: What to ask.
        reference: How it should answer; None for a server of which only the address is known.
        longest: Tokens of the longest request; None if unknown.
        extended: Whether it takes vLLM's further fields, or at least overlooks them.
        base: What it calls the model without the adapter; None where none is served as such.
    """

    client: Client
    model: str
    settings: ServeSettings
    reference: Reference | None
    longest: int | None
    extended: bool = True
    base: str | None = None

    def complete(self, prompt: str | Sequence[int], max_tokens: int, *, extension: Any = (), **fields: Any) -> Answer:
        """A greedy continuation of text or ids; ``extension``: fields of vLLM's, left out where they are refused."""
        body = {"model": self.model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, **fields}
        return self.client.request("/v1/completions", body | (dict(extension) if self.extended else {}))


ServerQuestion = Callable[[ServedSubject], list[Check]]


def takes_extensions(asked: ServedSubject) -> bool:
    """Whether vLLM's fields are taken or overlooked; also the request that warms the server up.

    It takes the longest prompt: vLLM on a CPU with AMX has the right to use it from the first larger multiplication
    on, and dies of SIGILL if the first prompt of all has but a few tokens (0.32).
    """
    prompt = max(asked.settings.prompts, key=len)
    answer = asked.complete(prompt, 1, extension={"return_token_ids": True})
    return not (answer.status in (400, 422) and replace(asked, extended=False).complete(prompt, 1).status == 200)


def ask_generation(asked: ServedSubject) -> list[Check]:
    """Every prompt twice, greedily: there is text, it is the same, its numbers are numbers, and it goes somewhere."""
    first: list[Completion] = []
    again: list[Completion] = []
    for prompt in asked.settings.prompts:
        for completions in (first, again):
            answer = asked.complete(
                prompt, asked.settings.max_tokens, extension={"return_token_ids": True}, logprobs=1, seed=0
            )
            completion = completion_of(answer)
            if completion is None:
                return [_no_answer(prompt, answer)]
            completions.append(completion)
    return [_finite(first), _text(first), _deterministic(first, again), _loops(first)]


def ask_parity(asked: ServedSubject) -> list[Check]:
    """The likelihood of fixed texts, token by token, against transformers: the strongest check there is."""
    name, limit = "parity", asked.settings.max_difference
    expected = f"≤ {limit:g} nats a token from transformers"
    if asked.reference is None or not asked.reference.texts:
        return [Check(name=name, outcome="not offered", seen="no checkpoint to compare with", expected=expected)]
    differences: list[float] = []
    for text in asked.reference.texts:
        answer, seen = _prompt_logprobs(asked, text.ids)
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


def ask_adapter(asked: ServedSubject) -> list[Check]:
    """Whether an adapter that is served beside its base does anything, and all that it should.

    A server that overlooks an adapter, or some of its factors, answers as the base does; of a small adapter, that is
    within what parity lets pass. So the answers must lie nearer to the reference, which has the adapter, than half of
    what the base's are away from it.
    """
    if asked.base is None or asked.reference is None or not asked.reference.texts:
        return []
    name, expected = "adapter", "at most half as far from transformers as the base without it"
    sides: list[float] = []
    for side in (asked, replace(asked, model=asked.base)):
        apart: list[float] = []
        for text in asked.reference.texts:
            _, seen = _prompt_logprobs(side, text.ids)
            if seen is None or len(seen) != len(text.logprobs):
                return [Check(name=name, outcome="not offered", seen="no likelihood of a prompt", expected=expected)]
            apart += [abs(ours - theirs) for ours, theirs in zip(seen, text.logprobs, strict=True)]
        sides.append(fmean(apart))
    own, without = sides
    seen_text = f"{own:.4f} nats a token with it, {without:.4f} without"
    if own <= without / 2:
        return [Check(name=name, outcome="pass", seen=seen_text, expected=expected)]
    if without <= asked.settings.max_difference:
        return [Check(name=name, outcome="not offered", seen=f"{seen_text}: too little to tell", expected=expected)]
    return [_failed(name, seen_text, expected, "serve it merged: name base+adapter in a recipe of its own")]


def ask_tokenizer(asked: ServedSubject) -> list[Check]:
    """Whether the server cuts a text into the tokens that the checkpoint's tokenizer finds."""
    if asked.reference is None or not asked.reference.texts:
        return []
    text = asked.reference.texts[0]
    ids = _tokenized(asked, prompt=text.text)
    ours = text.ids if ids is None else tuple(ids[: len(text.ids)])
    return [_ids_agree("tokenizer", ids, ours, text.ids)]


def ask_chat(asked: ServedSubject) -> list[Check]:
    """Whether a chat is rendered as the checkpoint's own template says, and answered."""
    wanted, chat = asked.settings.chat, asked.reference.chat if asked.reference else None
    if wanted is False:
        return []
    if asked.reference is not None and chat is None:
        # Required, the static checks have refused it already.
        return [Check(name="chat", outcome="not offered", seen="the checkpoint has no chat template")]
    remedy = "recipe: chat_template: auto, or the name of a known one"
    if chat is not None and chat.problem:
        return [_failed("chat", chat.problem, "a template that renders", remedy)]
    messages = list(chat.messages) if chat else [{"role": "user", "content": asked.settings.prompts[0]}]
    body = {"model": asked.model, "messages": messages, "max_tokens": asked.settings.max_tokens, "temperature": 0}
    answer = asked.client.request("/v1/chat/completions", body | {"logprobs": True, "seed": 0})
    if answer.status in _NOT_OFFERED:
        if wanted:
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
        ids = _tokenized(asked, messages=messages, add_generation_prompt=True)
        checks.append(_ids_agree("chat template", ids, tuple(ids or ()), chat.ids))
    return checks


def ask_end(asked: ServedSubject) -> list[Check]:
    """Whether a sequence ends where it should: at every id that ends one, after a turn, and after ``stops``."""
    checks = []
    reference = asked.reference
    if reference is not None:
        checks.append(_end_tokens(asked, reference))
    for prompt in asked.settings.stops:
        completion = completion_of(answer := asked.complete(prompt, asked.settings.max_tokens))
        seen = f"after {_quoted(prompt)}: " + (
            f"{completion.finish_reason} at {completion.tokens} tokens" if completion else answer.complaint
        )
        if completion is None or completion.finish_reason != "stop":
            remedy = "compare eos_token_id with the parents', or raise serve.max_tokens"
            return [*checks, _failed("stops", seen, "stop, by itself", remedy)]
        checks.append(Check(name="stops", outcome="pass", seen=seen, expected="stop, by itself"))
    return checks


def ask_too_long(asked: ServedSubject) -> list[Check]:
    """Whether a prompt that does not fit is refused cleanly, and the next one is answered."""
    name, expected = "over-long prompt", "HTTP 4xx, then an answer"
    if asked.longest is None:
        return [Check(name=name, outcome="not offered", seen="the server does not say how long a request may be")]
    filler: str | list[int] = "a " * (asked.longest + 16)
    if asked.reference and asked.reference.texts:
        filler = (list(asked.reference.texts[0].ids) * (asked.longest + 16))[: asked.longest + 16]
    answer = asked.complete(filler, 1)
    after = asked.complete(asked.settings.prompts[0], 1)
    seen = f"HTTP {answer.status} to {asked.longest + 16:,} tokens, then HTTP {after.status}"
    if 400 <= answer.status < 500 and after.status == 200:
        return [Check(name=name, outcome="pass", seen=seen, expected=expected)]
    return [_failed(name, seen, expected, "serve.max_model_len must not exceed what the model was made for")]


def looped_share(tokens: Sequence[Any]) -> float:
    """Share of ``tokens`` in the longest stretch that repeats a pattern of at most four of them; 0 to 1."""
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
    name, what = "greedy twice", "token ids" if all(completion.exact for completion in first) else "text"
    expected = f"equal {what} both times"
    for position, (one, other) in enumerate(zip(first, again, strict=True)):
        if one.identity != other.identity:
            seen = f"prompt {position + 1}: {_quoted(one.text)}, then {_quoted(other.text)}"
            return _failed(name, seen, expected, "a server that is deterministic, or a model whose numbers are")
    tokens = sum(completion.tokens for completion in first)
    return Check(name=name, outcome="pass", seen=f"{tokens} tokens after {len(first)} prompts", expected=expected)


def _loops(completions: Sequence[Completion]) -> Check:
    name, expected = "no loop", f"at most half of them over {100 * _LOOPED:.0f} % one pattern"
    if all(len(completion.identity) < 2 <= completion.tokens for completion in completions):
        return Check(name=name, outcome="not offered", seen="the server tells no tokens apart", expected=expected)
    # What ended by itself after a few tokens is no loop.
    shares = [looped_share(each.identity) if len(each.identity) >= _SHORT else 0.0 for each in completions]
    loops = [share for share in shares if share > _LOOPED]
    seen = f"{len(loops)} of {len(shares)}; {100 * max(shares):.0f} % at most"
    if 2 * len(loops) > len(shares):
        return _failed(name, seen, expected, _BROKEN_MODEL)
    return Check(name=name, outcome="pass", seen=seen, expected=expected)


def _no_answer(prompt: str, answer: Answer) -> Check:
    if _NO_NUMBER.search(answer.complaint):
        return _failed("finite logprobs", answer.complaint, "finite ones", _BROKEN_MODEL)
    return _failed("text", f"after {_quoted(prompt)}: {answer.complaint}", "HTTP 200", _BROKEN_MODEL)


def _prompt_logprobs(asked: ServedSubject, ids: Sequence[int]) -> tuple[Answer, tuple[float, ...] | None]:
    """Log-probabilities of the prompt's own tokens but the first, in vLLM's way or the old way of OpenAI."""
    answer = asked.complete(list(ids), 1, extension={"prompt_logprobs": 0})
    completion = completion_of(answer)
    if answer.status != 200 or (completion is not None and completion.prompt_logprobs is not None):
        return answer, completion.prompt_logprobs if completion else None
    echoed = asked.complete(list(ids), 1, echo=True, logprobs=1)
    numbers = completion.logprobs if (completion := completion_of(echoed)) else None
    if numbers is None or len(numbers) < len(ids):
        return answer, None
    return echoed, numbers[1 : len(ids)]


def _tokenized(asked: ServedSubject, **what: Any) -> list[int] | None:
    answer = asked.client.request("/tokenize", {"model": asked.model, **what})
    ids = answer.body.get("tokens") if answer.status == 200 and isinstance(answer.body, dict) else None
    return ids if isinstance(ids, list) else None


def _ids_agree(name: str, offered: list[int] | None, theirs: tuple[int, ...], ours: tuple[int, ...]) -> Check:
    expected = f"the checkpoint's own {len(ours)} ids"
    if offered is None:
        return Check(name=name, outcome="not offered", seen="the server does not tokenize", expected=expected)
    if theirs != ours:
        place = next((at for at, pair in enumerate(zip(theirs, ours, strict=False)) if pair[0] != pair[1]), None)
        at = f"id {place} is {theirs[place]}, not {ours[place]}" if place is not None else f"{len(theirs)} ids"
        return _failed(name, at, expected, "compare tokenizer.json and tokenizer_config.json with a parent's")
    return Check(name=name, outcome="pass", seen=f"{len(theirs)} ids agree", expected=expected)


def _end_tokens(asked: ServedSubject, reference: Reference) -> Check:
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
        # Made certain, whatever the model would say: does the server stop there?
        completion = completion_of(
            answer := asked.complete(asked.settings.prompts[0], 4, logit_bias={str(end): 100}, seed=0)
        )
        if completion is None:
            return Check(name=name, outcome="not offered", seen=answer.complaint)
        if completion.finish_reason != "stop":
            if _overlooks_bias(asked, completion):
                return Check(name=name, outcome="not offered", seen="the server overlooks logit_bias")
            seen = f"goes on after id {end}: {completion.finish_reason}"
            return _failed(name, seen, "stop", "compare eos_token_id with the parents'", where=field)
    return Check(name=name, outcome="pass", seen=f"stops at {', '.join(map(str, reference.ends))}", expected="stop")


def _overlooks_bias(asked: ServedSubject, biased: Completion) -> bool:
    """Whether a continuation is what it would have been without any bias: then no end was made certain."""
    plain = completion_of(asked.complete(asked.settings.prompts[0], 4, seed=0))
    return plain is not None and plain.identity == biased.identity


def _failed(name: str, seen: str, expected: str, remedy: str, where: str = "") -> Check:
    return Check(name=name, outcome="fail", seen=seen, expected=expected, remedy=remedy, where=where)


def _quoted(text: str) -> str:
    short = " ".join(text.split())
    return repr(short if len(short) <= 40 else short[:39] + "…")

"""Parse the answers of a server, and compute with transformers the answers that it should give.

A field that a server omits becomes None. A field whose value has another type than the API's counts as omitted, because
the server can be any program.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import UnionType
from typing import Any, TypeVar

from mergegate.merge_core.errors import InvalidInput
from mergegate.merge_core.parsing import read_json
from mergegate.tasks.base.http import Answer
from mergegate.tasks.models.checkpoints import Model, TellProgress, load_model, unload_models

T = TypeVar("T")


@dataclass(frozen=True)
class Completion:
    """A parsed continuation. Log-probabilities are in nats, and None if the server sends none."""

    text: str
    # Value that must be equal when the request is repeated: token ids, or else tokens as text, or else the text.
    identity: tuple[Any, ...]
    exact: bool  # whether ``identity`` holds token ids
    logprobs: tuple[float, ...] | None  # of each generated token; NaN where the server sent no number
    prompt_logprobs: tuple[float, ...] | None  # of each prompt token except the first
    finish_reason: str  # why the generation ended, such as ``stop`` or ``length``
    tokens: int  # number of generated tokens


def parse_models(answer: Answer) -> dict[str, int | None]:
    """Return the models in an answer to ``/v1/models``, each with its longest request in tokens (None: unknown).

    The result is empty for any other answer.
    """
    listed = _field(answer.body, "data", list) if answer.status == 200 else None
    names = [(_field(model, "id", str), _count(model, "max_model_len")) for model in listed or ()]
    return {name: longest for name, longest in names if name is not None}


def parse_completion(answer: Answer, *, is_chat: bool = False) -> Completion | None:
    """Return the first choice in an answer to ``/v1/completions``, or None for any other answer.

    With ``is_chat``, parse an answer to ``/v1/chat/completions``. The text then includes the reasoning.
    """
    choices = _field(answer.body, "choices", list) if answer.status == 200 else None
    choice = choices[0] if choices else None
    message = _field(choice, "message", dict) if is_chat else choice
    if not isinstance(choice, dict) or not isinstance(message, dict):
        return None
    parts = ("reasoning_content", "reasoning", "content") if is_chat else ("text",)
    text = "".join(_field(message, part, str) or "" for part in parts)
    token_data = _field(choice, "logprobs", dict)
    logprobs = _field(token_data, "token_logprobs", list)
    if is_chat and (content := _field(token_data, "content", list)) is not None:
        logprobs = [_field(entry, "logprob", object) for entry in content]
    tokens, ids = _list_of(token_data, "tokens", str), _list_of(choice, "token_ids", int)
    identity = ids if ids is not None else tokens if tokens is not None else [text]
    token_count = _count(_field(answer.body, "usage", dict), "completion_tokens")
    return Completion(
        text=text,
        identity=tuple(identity),
        exact=ids is not None,
        logprobs=None if logprobs is None else tuple(map(_number, logprobs)),
        prompt_logprobs=_prompt_logprobs(choice),
        finish_reason=_field(choice, "finish_reason", str) or "",
        tokens=token_count if token_count is not None else len(ids or tokens or ()),
    )


def _prompt_logprobs(choice: Mapping[str, Any]) -> tuple[float, ...] | None:
    """Return the log-probabilities of a prompt in vLLM's format.

    Each position except the first holds log-probabilities by token id, the prompt's own id first.
    """
    positions = _list_of(choice, "prompt_logprobs", dict | None)
    if positions is None:
        return None
    own = [next(iter(entry.values())) for entry in positions if entry]
    if not all(isinstance(entry, dict) for entry in own):
        return None
    return tuple(_number(entry.get("logprob")) for entry in own)


def _field(container: Any, name: str, kind: type[T]) -> T | None:
    value = container.get(name) if isinstance(container, dict) else None
    return value if isinstance(value, kind) else None


def _list_of(container: Any, name: str, kind: type | UnionType) -> list[Any] | None:
    """Return a field if it is a list and all of its items have the type ``kind``, or else None."""
    items = _field(container, name, list)
    if items is None or not all(isinstance(item, kind) and not isinstance(item, bool) for item in items):
        return None
    return items


def _count(container: Any, name: str) -> int | None:
    """Return a field if it is an integer of at least 0, or else None."""
    value = _field(container, name, int)
    return value if value is not None and not isinstance(value, bool) and value >= 0 else None


def _number(value: object) -> float:
    """Return ``value`` as a float, or NaN if it is not a number."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return math.nan
    with suppress(OverflowError):  # JSON's integers have no limit
        return float(value)
    return math.nan


_ANSWER = "yes"  # assistant message in the chat that is rendered to find out how a turn ends


@dataclass(frozen=True)
class ScoredText:
    """A fixed text, its token ids (including those that the tokenizer prepends) and its likelihood.

    ``logprobs`` is the log-probability of each token except the first, given the tokens before it, in nats. Shape
    [len(ids) - 1].
    """

    text: str
    ids: tuple[int, ...]
    logprobs: tuple[float, ...]


@dataclass(frozen=True)
class Chat:
    """A conversation, rendered with the tokenizer's template up to the assistant's answer.

    If the template raises an error, ``ids`` is empty and ``problem`` is the error. ``turn_ends`` is id and text of the
    special token that ends an assistant's turn, if any.
    """

    messages: tuple[Mapping[str, str], ...]
    ids: tuple[int, ...] = ()
    turn_ends: tuple[int, str] | None = None
    problem: str = ""


@dataclass(frozen=True)
class Reference:
    """Expected answers of a model."""

    texts: tuple[ScoredText, ...]
    chat: Chat | None  # None if the checkpoint has no chat template
    ends: tuple[int, ...]  # ids from the tokenizer and from generation_config.json, or config.json if that has none


@dataclass(frozen=True)
class ReferenceRequest:
    """Input of :func:`make_reference`."""

    texts: tuple[str, ...]
    question: str  # message of the user in the chat to render
    dtype: str  # torch dtype in which both transformers and the server compute
    device: str
    longest: int  # longest request that the server accepts, in tokens; longer texts are truncated


def make_reference(
    model: Model, request: ReferenceRequest, on_progress: TellProgress = lambda done, total: None
) -> Reference:
    """Load the model, score the texts, render the chat, and free the memory for the server.

    ``on_progress`` is never called, because the work takes only seconds. Raise InvalidInput if transformers cannot
    load the model, or memory does not suffice.
    """
    import torch

    texts: list[ScoredText] = []
    with load_model(model, dtype=request.dtype, device=request.device) as loaded:
        tokenizer: Any = loaded.tokenizer
        for text in request.texts:
            ids = [int(token) for token in tokenizer(text)["input_ids"]][: request.longest - 1]
            if len(ids) < 2:
                continue
            with torch.inference_mode():
                row = torch.tensor([ids], device=loaded.network.device)
                logits = loaded.network(input_ids=row, use_cache=False).logits[0, :-1]
                token_logprobs = torch.log_softmax(logits.float(), dim=-1).gather(1, row[0, 1:, None])[:, 0]
            texts.append(ScoredText(text, tuple(ids), tuple(float(value) for value in token_logprobs)))
        del loaded  # the last reference to the model
    unload_models()

    chat = render_chat(tokenizer, request.question)
    ends: list[int] = []
    for file in ("generation_config.json", "config.json"):
        with suppress(InvalidInput):
            value = read_json(model.directory / file).get("eos_token_id")
            ends = ends or [number for number in (value if isinstance(value, list) else [value]) if type(number) is int]
    if tokenizer.eos_token_id is not None:
        ends.append(int(tokenizer.eos_token_id))
    return Reference(tuple(texts), chat, tuple(dict.fromkeys(ends)))


def render_chat(tokenizer: Any, question: str) -> Chat | None:
    """Render a chat that asks ``question`` with the template of a tokenizer. Return None if there is no template."""
    messages = ({"role": "user", "content": question},)
    if not tokenizer.chat_template:
        return None
    try:
        prompt_ids = tokenizer.apply_chat_template(
            list(messages), add_generation_prompt=True, tokenize=True, return_dict=False
        )
        conversation = [*messages, {"role": "assistant", "content": _ANSWER}]
        suffix = tokenizer.apply_chat_template(conversation, tokenize=False).rpartition(_ANSWER)[2]
    except Exception as error:
        # A template is a program, so Jinja can raise errors of many types.
        return Chat(messages, problem=f"{type(error).__name__}: {error}")
    added_ids = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    special_ids = added_ids | set(tokenizer.all_special_ids)
    suffix_ids = (int(token) for token in tokenizer(suffix, add_special_tokens=False)["input_ids"])
    end = next((token for token in suffix_ids if token in special_ids), None)
    turn_ends = None if end is None else (end, str(tokenizer.convert_ids_to_tokens(end)))
    return Chat(messages, tuple(int(token) for token in prompt_ids), turn_ends)

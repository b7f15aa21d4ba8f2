"""Compute with transformers the answers that a server of the same checkpoint should give."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from mergegate.merge_core.errors import InvalidInput
from mergegate.merge_core.parsing import read_json
from mergegate.tasks.checkpoints import Model, TellProgress, load_model, unload_models

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
    """Expected answers of a model.

    Args:
        texts: Fixed texts with their likelihoods.
        chat: Rendered conversation, or None if the checkpoint has no chat template.
        ends: End-of-sequence ids from the tokenizer and from generation_config.json, or config.json if that has none.
    """

    texts: tuple[ScoredText, ...]
    chat: Chat | None
    ends: tuple[int, ...]


@dataclass(frozen=True)
class ReferenceRequest:
    """Input of :func:`make_reference`.

    Args:
        texts: Texts to score.
        question: Message of the user in the chat to render.
        dtype: Name of the torch dtype in which both transformers and the server compute.
        longest: Longest request that the server accepts, in tokens. Longer texts are truncated.
    """

    texts: tuple[str, ...]
    question: str
    dtype: str
    device: str
    longest: int


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

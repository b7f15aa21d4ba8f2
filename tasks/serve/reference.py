"""What the server's answers are compared with: the same checkpoint in transformers, asked for the same things."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mergegate.merge_core.errors import InvalidInput
from mergegate.merge_core.parsing import read_json
from mergegate.tasks.checkpoints import LoadedModel, Model, TellProgress, load_model, unload_models

_ANSWER = "yes"  # of an assistant, in a conversation that is rendered to see how a turn ends


@dataclass(frozen=True)
class ScoredText:
    """A fixed text.

    Args:
        text: As it is written.
        ids: Its tokens, with what the tokenizer puts before it.
        logprobs: Of each token but the first given those before it, nats; [len(ids) - 1].
    """

    text: str
    ids: tuple[int, ...]
    logprobs: tuple[float, ...]


@dataclass(frozen=True)
class Chat:
    """A conversation as the tokenizer renders it, ready for the answer.

    Args:
        messages: What was said.
        ids: Its tokens; empty where the template cannot be rendered.
        turn_ends: Id and text of the special token that ends an assistant's turn, if one does.
        problem: Why it cannot be rendered.
    """

    messages: tuple[Mapping[str, str], ...]
    ids: tuple[int, ...] = ()
    turn_ends: tuple[int, str] | None = None
    problem: str = ""


@dataclass(frozen=True)
class Reference:
    """All that is known about how the model should answer.

    Args:
        texts: Fixed texts with their likelihoods.
        chat: A conversation; None where the checkpoint has no chat template.
        ends: Ids that end a sequence, of generation_config.json or config.json, and of the tokenizer.
    """

    texts: tuple[ScoredText, ...]
    chat: Chat | None
    ends: tuple[int, ...]


def make_reference(
    model: Model,
    texts: Sequence[str],
    question: str,
    dtype: str,
    device: str,
    longest: int,
    on_progress: TellProgress = lambda done, total: None,
) -> Reference:
    """Load the model, score ``texts``, render a chat that asks ``question``, and give the memory back to the server.

    Args:
        dtype: Name of the torch dtype in which the server computes, too.
        longest: Tokens that the server takes; longer texts are cut.
        on_progress: Told nothing: it takes seconds.

    Raises:
        InvalidInput: when transformers cannot load it, or memory does not suffice.
    """
    with load_model(model, dtype=dtype, device=device) as loaded:
        scored = tuple(_scored(loaded, text, longest) for text in texts)
        reference = Reference(
            texts=tuple(text for text in scored if len(text.ids) > 1),
            chat=_chat(loaded.tokenizer, question) if loaded.tokenizer.chat_template else None,
            ends=_ends(model.directory, loaded.tokenizer),
        )
        del loaded  # nothing here may hold on to it
    unload_models()
    return reference


def _scored(loaded: LoadedModel, text: str, longest: int) -> ScoredText:
    import torch

    ids = [int(token) for token in loaded.tokenizer(text)["input_ids"]][: longest - 1]
    if len(ids) < 2:
        return ScoredText(text, tuple(ids), ())
    with torch.inference_mode():
        row = torch.tensor([ids], device=loaded.network.device)
        logits = loaded.network(input_ids=row, use_cache=False).logits[0, :-1]
        chosen = torch.log_softmax(logits.float(), dim=-1).gather(1, row[0, 1:, None])[:, 0]
    return ScoredText(text, tuple(ids), tuple(float(value) for value in chosen))


def _chat(tokenizer: Any, question: str) -> Chat:
    asked = ({"role": "user", "content": question},)
    try:
        ids = tokenizer.apply_chat_template(list(asked), add_generation_prompt=True, tokenize=True, return_dict=False)
        said = [*asked, {"role": "assistant", "content": _ANSWER}]
        after = tokenizer.apply_chat_template(said, tokenize=False).rpartition(_ANSWER)[2]
    except Exception as error:
        # A template is a program; what it makes Jinja raise has many types.
        return Chat(asked, problem=f"{type(error).__name__}: {error}")
    added = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    special = added | set(tokenizer.all_special_ids)
    following = (int(token) for token in tokenizer(after, add_special_tokens=False)["input_ids"])
    end = next((token for token in following if token in special), None)
    turn_ends = None if end is None else (end, str(tokenizer.convert_ids_to_tokens(end)))
    return Chat(asked, tuple(int(token) for token in ids), turn_ends)


def _ends(directory: Path, tokenizer: Any) -> tuple[int, ...]:
    found: list[int] = []
    for file in ("generation_config.json", "config.json"):
        try:
            value = read_json(directory / file).get("eos_token_id")
        except InvalidInput:
            continue
        found = [number for number in (value if isinstance(value, list) else [value]) if type(number) is int]
        if found:
            break
    if tokenizer.eos_token_id is not None:
        found.append(int(tokenizer.eos_token_id))
    return tuple(dict.fromkeys(found))

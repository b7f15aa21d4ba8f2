"""Send requests to an OpenAI-compatible server and parse the answers. A field that a server omits becomes None."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mergegate.tasks.http import Answer, JsonClient


@dataclass(frozen=True)
class Completion:
    """A parsed continuation.

    Args:
        identity: Value that must be equal when the request is repeated: the token ids, or else the tokens as text, or
            else the text.
        exact: Whether ``identity`` holds token ids.
        logprobs: Log-probability of each generated token, in nats. NaN where the server sent no number. None if the
            server sends no log-probabilities.
        prompt_logprobs: Log-probability of each prompt token except the first, in nats. None if the server sends none.
        finish_reason: Reason why the generation ended, such as ``stop`` or ``length``.
        tokens: Number of generated tokens.
    """

    text: str
    identity: tuple[Any, ...]
    exact: bool
    logprobs: tuple[float, ...] | None
    prompt_logprobs: tuple[float, ...] | None
    finish_reason: str
    tokens: int


class Client:
    """HTTP client for one server. Each request opens its own connection, because the server may end between requests.

    ``url`` may end with ``/v1``. ``timeout`` is the longest time without receiving a byte, in seconds. ``key`` is a
    bearer token; by default, none is sent.
    """

    def __init__(self, url: str, timeout: float, key: str = "") -> None:
        self._http = JsonClient(url.rstrip("/").removesuffix("/v1"), timeout, key)

    def request(self, path: str, body: Mapping[str, Any] | None = None) -> Answer:
        """Send a GET request, or POST ``body``. Raise Unreachable if the server does not answer.

        This never retries a request, because a missing answer is itself a test result.
        """
        return self._http.request(path, body)


def parse_models(answer: Answer) -> dict[str, int | None]:
    """Return the models in an answer to ``/v1/models``, each with its longest request in tokens (None: unknown).

    The result is empty for any other answer.
    """
    listed = answer.body.get("data") if answer.status == 200 and isinstance(answer.body, Mapping) else None
    return {
        str(model["id"]): model.get("max_model_len")
        for model in listed or ()
        if isinstance(model, Mapping) and "id" in model
    }


def parse_completion(answer: Answer, *, is_chat: bool = False) -> Completion | None:
    """Return the first choice in an answer to ``/v1/completions``, or None for any other answer.

    With ``is_chat``, parse an answer to ``/v1/chat/completions``. The text then includes the reasoning.
    """
    choices = answer.body.get("choices") if answer.status == 200 and isinstance(answer.body, Mapping) else None
    choice = choices[0] if isinstance(choices, list) and choices else None
    message = choice.get("message") if is_chat and isinstance(choice, Mapping) else choice
    if not isinstance(choice, Mapping) or not isinstance(message, Mapping):
        return None
    parts = ("reasoning_content", "reasoning", "content") if is_chat else ("text",)
    text = "".join(str(message.get(part) or "") for part in parts)
    token_data = choice.get("logprobs") or {}
    logprobs = token_data.get("token_logprobs")
    if is_chat and (content := token_data.get("content")) is not None:
        logprobs = [entry.get("logprob") for entry in content]
    tokens, ids = token_data.get("tokens"), choice.get("token_ids")
    identity = ids if ids is not None else tokens if tokens is not None else [text]
    usage = answer.body.get("usage") or {}
    # vLLM's format for the prompt: log-probabilities by token id for each position except the first, the prompt's own
    # id first.
    positions = choice.get("prompt_logprobs")
    token_count = usage.get("completion_tokens")
    return Completion(
        text=text,
        identity=tuple(identity),
        exact=ids is not None,
        logprobs=_numbers(logprobs),
        prompt_logprobs=_numbers([next(iter(entry.values()))["logprob"] for entry in positions if entry])
        if isinstance(positions, Sequence)
        else None,
        finish_reason=str(choice.get("finish_reason") or ""),
        tokens=int(token_count) if token_count is not None else len(ids or tokens or ()),
    )


def _numbers(values: Sequence[Any] | None) -> tuple[float, ...] | None:
    if values is None:
        return None
    return tuple(float(value) if isinstance(value, (int, float)) else math.nan for value in values)

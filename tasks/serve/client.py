"""The OpenAI API from the client's side, as far as a smoke test needs it; what a server does not offer is None."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mergegate.tasks.http import Answer, JsonClient


@dataclass(frozen=True)
class Completion:
    """A continuation.

    Args:
        text: What was said.
        identity: What must be equal when it is asked again: token ids; else tokens as text; else the text.
        exact: Whether ``identity`` is ids.
        logprobs: One per token, nats; NaN where the server had no number. None: not offered.
        prompt_logprobs: One per token of the prompt but the first. None: not offered.
        finish_reason: ``stop``, ``length``, …
        tokens: Number of tokens.
    """

    text: str
    identity: tuple[Any, ...]
    exact: bool
    logprobs: tuple[float, ...] | None
    prompt_logprobs: tuple[float, ...] | None
    finish_reason: str
    tokens: int


class Client:
    """Requests to one server, each over a connection of its own: by the next one it may be gone.

    Args:
        url: Its address, with or without ``/v1``.
        timeout: Seconds that may pass without a byte.
        key: Sent as a bearer token, if there is one.
    """

    def __init__(self, url: str, timeout: float, key: str = "") -> None:
        self._http = JsonClient(url.rstrip("/").removesuffix("/v1"), timeout, key)

    def health(self) -> int:
        """Status of ``/health``."""
        return self.request("/health").status

    def models(self) -> dict[str, int | None]:
        """Served models, and the longest request that each takes, where the server says."""
        return models_of(self.request("/v1/models"))

    def request(self, path: str, body: Mapping[str, Any] | None = None) -> Answer:
        """GET, or POST of ``body``; asked once, because that an answer fails to come is what is to be found out.

        Raises:
            Unreachable: when there is no answer.
        """
        return self._http.request(path, body)


def models_of(answer: Answer) -> dict[str, int | None]:
    """The models in an answer to ``/v1/models``; none if it is no such answer."""
    listed = answer.body.get("data") if answer.status == 200 and isinstance(answer.body, Mapping) else None
    return {
        str(model["id"]): model.get("max_model_len")
        for model in listed or ()
        if isinstance(model, Mapping) and "id" in model
    }


def completion_of(answer: Answer) -> Completion | None:
    """The first choice of an answer to ``/v1/completions``; None if it is no such answer."""
    choice = _first_choice(answer)
    if choice is None:
        return None
    text = str(choice.get("text") or "")
    given = choice.get("logprobs") or {}
    tokens, ids = given.get("tokens"), choice.get("token_ids")
    identity = ids if ids is not None else tokens if tokens is not None else [text]
    usage = answer.body.get("usage") or {}
    logprobs = _numbers(given.get("token_logprobs"))
    counted = usage.get("completion_tokens")
    return Completion(
        text=text,
        identity=tuple(identity),
        exact=ids is not None,
        logprobs=logprobs,
        prompt_logprobs=_prompt_logprobs(choice),
        finish_reason=str(choice.get("finish_reason") or ""),
        tokens=int(counted) if counted is not None else len(ids or tokens or ()),
    )


def chat_text_of(answer: Answer) -> str | None:
    """What was said in answer to ``/v1/chat/completions``, thoughts included; None if it is no such answer."""
    choice = _first_choice(answer)
    message = choice.get("message") if choice else None
    if not isinstance(message, Mapping):
        return None
    return "".join(str(message.get(part) or "") for part in ("reasoning_content", "reasoning", "content"))


def chat_logprobs_of(answer: Answer) -> tuple[float, ...] | None:
    """Log-probabilities of a chat answer's tokens; None: not offered."""
    choice = _first_choice(answer)
    content = ((choice or {}).get("logprobs") or {}).get("content")
    return None if content is None else _numbers([entry.get("logprob") for entry in content])


def _first_choice(answer: Answer) -> Mapping[str, Any] | None:
    choices = answer.body.get("choices") if answer.status == 200 and isinstance(answer.body, Mapping) else None
    return choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], Mapping) else None


def _prompt_logprobs(choice: Mapping[str, Any]) -> tuple[float, ...] | None:
    """vLLM's: for each position but the first a mapping from token id to log-probability, the prompt's own first."""
    listed = choice.get("prompt_logprobs")
    if not isinstance(listed, Sequence):
        return None
    return _numbers([next(iter(entry.values()))["logprob"] for entry in listed if entry])


def _numbers(values: Sequence[Any] | None) -> tuple[float, ...] | None:
    if values is None:
        return None
    return tuple(float(value) if isinstance(value, (int, float)) else math.nan for value in values)

"""Send requests to an OpenAI-compatible server and parse the answers. A field that a server omits becomes None.

A field whose value has another type than the API's counts as omitted, because the server can be any program.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import UnionType
from typing import Any, TypeVar

from mergegate.tasks.http import Answer, JsonClient

T = TypeVar("T")


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
        self._http = JsonClient(base_address(url), timeout, key)

    def request(self, path: str, body: Mapping[str, Any] | None = None) -> Answer:
        """Send a GET request, or POST ``body``. Raise Unreachable if the server does not answer.

        This never retries a request, because a missing answer is itself a test result.
        """
        return self._http.request(path, body)


def base_address(url: str) -> str:
    """Return the address of a server without ``/v1``, which every path of the API starts with."""
    return url.rstrip("/").removesuffix("/v1")


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
    """Return a field of a JSON object, or None if the field or the object is missing or has another type."""
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

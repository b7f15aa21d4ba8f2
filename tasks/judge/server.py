"""Asking an OpenAI-compatible server for chat completions, patiently: the only file that speaks its protocol.

Tried again are what may pass: 429, 5xx and silence, each time after twice the wait, or after what ``Retry-After`` says.
The key comes from the environment, goes into one header, and is in no message, record or artifact.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from email.utils import parsedate_to_datetime
from types import TracebackType
from typing import Any, NamedTuple, Self

import httpx

from merge_core.errors import InvalidInput
from tasks.judge.settings import JudgeServer

FIRST_WAIT_S, LONGEST_WAIT_S = 1.0, 60.0
_MAY_PASS = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})
_WHERE = "judge.url"


class Reply(NamedTuple):
    """A completion: its text, and what the server says which model wrote it."""

    text: str
    model: str


class ChatServer:
    """A connection to the server, for use by several threads. A context manager: it closes its connections.

    Args:
        sleep, now: Of ``time``; given in by whoever will not wait.

    Raises:
        InvalidInput: when the variable that should hold the key is not set.
    """

    def __init__(
        self,
        server: JudgeServer,
        *,
        sleep: Callable[[float], None] = time.sleep,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._server, self._sleep, self._now = server, sleep, now
        self._key = _key(server)
        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        limits = httpx.Limits(max_connections=server.concurrency)
        self._http = httpx.Client(headers=headers, timeout=server.timeout, limits=limits)
        self._schemas = True  # until the server says that it knows none

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._http.close()

    def ask(
        self,
        model: str,
        messages: Sequence[Mapping[str, str]],
        response_format: Mapping[str, Any],
        max_tokens: int | None,
    ) -> Reply:
        """The model's reply at temperature 0, held to ``response_format`` where the server can.

        Raises:
            InvalidInput: when the server refuses the request, is not there, or goes on failing.
        """
        body: dict[str, Any] = {"model": model, "messages": list(messages), "temperature": 0}
        if max_tokens is not None:
            body["max_tokens"] = max_tokens
        if self._schemas:
            response = self._post({**body, "response_format": response_format})
            if response.status_code not in (400, 422):
                return self._read(response, model)
        plain = self._post(body)
        if plain.is_success:
            self._schemas = False  # it is the schema that was refused, not the request
        return self._read(plain, model)

    def _post(self, body: Mapping[str, Any]) -> httpx.Response:
        """The response to a request, tried again while that may help."""
        address = f"{self._server.url.rstrip('/')}/chat/completions"
        wait = FIRST_WAIT_S
        for attempt in range(1, self._server.attempts + 1):
            problem, asked_for = "", 0.0
            try:
                response = self._http.post(address, json=body)
            except httpx.TransportError as error:
                problem = f"no answer ({type(error).__name__}: {error})"
            else:
                if response.status_code not in _MAY_PASS:
                    return response
                problem = f"{response.status_code}: {self._said(response)}"
                asked_for = self._retry_after(response)
            if attempt < self._server.attempts:
                self._sleep(min(max(wait, asked_for), LONGEST_WAIT_S))
                wait *= 2
        raise InvalidInput(
            f"{_WHERE}: {self._server.url}",
            found=f"{problem}, after {self._server.attempts} attempts",
            expected="a server that answers",
            remedy="see that it runs; finished judgements are kept, so run again",
        )

    def _read(self, response: httpx.Response, model: str) -> Reply:
        if not response.is_success:
            remedies = {
                401: "name the variable that holds the key under judge.api_key_env",
                403: "name the variable that holds the key under judge.api_key_env",
                404: "see that judge.url ends where /chat/completions begins, and that judge.model is served there",
            }
            raise InvalidInput(
                f"{_WHERE}: {self._server.url}",
                found=f"{response.status_code}: {self._said(response)}",
                expected=f"a chat completion of {model}",
                remedy=remedies.get(response.status_code, ""),
            )
        try:
            document = response.json()
            text = document["choices"][0]["message"]["content"]
            return Reply(text if isinstance(text, str) else "", str(document.get("model", model)))
        except (ValueError, KeyError, IndexError, TypeError, AttributeError):
            raise InvalidInput(
                f"{_WHERE}: {self._server.url}",
                found=f"no chat completion: {self._said(response)}",
                expected="an OpenAI-compatible server",
            ) from None

    def _said(self, response: httpx.Response) -> str:
        text = " ".join(response.text.split())
        text = text.replace(self._key, "***") if self._key else text  # some servers repeat it
        return text[:200] or response.reason_phrase

    def _retry_after(self, response: httpx.Response) -> float:
        """Seconds that the server asks for, which it may give as a number or as a date (RFC 9110, 10.2.3)."""
        value = response.headers.get("retry-after", "")
        with suppress(ValueError):
            return float(value)
        with suppress(ValueError, TypeError):
            return parsedate_to_datetime(value).timestamp() - self._now()
        return 0.0


def _key(server: JudgeServer) -> str | None:
    if server.api_key_env is None:
        return None
    key = os.environ.get(server.api_key_env, "").strip()
    if not key:
        raise InvalidInput(
            f"judge.api_key_env: {server.api_key_env}",
            found="not set, or empty",
            expected="the key of the judge's server in this environment variable",
        )
    return key

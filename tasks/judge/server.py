"""The judge's server: chat completions in OpenAI's protocol, asked patiently.

How it is reached and what is asked again is what all servers share (``tasks.http``); here is what a judge is
asked, and what its answers mean. The key comes from the environment, goes into one header, and is in no message, record
or artifact.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, NamedTuple, Self

from mergegate.merge_core.errors import InvalidInput
from mergegate.tasks.http import TRANSIENT_STATUSES, Answer, JsonClient, Unreachable, retry_transient
from mergegate.tasks.judge.settings import JudgeServer

# 409, because a server of completions has nothing to be in conflict about: another request holds what this one needs.
_ASKED_AGAIN = TRANSIENT_STATUSES | {409}
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
        self._server = server
        self._http = JsonClient(server.url, server.timeout, _key(server), connections=server.concurrency)
        self._retrying = retry_transient(server.attempts, statuses=_ASKED_AGAIN, sleep=sleep, now=now)
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
            answer = self._post({**body, "response_format": response_format})
            if answer.status not in (400, 422):
                return self._read(answer, model)
        plain = self._post(body)
        if plain.ok:
            self._schemas = False  # it is the schema that was refused, not the request
        return self._read(plain, model)

    def _post(self, body: Mapping[str, Any]) -> Answer:
        """The answer to a request, tried again while that may help."""
        try:
            answer: Answer = self._retrying(self._http.request, "/chat/completions", body)
            problem = f"{answer.status}: {answer.message}"
        except Unreachable as why:
            problem = f"no answer ({why})"
        else:
            if answer.status not in _ASKED_AGAIN:
                return answer
        raise InvalidInput(
            f"{_WHERE}: {self._server.url}",
            found=f"{problem}, after {self._server.attempts} attempts",
            expected="a server that answers",
            remedy="see that it runs; finished judgements are kept, so run again",
        )

    def _read(self, answer: Answer, model: str) -> Reply:
        if not answer.ok:
            remedies = {
                401: "name the variable that holds the key under judge.api_key_env",
                403: "name the variable that holds the key under judge.api_key_env",
                404: "see that judge.url ends where /chat/completions begins, and that judge.model is served there",
            }
            raise InvalidInput(
                f"{_WHERE}: {self._server.url}",
                found=f"{answer.status}: {answer.message}",
                expected=f"a chat completion of {model}",
                remedy=remedies.get(answer.status, ""),
            )
        try:
            text = answer.body["choices"][0]["message"]["content"]
            return Reply(text if isinstance(text, str) else "", str(answer.body.get("model", model)))
        except (KeyError, IndexError, TypeError, AttributeError):
            raise InvalidInput(
                f"{_WHERE}: {self._server.url}",
                found=f"no chat completion: {answer.message}",
                expected="an OpenAI-compatible server",
            ) from None


def _key(server: JudgeServer) -> str:
    if server.api_key_env is None:
        return ""
    key = os.environ.get(server.api_key_env, "").strip()
    if not key:
        raise InvalidInput(
            f"judge.api_key_env: {server.api_key_env}",
            found="not set, or empty",
            expected="the key of the judge's server in this environment variable",
        )
    return key

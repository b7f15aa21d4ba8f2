"""Request chat completions from the judge's server in OpenAI's protocol, with retries.

``tasks.http`` provides connections and retries. The API key comes from the environment and goes into one header. It
never appears in a message, record or artifact.
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

# A completion server has no resource that could be in conflict, so 409 means that another request holds one
# temporarily.
_RETRIED_STATUSES = TRANSIENT_STATUSES | {409}
_LOCATION = "judge.url"


class Reply(NamedTuple):
    """Text of a completion, and the name of the model that wrote it, as reported by the server."""

    text: str
    model: str


class ChatServer:
    """Connection to the judge's server that several threads may share. Use it as a context manager to close it.

    ``sleep`` and ``now`` replace the functions of ``time`` in tests.

    Raises:
        InvalidInput: If the environment variable for the key is not set.
    """

    def __init__(
        self,
        server: JudgeServer,
        *,
        sleep: Callable[[float], None] = time.sleep,
        now: Callable[[], float] = time.time,
    ) -> None:
        key = os.environ.get(server.api_key_env or "", "").strip()
        if server.api_key_env is not None and not key:
            raise InvalidInput(
                f"judge.api_key_env: {server.api_key_env}",
                found="an environment variable that is not set, or empty",
                expected="the key of the judge's server in this environment variable",
            )
        self._server = server
        self._http = JsonClient(server.url, server.timeout, key, connections=server.concurrency)
        self._retrying = retry_transient(server.attempts, statuses=_RETRIED_STATUSES, sleep=sleep, now=now)
        self._schemas = True  # Until the server rejects one.

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
        """Return the model's reply at temperature 0, constrained by ``response_format`` if the server supports it.

        Raises:
            InvalidInput: If the server refuses the request, cannot be reached, or keeps failing.
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
            self._schemas = False  # The server refused the schema, not the request.
        return self._read(plain, model)

    def _post(self, body: Mapping[str, Any]) -> Answer:
        try:
            answer: Answer = self._retrying(self._http.request, "/chat/completions", body)
            problem = f"{answer.status}: {answer.message}"
        except Unreachable as error:
            problem = f"no answer ({error})"
        else:
            if answer.status not in _RETRIED_STATUSES:
                return answer
        raise InvalidInput(
            f"{_LOCATION}: {self._server.url}",
            found=f"{problem}, after {self._server.attempts} attempts",
            expected="a server that answers",
            remedy="start the server and run again; finished judgments are stored",
        )

    def _read(self, answer: Answer, model: str) -> Reply:
        if not answer.ok:
            remedies = {
                401: "set judge.api_key_env to the environment variable that holds the key",
                403: "set judge.api_key_env to the environment variable that holds the key",
                404: "check that judge.url is the part before /chat/completions, and that the server has judge.model",
            }
            raise InvalidInput(
                f"{_LOCATION}: {self._server.url}",
                found=f"{answer.status}: {answer.message}",
                expected=f"a chat completion of {model}",
                remedy=remedies.get(answer.status, ""),
            )
        try:
            text = answer.body["choices"][0]["message"]["content"]
            return Reply(text if isinstance(text, str) else "", str(answer.body.get("model", model)))
        except (KeyError, IndexError, TypeError, AttributeError):
            raise InvalidInput(
                f"{_LOCATION}: {self._server.url}",
                found=f"no chat completion: {answer.message}",
                expected="an OpenAI-compatible server",
            ) from None

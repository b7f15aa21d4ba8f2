"""Send requests to JSON servers: one client, and one policy for which requests are retried, when and how often.

::

    with JsonClient("http://localhost:8000/v1", timeout=120, key=key) as client:
        answer = retry_transient(6)(client.request, "/chat/completions", body)  # retries transient errors
        answer = client.request("/health")                                      # sends one request

The API key is sent in one header and never appears in a message. Callers interpret the answers
(``judge.questions``, ``serve.answers``). The Hub has its own client and shares the retry policy.
"""

from __future__ import annotations

import base64
import json
import os
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from functools import cache
from ipaddress import ip_address
from ssl import SSLContext
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import urlsplit

from mergegate.merge_core.wording import detail

if TYPE_CHECKING:
    from tenacity import RetryCallState, Retrying

# The request is valid and may succeed later: a timeout in transit, too early, too many requests, or a server that is
# failing, restarting or overloaded.
TRANSIENT_STATUSES = frozenset({408, 425, 429, 500, 502, 503, 504, 529})
FIRST_WAIT_S, LONGEST_WAIT_S = 1.0, 60.0
_MAX_MESSAGE_LENGTH = 200  # characters


def plain_address(url: str) -> str:
    """Return ``url`` if it is an HTTP address without credentials. For validators of settings.

    Raises:
        ValueError: ``url`` is not an HTTP address or contains credentials.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("expected an HTTP address such as http://localhost:8000/v1")
    if parts.username or parts.password:
        raise ValueError("the address contains credentials. Put them in an environment variable and set api_key_env")
    return url


def token_claims(token: str) -> dict[str, Any]:
    """Return the claims of a JSON Web Token. This does not check its signature.

    Raises:
        ValueError: The text is not a JSON Web Token. The message does not contain it.
    """
    parts = token.split(".")
    if len(parts) != 3:
        raise ValueError("it does not have three parts separated by dots")
    try:
        payload = json.loads(base64.urlsafe_b64decode(parts[1] + "=" * (-len(parts[1]) % 4)))
    except ValueError:
        raise ValueError("its second part is not encoded JSON") from None
    if not isinstance(payload, dict):
        raise ValueError("its second part is not a JSON object")
    return payload


class Unreachable(Exception):
    """The server did not answer: the connection failed or broke, or the request timed out."""

    def __init__(self, reason: str, *, timed_out: bool = False) -> None:
        super().__init__(reason)
        self.timed_out = timed_out  # the request timed out: a server is listening but does not answer


@dataclass(frozen=True)
class Answer:
    """An answer from a server, with any status."""

    status: int  # HTTP status.
    body: Any  # Parsed JSON, or the text if it is not JSON.
    message: str = ""  # Error message on one line, shortened and without the key.
    retry_after: str = ""  # Value of the ``Retry-After`` header, or an empty string.

    @property
    def ok(self) -> bool:
        """Whether the status is 2xx."""
        return 200 <= self.status < 300

    @property
    def complaint(self) -> str:
        """Status and message, such as ``HTTP 503 no workers``."""
        return f"HTTP {self.status} {self.message}".strip()


class JsonClient:
    """A thread-safe client of one server. As a context manager, it closes its connections.

    Args:
        url: Base URL that precedes every path.
        timeout: Longest time without a byte, in seconds.
        key: Bearer token. Default: no token.
        connections: Number of connections that are kept open for reuse. 0: a new connection for each request, for
            servers that may stop between two requests.
    """

    def __init__(self, url: str, timeout: float, key: str = "", *, connections: int = 0) -> None:
        import httpx

        self._url, self._timeout, self._key = url.rstrip("/"), timeout, key
        trust_env = not _is_loopback(url)  # a proxy cannot reach this machine's loopback interface
        self._http = httpx.Client(
            verify=_certificates(trust_env, os.environ.get("SSL_CERT_FILE"), os.environ.get("SSL_CERT_DIR")),
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=timeout,
            limits=httpx.Limits(max_connections=connections or None, max_keepalive_connections=connections),
            trust_env=trust_env,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    def request(self, path: str, body: Mapping[str, Any] | None = None) -> Answer:
        """Send POST with ``body``, or GET if ``body`` is None, and return the answer.

        Raises:
            Unreachable: The server did not answer.
        """
        import httpx

        try:
            if body is None:
                response = self._http.get(self._url + path, follow_redirects=True)
            else:
                response = self._http.post(self._url + path, json=body)
        except httpx.TimeoutException:
            raise Unreachable(f"no answer in {self._timeout:g} s", timed_out=True) from None
        except (httpx.ConnectError, httpx.UnsupportedProtocol, httpx.InvalidURL) as error:
            raise Unreachable(str(error) or type(error).__name__) from None
        except httpx.RequestError as error:
            raise Unreachable(f"the connection was lost ({type(error).__name__})") from None
        detail("%s %s: %d", response.request.method, response.request.url.copy_with(query=None), response.status_code)
        parsed = _parsed(response.content)
        message = _message(parsed) or response.reason_phrase
        if self._key:
            message = message.replace(self._key, "***")  # some servers echo the key
        return Answer(
            response.status_code, parsed, message[:_MAX_MESSAGE_LENGTH], response.headers.get("retry-after", "")
        )


def is_transient(error: BaseException, statuses: Collection[int] = TRANSIENT_STATUSES) -> bool:
    """Return whether a failed request may succeed if repeated: no answer arrived, or one with a status in ``statuses``.

    The first exception with a status decides, starting from ``error`` and following its causes.
    """
    chain = exception_chain(error)
    for cause in chain:
        if (status := status_of(cause)) is not None:
            return status in statuses
    return any(isinstance(cause, Unreachable | ConnectionError | TimeoutError) for cause in chain)


def retry_transient(
    attempts: int,
    *,
    transient: Callable[[BaseException], bool] = is_transient,
    statuses: Collection[int] = TRANSIENT_STATUSES,
    sleep: Callable[[float], None] = time.sleep,
    now: Callable[[], float] = time.time,
) -> Retrying:
    """Return a retry policy that calls a function up to ``attempts`` times.

    It retries exceptions that ``transient`` accepts, and ``Answer`` values with one of ``statuses``. After the last
    attempt, it returns the answer or raises the exception. Waits are 1, 2, 4, … seconds, or the time in ``Retry-After``
    if that is longer, and never more than a minute. Tests replace ``sleep`` and ``now`` so that they do not wait.
    """
    import tenacity

    doubling = tenacity.wait_exponential(multiplier=FIRST_WAIT_S, max=LONGEST_WAIT_S)

    def wait(state: RetryCallState) -> float:
        outcome = state.outcome
        answer = outcome.result() if outcome is not None and not outcome.failed else None
        requested = retry_after_seconds(answer.retry_after, now()) if isinstance(answer, Answer) else 0.0
        return min(max(doubling(state), requested), LONGEST_WAIT_S)

    return tenacity.Retrying(
        stop=tenacity.stop_after_attempt(attempts),
        wait=wait,
        retry=tenacity.retry_if_exception(transient)
        | tenacity.retry_if_result(lambda answer: isinstance(answer, Answer) and answer.status in statuses),
        sleep=sleep,
        retry_error_callback=lambda state: state.outcome.result() if state.outcome else None,
    )


def retry_after_seconds(retry_after: str, now: float) -> float:
    """Return the seconds to wait from a ``Retry-After`` header, a number or a date (RFC 9110, 10.2.3), or else 0."""
    with suppress(ValueError):
        return float(retry_after)
    with suppress(ValueError, TypeError):
        return parsedate_to_datetime(retry_after).timestamp() - now
    return 0.0


def status_of(error: BaseException) -> int | None:
    """Return the HTTP status in an exception of any HTTP client, or None if it has none."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    return status if isinstance(status, int) else None


def exception_chain(error: BaseException | None) -> list[BaseException]:
    chain: list[BaseException] = []
    while error is not None and error not in chain:
        chain.append(error)
        error = error.__cause__
    return chain


@cache
def _certificates(trust_env: bool, file: str | None, directory: str | None) -> SSLContext:
    """Return the trusted certificates, cached per environment.

    Loading them takes longer than a health check, and a starting server is checked ten times per second.
    """
    import httpx

    return httpx.create_ssl_context(trust_env=trust_env)


def _is_loopback(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    with suppress(ValueError):
        return ip_address(host).is_loopback
    return host == "localhost"


def _message(body: Any) -> str:
    """Return the message of an answer on one line: the error message of JSON errors, or else the whole text."""
    if isinstance(body, Mapping):
        error = body.get("error", body)
        body = error.get("message", error) if isinstance(error, Mapping) else error
    return " ".join(str(body).split())


def _parsed(content: bytes) -> Any:
    try:
        return json.loads(content)
    except ValueError:
        return content.decode(errors="replace")

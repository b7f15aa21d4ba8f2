"""Servers that speak JSON over HTTP: one way to ask them, and one policy of what is asked again, when and how often.

::

    with JsonClient("http://localhost:8000/v1", timeout=120, key=key) as client:
        answer = retrying(6)(client.request, "/chat/completions", body)        # what may pass is waited for
        answer = client.request("/health")                                     # asked once, whatever comes

The key goes into one header and into no message. Nothing here knows what is asked or what an answer means: that is its
user's (``tasks.judge.server``, ``tasks.serve.client``). The Hub has a client of its own, and shares the policy.
"""

from __future__ import annotations

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

# The request was in order, and the same one may be answered a moment later: a timeout on the way, too early, too many
# requests, a server that is sick, restarting or overloaded.
TRANSIENT_STATUSES = frozenset({408, 425, 429, 500, 502, 503, 504, 529})
FIRST_WAIT_S, LONGEST_WAIT_S = 1.0, 60.0
_LONGEST_MESSAGE = 200  # characters


def plain_address(url: str) -> str:
    """``url``, if it is the address of a server and holds no secret; for validators of settings.

    Raises:
        ValueError: for anything else.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("no address such as http://localhost:8000/v1")
    if parts.username or parts.password:
        raise ValueError("holds credentials; name a variable under api_key_env instead")
    return url


class Unreachable(Exception):
    """No answer: nobody listens, the connection broke, or it took too long."""

    def __init__(self, why: str, *, late: bool = False) -> None:
        super().__init__(why)
        self.late = late  # somebody is there, but does not answer


@dataclass(frozen=True)
class Answer:
    """An answer, whatever its status.

    Args:
        status: Of HTTP.
        body: Parsed JSON; where it is none, the text.
        message: What an error says, on one line, shortened and without the key.
        retry_after: The header of that name, or nothing.
    """

    status: int
    body: Any
    message: str = ""
    retry_after: str = ""

    @property
    def ok(self) -> bool:
        """Whether the status says so."""
        return 200 <= self.status < 300

    @property
    def complaint(self) -> str:
        """Status and message: ``HTTP 503 no workers``."""
        return f"HTTP {self.status} {self.message}".strip()


class JsonClient:
    """Requests to one server, by any number of threads. A context manager: it closes its connections.

    Args:
        url: What every path is appended to.
        timeout: Seconds that may pass without a byte.
        key: Sent as a bearer token, if there is one.
        connections: How many are kept and used again; 0: a new one for each request, as a server wants it that may be
            gone by the next.
    """

    def __init__(self, url: str, timeout: float, key: str = "", *, connections: int = 0) -> None:
        import httpx

        self._url, self._timeout, self._key = url.rstrip("/"), timeout, key
        trust_env = not _is_loopback(url)  # a proxy of the environment does not know our loopback
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
        """Close the connections that are kept."""
        self._http.close()

    def request(self, path: str, body: Mapping[str, Any] | None = None) -> Answer:
        """GET, or POST of ``body``.

        Raises:
            Unreachable: when there is no answer.
        """
        import httpx

        try:
            if body is None:
                response = self._http.get(self._url + path, follow_redirects=True)
            else:
                response = self._http.post(self._url + path, json=body)
        except httpx.TimeoutException:
            raise Unreachable(f"no answer in {self._timeout:g} s", late=True) from None
        except (httpx.ConnectError, httpx.UnsupportedProtocol, httpx.InvalidURL) as error:
            raise Unreachable(str(error) or type(error).__name__) from None
        except httpx.RequestError as error:
            raise Unreachable(f"the connection broke ({type(error).__name__})") from None
        detail("%s %s: %d", response.request.method, response.request.url.copy_with(query=None), response.status_code)
        parsed = _parsed(response.content)
        message = _message(parsed) or response.reason_phrase
        if self._key:
            message = message.replace(self._key, "***")  # some servers repeat it
        return Answer(response.status_code, parsed, message[:_LONGEST_MESSAGE], response.headers.get("retry-after", ""))


def is_transient(error: BaseException, statuses: Collection[int] = TRANSIENT_STATUSES) -> bool:
    """Whether what failed may succeed when it is asked again: silence, or a status among ``statuses``.

    The error decides that says most: the first with a status among it, what it was raised from, and so on.
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
    """What calls a function up to ``attempts`` times, until it neither raises what may pass nor returns an ``Answer``
    with one of ``statuses``; the last attempt's answer is returned, or its error raised.

    Waits are of 1, 2, 4, … seconds, or what ``Retry-After`` asks for where that is longer; never more than a minute.

    Args:
        transient: Which errors are tried again.
        sleep, now: Of ``time``; given in by whoever will not wait.
    """
    import tenacity

    doubling = tenacity.wait_exponential(multiplier=FIRST_WAIT_S, max=LONGEST_WAIT_S)

    def wait(state: RetryCallState) -> float:
        outcome = state.outcome
        answer = outcome.result() if outcome is not None and not outcome.failed else None
        asked_for = seconds_asked_for(answer.retry_after, now()) if isinstance(answer, Answer) else 0.0
        return min(max(doubling(state), asked_for), LONGEST_WAIT_S)

    return tenacity.Retrying(
        stop=tenacity.stop_after_attempt(attempts),
        wait=wait,
        retry=tenacity.retry_if_exception(transient)
        | tenacity.retry_if_result(lambda answer: isinstance(answer, Answer) and answer.status in statuses),
        sleep=sleep,
        retry_error_callback=_last_outcome,
    )


def seconds_asked_for(retry_after: str, now: float) -> float:
    """Seconds in a ``Retry-After``, which may be a number or a date (RFC 9110, 10.2.3); 0 where it is neither."""
    with suppress(ValueError):
        return float(retry_after)
    with suppress(ValueError, TypeError):
        return parsedate_to_datetime(retry_after).timestamp() - now
    return 0.0


def status_of(error: BaseException) -> int | None:
    """The HTTP status that an error of any client is about."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    return status if isinstance(status, int) else None


def exception_chain(error: BaseException | None) -> list[BaseException]:
    """The error, what it was raised from, and so on."""
    found: list[BaseException] = []
    while error is not None and error not in found:
        found.append(error)
        error = error.__cause__
    return found


def _last_outcome(state: RetryCallState) -> Any:
    assert state.outcome is not None
    return state.outcome.result()


@cache
def _certificates(trust_env: bool, file: str | None, directory: str | None) -> SSLContext:
    """Whom to trust, read once for the same environment: it takes longer than a question to a server that is starting,
    which is asked ten times a second whether it is ready.
    """
    import httpx

    return httpx.create_ssl_context(trust_env=trust_env)


def _is_loopback(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    with suppress(ValueError):
        return ip_address(host).is_loopback
    return host == "localhost"


def _message(body: Any) -> str:
    """What an answer says, on one line: of an error in JSON its own message, else all of it."""
    if isinstance(body, Mapping):
        error = body.get("error", body)
        body = error.get("message", error) if isinstance(error, Mapping) else error
    return " ".join(str(body).split())


def _parsed(content: bytes) -> Any:
    try:
        return json.loads(content)
    except ValueError:
        return content.decode(errors="replace")

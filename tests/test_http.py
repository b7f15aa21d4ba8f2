"""The HTTP client and its retry policy: requests, authorization, proxies, error types and retries."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from types import SimpleNamespace

import loopback
import pytest
from loopback import FakeServer, answering

from mergegate.tasks.base.http import TRANSIENT_STATUSES, Answer, JsonClient, Unreachable, is_transient, retry_transient
from mergegate.tasks.models.checkpoints.hub.access import LOOK_AGAIN_STATUSES, is_retryable

PROXIES = ("http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY", "no_proxy", "NO_PROXY")
SECRET = "sesame-open"


def saying(status: int, body: str) -> AbstractContextManager[FakeServer]:
    """Run a server that gives the same answer to every request."""
    return answering(FakeServer({".*": lambda request: loopback.Answer(status, body.encode())}))


@contextmanager
def silent() -> Iterator[str]:
    """Yield the URL of a server that accepts connections but never answers."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


def nobody() -> str:
    """Return a URL on which no server listens."""
    with silent() as url:
        return url


@pytest.mark.parametrize(
    "body", [f"no such key: {SECRET}", json.dumps({"error": {"message": f"no such key: {SECRET}"}})]
)
def test_the_key_is_sent_and_is_in_no_message(body: str) -> None:
    with saying(401, body) as server:
        answer = JsonClient(server.url, 5, SECRET).request("/models")
    assert [(request.path, request.token) for request in server.log] == [("/models", SECRET)]
    assert answer.complaint == "HTTP 401 no such key: ***"


def test_a_proxy_of_the_environment_is_used_but_not_for_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in PROXIES:
        monkeypatch.delenv(name, raising=False)
    with saying(200, '"the proxy"') as proxy, saying(200, '"the server"') as server:
        monkeypatch.setenv("HTTP_PROXY", proxy.url)
        assert JsonClient(server.url, 5).request("/v1").body == "the server"
        # This host only starts like a loopback address.
        assert JsonClient("http://127.0.0.1.example.test", 5).request("/v1").body == "the proxy"
    assert [request.path for request in proxy.log] == ["http://127.0.0.1.example.test/v1"]


def test_a_refused_connection_and_a_timeout_are_distinguished() -> None:
    with silent() as url, pytest.raises(Unreachable, match=r"no answer in 0\.2 s") as late:
        JsonClient(url, 0.2).request("/")
    with pytest.raises(Unreachable, match="refused") as gone:
        JsonClient(nobody(), 5).request("/")
    with pytest.raises(Unreachable):
        JsonClient("localhost:8000", 5).request("/")  # A URL without a scheme is a user error, not a traceback.
    assert late.value.timed_out
    assert not gone.value.timed_out


@pytest.mark.parametrize("status", sorted(TRANSIENT_STATUSES))
def test_a_transient_status_is_retried_and_the_last_answer_returned(status: int) -> None:
    waits: list[float] = []
    with saying(status, "not now") as server:
        answer = retry_transient(3, sleep=waits.append)(JsonClient(server.url, 5).request, "/")
    assert (answer.status, len(server.log), waits) == (status, 3, [1, 2])


@pytest.mark.parametrize("status", [200, 204, 301, 400, 401, 403, 404, 409, 412, 422, 501])
def test_other_statuses_are_returned_without_a_retry(status: int) -> None:
    with saying(status, "" if status == 204 else "no") as server:
        retry_transient(3, sleep=lambda seconds: pytest.fail("waited"))(JsonClient(server.url, 5).request, "/")
    assert len(server.log) == 1


def test_an_unreachable_server_is_retried_and_other_exceptions_are_raised_at_once() -> None:
    waits: list[float] = []
    with pytest.raises(Unreachable, match="refused"):
        retry_transient(4, sleep=waits.append)(JsonClient(nobody(), 5).request, "/")
    assert waits == [1, 2, 4]

    def wrong() -> Answer:
        raise ValueError("ours")

    with pytest.raises(ValueError, match="ours"):
        retry_transient(5, sleep=lambda seconds: pytest.fail("waited"))(wrong)


class Refusal(Exception):
    """A client library's own exception, which carries its response."""

    def __init__(self, status: int) -> None:
        self.response = SimpleNamespace(status_code=status)


def from_(cause: Exception) -> Exception:
    try:
        raise ValueError("a client's own kind") from cause
    except ValueError as error:
        return error


@pytest.mark.parametrize(
    ("error", "transient", "another_look"),
    [
        *((error, True, True) for error in (Unreachable("gone"), ConnectionResetError(), TimeoutError(), Refusal(503))),
        (from_(Refusal(429)), True, True),
        (Refusal(403), False, False),
        (from_(Refusal(401)), False, False),
        (Refusal(404), False, True),  # The Hub may not list a new branch yet.
        (Refusal(409), False, True),
        (Refusal(412), False, True),  # A concurrent commit came first.
        (RuntimeError("hf_xet"), False, True),
        *((error, False, False) for error in (ValueError(), OSError(28, "No space left"), KeyboardInterrupt())),
    ],
)
def test_more_hub_errors_are_retryable_than_transient(
    error: BaseException, transient: bool, another_look: bool
) -> None:
    assert is_transient(error) is transient
    assert is_retryable(error) is another_look
    assert LOOK_AGAIN_STATUSES > TRANSIENT_STATUSES

"""Requests to a chat server: what mergegate sends, when it retries, and which errors it reports."""

from __future__ import annotations

from collections.abc import Callable
from email.utils import formatdate
from typing import Any

import pytest
from judge_server import Asked, Response, completion, serving

from mergegate.merge_core.errors import InvalidInput
from mergegate.tasks.judge.rubric import response_format
from mergegate.tasks.judge.server import ChatServer, Reply
from mergegate.tasks.judge.settings import JudgeServer

MESSAGES = [{"role": "user", "content": "which?"}]
FORMAT = response_format({"clarity": "It is clear."})
NOW = 1_800_000_000.0


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)


def ask(asked: Asked, waits: list[float] | None = None, **server: Any) -> Reply:
    waits = [] if waits is None else waits
    with ChatServer(JudgeServer(url=asked.url, **server), sleep=waits.append, now=lambda: NOW) as connection:
        return connection.ask("judge", MESSAGES, FORMAT, 100)


def in_turn(*responses: Response) -> Callable[[dict[str, Any]], Response]:
    """Return a script that gives the responses in order and repeats the last one forever."""
    left = list(responses)
    return lambda body: left.pop(0) if len(left) > 1 else left[0]


def test_the_judge_is_asked_at_temperature_zero_and_held_to_the_schema() -> None:
    with serving(in_turn(completion("fine", "judge-1-0613"))) as asked:
        assert ask(asked) == Reply("fine", "judge-1-0613")
    assert asked.paths == ["/v1/chat/completions"]
    (body,) = asked.bodies
    assert body == {
        "model": "judge",
        "messages": MESSAGES,
        "temperature": 0,
        "max_tokens": 100,
        "response_format": FORMAT,
    }
    assert "authorization" not in asked.headers[0]


def test_the_key_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "sesame")
    with serving(in_turn(completion("fine"))) as asked:
        ask(asked, api_key_env="JUDGE_KEY")
    assert asked.headers[0]["authorization"] == "Bearer sesame"


def test_a_missing_api_key_is_reported_before_any_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    with serving(in_turn(completion("fine"))) as asked, pytest.raises(InvalidInput, match=r"JUDGE_KEY: .* is not set"):
        ask(asked, api_key_env="JUDGE_KEY")
    assert asked.bodies == []


def test_a_key_that_the_server_repeats_is_in_no_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "sesame")
    with (
        serving(in_turn(Response(401, "wrong key: sesame"))) as asked,
        pytest.raises(InvalidInput, match="401: wrong key: \\*\\*\\*") as caught,
    ):
        ask(asked, api_key_env="JUDGE_KEY")
    assert "sesame" not in str(caught.value)
    assert "api_key_env" in caught.value.remedy


@pytest.mark.parametrize("status", [429, 500, 502, 503, 504])
def test_transient_errors_are_retried_with_growing_waits(status: int) -> None:
    waits: list[float] = []
    failing = Response(status, "busy")
    with serving(in_turn(failing, failing, failing, completion("at last"))) as asked:
        assert ask(asked, waits).text == "at last"
    assert waits == [1, 2, 4]
    assert len(asked.bodies) == 4


@pytest.mark.parametrize("value", ["17", formatdate(NOW + 17, usegmt=True)])
def test_the_wait_follows_the_retry_after_header(value: str) -> None:
    waits: list[float] = []
    busy = Response(429, "busy", (("Retry-After", value),))
    with serving(in_turn(busy, completion("fine"))) as asked:
        ask(asked, waits)
    assert waits == [17]


@pytest.mark.parametrize(("value", "waited"), [("86400", 60), ("soon", 1), (formatdate(NOW - 9), 1)])
def test_no_wait_is_longer_than_a_minute_or_shorter_than_ours(value: str, waited: float) -> None:
    waits: list[float] = []
    busy = Response(429, "busy", (("Retry-After", value),))
    with serving(in_turn(busy, completion("fine"))) as asked:
        ask(asked, waits)
    assert waits == [waited]


def test_a_server_that_keeps_failing_ends_the_run() -> None:
    waits: list[float] = []
    gives_up = pytest.raises(InvalidInput, match="503: no workers, after 3 attempts")
    with serving(in_turn(Response(503, "no workers"))) as asked, gives_up:
        ask(asked, waits, attempts=3)
    assert waits == [1, 2]
    assert len(asked.bodies) == 3


def test_an_unreachable_server_is_reported() -> None:
    with serving(in_turn(completion("fine"))) as gone:
        pass
    with pytest.raises(InvalidInput, match=r"no answer .*after 2 attempts"):
        ask(gone, attempts=2)  # The port no longer has a listener.


@pytest.mark.parametrize(("status", "remedy"), [(401, "api_key_env"), (403, "api_key_env"), (404, "judge.model")])
def test_a_refusal_is_not_tried_again(status: int, remedy: str) -> None:
    refuses = pytest.raises(InvalidInput, match=f"{status}: no")
    with serving(in_turn(Response(status, "no"))) as asked, refuses as caught:
        ask(asked)
    assert len(asked.bodies) == 1
    assert remedy in caught.value.remedy


@pytest.mark.parametrize("status", [400, 422])
def test_a_server_without_schemas_gets_plain_requests(status: int) -> None:
    def script(body: dict[str, Any]) -> Response:
        return Response(status, "unknown field") if "response_format" in body else completion("plain")

    with serving(script) as asked, ChatServer(JudgeServer(url=asked.url)) as connection:
        replies = [connection.ask("judge", MESSAGES, FORMAT, None).text for _ in range(2)]
    assert replies == ["plain", "plain"]
    assert ["response_format" in body for body in asked.bodies] == [True, False, False]
    assert "max_tokens" not in asked.bodies[0]


def test_a_request_that_is_wrong_without_a_schema_too_is_refused() -> None:
    refuses = pytest.raises(InvalidInput, match="400: context too long")
    with serving(in_turn(Response(400, "context too long"))) as asked, refuses:
        ask(asked)
    assert len(asked.bodies) == 2


@pytest.mark.parametrize("body", ["<html>", "[]", '{"choices": []}', '{"object": "error"}'])
def test_an_invalid_completion_is_reported(body: str) -> None:
    with serving(in_turn(Response(200, body))) as asked, pytest.raises(InvalidInput, match="no chat completion"):
        ask(asked)


def test_an_empty_message_is_an_empty_reply() -> None:
    with serving(in_turn(completion(None))) as asked:
        assert ask(asked).text == ""

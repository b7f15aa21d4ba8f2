"""Requests to a chat server: what mergegate sends, when it retries, how many are open, and which errors it reports."""

from __future__ import annotations

import threading
from collections.abc import Callable
from email.utils import formatdate
from typing import Any

import pytest
from loopback import Answer
from openai_server import OpenAiServer, completion, serving

from mergegate.merge_core.errors import InvalidInput
from mergegate.tasks.quality.judge.answers import Prompt
from mergegate.tasks.quality.judge.questions import ChatServer, Reply, ask_judge, both_orders, response_format
from mergegate.tasks.quality.judge.settings import JudgeServer, JudgmentSettings

MESSAGES = [{"role": "user", "content": "which?"}]
FORMAT = response_format({"clarity": "It is clear."})
NOW = 1_800_000_000.0
FINE = completion("fine")


def ask(asked: OpenAiServer, waits: list[float] | None = None, **server: Any) -> Reply:
    waits = [] if waits is None else waits
    with ChatServer(JudgeServer(url=asked.url, **server), sleep=waits.append, now=lambda: NOW) as connection:
        return connection.ask("judge", MESSAGES, FORMAT, 100)


def in_turn(*responses: Answer) -> Callable[[dict[str, Any]], Answer]:
    """Return a script that gives the responses in order and repeats the last one forever."""
    left = list(responses)
    return lambda body: left.pop(0) if len(left) > 1 else left[0]


def test_the_judge_is_asked_at_temperature_zero_and_held_to_the_schema() -> None:
    with serving(in_turn(completion("fine", "judge-1-0613"))) as asked:
        assert ask(asked) == Reply("fine", "judge-1-0613")
    (request,) = asked.log
    assert request.path == "/v1/chat/completions"
    sent = {"model": "judge", "messages": MESSAGES, "temperature": 0, "max_tokens": 100, "response_format": FORMAT}
    assert request.json == sent
    assert "Authorization" not in request.headers


def test_the_key_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "sesame")
    with serving(in_turn(FINE)) as asked:
        ask(asked, api_key_env="JUDGE_KEY")
        monkeypatch.delenv("JUDGE_KEY")
        with pytest.raises(InvalidInput, match=r"JUDGE_KEY: .* is not set"):
            ask(asked, api_key_env="JUDGE_KEY")
    assert [request.headers["Authorization"] for request in asked.log] == ["Bearer sesame"]


def test_a_key_that_the_server_repeats_is_in_no_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "sesame")
    refuses = pytest.raises(InvalidInput, match="401: wrong key: \\*\\*\\*")
    with serving(in_turn(Answer(401, b"wrong key: sesame"))) as asked, refuses as caught:
        ask(asked, api_key_env="JUDGE_KEY")
    assert "sesame" not in str(caught.value)
    assert "api_key_env" in caught.value.remedy


@pytest.mark.parametrize("status", [429, 500, 502, 503, 504])
def test_transient_errors_are_retried_with_growing_waits(status: int) -> None:
    waits: list[float] = []
    with serving(in_turn(*[Answer(status, b"busy")] * 3, completion("at last"))) as asked:
        assert ask(asked, waits).text == "at last"
    assert waits == [1, 2, 4]
    assert len(asked.log) == 4


@pytest.mark.parametrize(
    ("value", "waited"),
    [
        ("17", 17),
        (formatdate(NOW + 17, usegmt=True), 17),
        ("86400", 60),  # no longer than a minute
        ("soon", 1),  # no shorter than without the header
        (formatdate(NOW - 9), 1),
    ],
)
def test_the_wait_follows_the_retry_after_header(value: str, waited: float) -> None:
    waits: list[float] = []
    with serving(in_turn(Answer(429, b"busy", {"Retry-After": value}), FINE)) as asked:
        ask(asked, waits)
    assert waits == [waited]


def test_a_server_that_keeps_failing_ends_the_run() -> None:
    waits: list[float] = []
    gives_up = pytest.raises(InvalidInput, match="503: no workers, after 3 attempts")
    with serving(in_turn(Answer(503, b"no workers"))) as asked, gives_up:
        ask(asked, waits, attempts=3)
    assert waits == [1, 2]
    assert len(asked.log) == 3
    with pytest.raises(InvalidInput, match=r"no answer .*after 2 attempts"):
        ask(asked, attempts=2)  # The port no longer has a listener.


@pytest.mark.parametrize(("status", "remedy"), [(401, "api_key_env"), (403, "api_key_env"), (404, "judge.model")])
def test_a_refusal_is_not_tried_again(status: int, remedy: str) -> None:
    refuses = pytest.raises(InvalidInput, match=f"{status}: no")
    with serving(in_turn(Answer(status, b"no"))) as asked, refuses as caught:
        ask(asked)
    assert len(asked.log) == 1
    assert remedy in caught.value.remedy


@pytest.mark.parametrize("status", [400, 422])
def test_a_server_without_schemas_gets_plain_requests(status: int) -> None:
    def script(body: dict[str, Any]) -> Answer:
        return Answer(status, b"unknown field") if "response_format" in body else completion("plain")

    with serving(script) as asked, ChatServer(JudgeServer(url=asked.url)) as connection:
        replies = [connection.ask("judge", MESSAGES, FORMAT, None).text for _ in range(2)]
    assert replies == ["plain", "plain"]
    assert ["response_format" in body for body in asked.bodies] == [True, False, False]
    assert "max_tokens" not in asked.bodies[0]


def test_a_request_that_is_wrong_without_a_schema_too_is_refused() -> None:
    refuses = pytest.raises(InvalidInput, match="400: context too long")
    with serving(in_turn(Answer(400, b"context too long"))) as asked, refuses:
        ask(asked)
    assert len(asked.log) == 2


@pytest.mark.parametrize("body", [b"<html>", b"[]", b'{"choices": []}', b'{"object": "error"}'])
def test_an_invalid_completion_is_reported(body: bytes) -> None:
    with serving(in_turn(Answer(200, body))) as asked, pytest.raises(InvalidInput, match="no chat completion"):
        ask(asked)


def test_an_empty_message_is_an_empty_reply() -> None:
    with serving(in_turn(completion(None))) as asked:
        assert ask(asked).text == ""


@pytest.mark.story
def test_unfinished_requests_never_exceed_the_concurrency() -> None:
    """The replies are consumed slowly."""
    most, lock = 3, threading.Lock()
    asked = heard = beyond = 0

    def answer(body: dict[str, Any]) -> Answer:
        nonlocal asked, beyond
        with lock:
            asked += 1
            beyond = max(beyond, asked - heard)
        return completion('{"reasoning": "", "verdict": "tie"}')

    prompts = [Prompt(id=str(number), turns=("which?",), references=(None,)) for number in range(60)]
    questions = [one for prompt in prompts for one in both_orders(prompt, 0, ["this"], ["that"])]
    settings = JudgmentSettings(model="judge", dimensions={"clarity": "Clear."})
    said = []
    with serving(answer) as judge:
        for judgment in ask_judge(questions, settings, JudgeServer(url=judge.url, concurrency=most), ""):
            said.append(judgment.key)
            with lock:
                heard += 1
    assert sorted(said) == sorted(question.key for question in questions)
    assert 1 < beyond <= most

"""Concurrent requests to a judge whose replies are consumed slowly."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from judge_server import Response, completion, serving

from mergegate.tasks.judge.prompts import Prompt
from mergegate.tasks.judge.questions import ask_judge, both_orders
from mergegate.tasks.judge.settings import JudgeServer, JudgmentSettings

MOST = 3


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.story
def test_unfinished_requests_never_exceed_the_concurrency() -> None:
    lock, beyond = threading.Lock(), 0
    asked = heard = 0

    def answer(body: dict[str, Any]) -> Response:
        nonlocal asked, beyond
        with lock:
            asked += 1
            beyond = max(beyond, asked - heard)
        return completion('{"reasoning": "", "verdict": "tie"}')

    prompts = [Prompt(id=str(number), turns=("which?",), references=(None,)) for number in range(60)]
    questions = [one for prompt in prompts for one in both_orders(prompt, 0, ["this"], ["that"])]
    said = []
    with serving(answer) as judge:
        server = JudgeServer(url=judge.url, concurrency=MOST)
        for judgment in ask_judge(
            questions, JudgmentSettings(model="judge", dimensions={"clarity": "Clear."}), server, ""
        ):
            said.append(judgment.key)
            with lock:
                heard += 1
    assert sorted(said) == sorted(question.key for question in questions)
    assert 1 < beyond <= MOST

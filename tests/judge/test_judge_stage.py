"""The judge stage: its requests, their number, and the stored records. The judge is a script behind a real socket."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from loopback import Answer
from openai_server import completion, serving
from prefect import flow
from tiny_models import CPU, make_model, words, write_jsonl

from mergegate.merge_core.errors import InvalidInput
from mergegate.merge_core.files.hashing import HashMemo
from mergegate.tasks.base.stage.progress import StageStatus, progress_watcher
from mergegate.tasks.models.checkpoints.model import Model
from mergegate.tasks.quality.judge.answers import pin_prompts
from mergegate.tasks.quality.judge.settings import JudgeSettings
from mergegate.tasks.quality.judge.stage import JudgedAnswers, judge_models

PROMPTS = 24
pytestmark = [pytest.mark.story, pytest.mark.usefixtures("home", "prefect_api")]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Model, Model]:
    root = tmp_path_factory.mktemp("models")
    first, second = (make_model(root / name, seed=seed) for seed, name in enumerate(("base", "merge")))
    return first, second


def run(tmp_path: Path, models: tuple[Model, Model], url: str, **settings: Any) -> JudgedAnswers:
    rows = ({"prompt": word, "reference": f"ref-{word}"} for word in words(PROMPTS, seed=9))
    write_jsonl(tmp_path / "prompts.jsonl", rows)
    given = {"url": url, "model": "judge", "prompts": "prompts.jsonl", "guarded_by": "base", "attempts": 1}
    plain = {"chat_template": False, "max_new_tokens": 6, "concurrency": 3}
    chosen = JudgeSettings.model_validate({**given, **plain, **settings})

    @flow
    def one_judge() -> JudgedAnswers:
        prompts = pin_prompts(chosen, tmp_path, HashMemo(tmp_path / "hashes.db"))
        return judge_models(*models, prompts, chosen, CPU)

    return one_judge()


def shown(body: dict[str, Any]) -> tuple[str, str]:
    """Return the two answers as the judge sees them."""
    text = body["messages"][1]["content"]
    answers = dict(re.findall(r"<<< answer ([AB]) \w+\n(.*?)\n>>> end of answer \1", text, re.DOTALL))
    return answers["A"], answers["B"]


def prefers(better: Callable[[str, str], bool]) -> Callable[[dict[str, Any]], Answer]:
    """Return a script for a judge that prefers A if ``better(a, b)``, otherwise B."""

    def script(body: dict[str, Any]) -> Answer:
        verdict = "A" if better(*shown(body)) else "B"
        sides = {"correctness": verdict, "relevance": "tie", "clarity": "A", "verdict": verdict}
        return completion({"reasoning": "so", **sides})

    return script


alphabetical = prefers(lambda a, b: a < b)


def lines(judged: JudgedAnswers, name: str) -> list[dict[str, Any]]:
    text = (judged.judgments.directory / name).read_text()
    return [json.loads(line) for line in text.splitlines()]


def test_every_answer_and_judgment_is_kept(tmp_path: Path, models: tuple[Model, Model]) -> None:
    with serving(alphabetical) as asked:
        judged = run(tmp_path, models, asked.url)
    pairs, judgments = lines(judged, "pairs.jsonl"), lines(judged, "judgements.jsonl")
    kept = {path.name for path in judged.judgments.directory.iterdir()}
    assert kept == {"pairs.jsonl", "judgements.jsonl", "value.json", "manifest.json"}
    assert all(row["references"] == [f"ref-{row['turns'][0]}"] for row in pairs)
    different = [row["id"] for row in pairs if row["reference"] != row["merge"]]
    assert sorted((j["prompt"], j["order"]) for j in judgments if not j["control"]) == sorted(
        (prompt, order) for prompt in different for order in ("reference first", "merge first")
    )
    assert judged.verdict.controls is not None
    assert sum(bool(j["control"]) for j in judgments) == 2 * judged.verdict.controls.pairs > 0
    assert {(j["judge"], j["reasoning"]) for j in judgments} == {("judge-1", "so")}
    assert all(json.loads(j["reply"])["verdict"] in "AB" for j in judgments)
    assert any("reference answer" in body["messages"][1]["content"] for body in asked.bodies)


def test_equal_answers_are_not_sent_to_the_judge(tmp_path: Path, models: tuple[Model, Model]) -> None:
    twin = models[0].model_copy(update={"name": "merge"})
    with serving(alphabetical) as asked:
        verdict = run(tmp_path, (models[0], twin), asked.url).verdict
    assert asked.bodies == []
    assert (verdict.identical, verdict.ties, verdict.win_rate) == (PROMPTS, PROMPTS, 0.5)


@pytest.mark.proof
def test_nothing_is_judged_twice_and_a_threshold_needs_no_requests(tmp_path: Path, models: tuple[Model, Model]) -> None:
    with serving(alphabetical) as asked:
        first = run(tmp_path, models, asked.url)
        once = len(asked.bodies)
        strict = run(tmp_path, models, asked.url, max_shortfall=0, margin=0.1, min_consistency=1.0, concurrency=1)
        assert len(asked.bodies) == once
        assert strict.judgments.key == first.judgments.key
        run(tmp_path, models, asked.url, model="another")
        assert len(asked.bodies) == 2 * once
        run(tmp_path, models, asked.url, dimensions={"wit": "It is funny."})
        assert len(asked.bodies) == 3 * once
    with serving(alphabetical) as moved:
        assert run(tmp_path, models, moved.url).judgments.key == first.judgments.key
    assert moved.bodies == []


def test_a_parent_answers_once(tmp_path: Path, models: tuple[Model, Model], tmp_path_factory: Any) -> None:
    ended: list[tuple[str, str, StageStatus]] = []

    class Listener:
        def __getattr__(self, name: str) -> Callable[..., None]:
            return lambda *told: ended.append((told[0], told[1], told[2])) if name == "on_end" else None

    third = make_model(tmp_path_factory.mktemp("third") / "merge", seed=5)
    with serving(alphabetical) as asked:
        run(tmp_path, models, asked.url)
        with progress_watcher(Listener()):  # type: ignore[arg-type]  # It accepts every event.
            run(tmp_path, (models[0], third), asked.url)
    assert ended == [("answer", "base", "cached"), ("answer", "merge", "made"), ("judge", "", "made")]


def test_judging_resumes_after_the_server_was_unreachable(tmp_path: Path, models: tuple[Model, Model]) -> None:
    left = 10

    def failing(body: dict[str, Any]) -> Answer:
        nonlocal left
        left -= 1
        return alphabetical(body) if left >= 0 else Answer(500, b"out of memory")

    with serving(failing) as asked, pytest.raises(InvalidInput, match="500: out of memory"):
        run(tmp_path, models, asked.url, concurrency=1)
    with serving(alphabetical) as again:
        resumed = run(tmp_path, models, again.url)
    assert resumed.verdict.controls is not None
    total = 2 * (PROMPTS - resumed.verdict.identical + resumed.verdict.controls.pairs)
    assert total > 12
    assert len(again.bodies) == total - 10
    assert len(lines(resumed, "judgements.jsonl")) == total


def test_the_key_is_stored_nowhere(
    tmp_path: Path, home: Path, models: tuple[Model, Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_KEY", "open-sesame")
    with serving(alphabetical) as asked:
        run(tmp_path, models, asked.url, api_key_env="JUDGE_KEY")
    assert asked.log[0].token == "open-sesame"
    kept = [path for path in home.rglob("*") if path.is_file()]
    assert any(path.name == "judgements.jsonl" for path in kept)
    assert not any(b"open-sesame" in path.read_bytes() for path in kept)

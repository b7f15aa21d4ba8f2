"""Prompts for the judge: two formats, pinned by content, with a deterministic sample."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mergegate.merge_core.errors import InvalidInput
from mergegate.merge_core.files.hashing import HashMemo
from mergegate.tasks.judge.prompts import JudgePrompts, Prompt, pin_prompts, read_prompts
from mergegate.tasks.judge.settings import JudgeSettings

MT_BENCH = [
    {"question_id": 81, "category": "writing", "turns": ["Write a post.", "Start every sentence with A."]},
    {"question_id": 111, "category": "math", "turns": ["What is 2 + 2?", "And doubled?"]},
]
ANSWERS = [{"question_id": 111, "model_id": "x", "choices": [{"index": 0, "turns": ["4", "8"]}]}]


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def pinned(folder: Path, rows: list[Any], answers: list[Any] | None = None, **settings: Any) -> JudgePrompts:
    write(folder / "prompts.jsonl", rows)
    if answers is not None:
        settings["references"] = write(folder / "answers.jsonl", answers).name
    given = {"url": "http://localhost/v1", "model": "m", "prompts": "prompts.jsonl", "guarded_by": "base", **settings}
    return pin_prompts(JudgeSettings.model_validate(given), folder, HashMemo(folder / "hashes.db"))


def test_a_users_prompts_have_turns_and_perhaps_references(tmp_path: Path) -> None:
    rows = [{"prompt": "one"}, {"id": "second", "prompt": "two", "reference": "2", "category": "c", "mine": 1}]
    found = read_prompts(pinned(tmp_path, rows).prompts)
    assert found == (Prompt("1", ("one",), (None,)), Prompt("second", ("two",), ("2",), "c"))
    rows = [{"turns": ["a", "b"], "reference": "x"}, {"turns": ["a", "b"], "reference": [None, "y"]}]
    assert [prompt.references for prompt in read_prompts(pinned(tmp_path, rows).prompts)] == [("x", None), (None, "y")]


def test_mt_bench_is_read_with_its_reference_answers(tmp_path: Path) -> None:
    assert read_prompts(*pinned(tmp_path, MT_BENCH, ANSWERS)) == (
        Prompt("81", ("Write a post.", "Start every sentence with A."), (None, None), "writing"),
        Prompt("111", ("What is 2 + 2?", "And doubled?"), ("4", "8"), "math"),
    )


def test_a_sample_is_fixed_scattered_and_contained_in_a_larger_one(tmp_path: Path) -> None:
    rows = [{"prompt": f"question {n}"} for n in range(50)]

    def ids(**settings: Any) -> list[int]:
        return [int(prompt.id) for prompt in read_prompts(pinned(tmp_path, rows, **settings).prompts)]

    five, twenty = ids(sample=5), ids(sample=20)
    assert (len(five), len(twenty), len(ids())) == (5, 20, 50)
    assert set(five) < set(twenty)
    assert five == sorted(five)
    assert five != [1, 2, 3, 4, 5]
    assert ids(sample=5, seed=1) != five


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([{"prompt": "a"}], "1 prompts"),
        ([{"prompt": "a"}, {"text": "b"}], "line 2: neither prompt nor turns"),
        ([{"prompt": "a", "turns": ["b"]}], "line 1: both prompt and turns"),
        ([{"prompt": " "}], "line 1: "),
        ([{"turns": []}], "line 1: "),
        ([{"turns": "text"}], "line 1: "),
        ([{"prompt": "a", "reference": ["x", "y"]}], "reference"),
        ([{"prompt": "a", "reference": 7}], "reference 7"),
        ([{"id": 1, "prompt": "a"}, {"id": "1", "prompt": "b"}], "line 2: a second prompt with id 1"),
        ([[]], "line 1: list"),
    ],
)
def test_an_error_names_the_line_of_an_invalid_prompt(tmp_path: Path, rows: list[Any], words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        pinned(tmp_path, rows)


def test_errors_name_invalid_reference_answers_and_missing_files(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="line 1: no reference answer"):
        pinned(tmp_path, MT_BENCH, [{"question_id": 81, "choices": []}])
    for field in ("prompts", "references"):
        with pytest.raises(InvalidInput, match=f"judge.{field}: nowhere.jsonl: no such file"):
            pinned(tmp_path, MT_BENCH, **{field: "nowhere.jsonl"})


def test_prompts_that_change_during_the_run_are_noticed(tmp_path: Path) -> None:
    prompts = pinned(tmp_path, MT_BENCH).prompts
    write(tmp_path / "prompts.jsonl", [*MT_BENCH, {"prompt": "new"}])
    with pytest.raises(InvalidInput, match="changed during the run"):
        read_prompts(prompts)

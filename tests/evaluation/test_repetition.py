"""``check`` reports repeated prompts, shared passages and few-shot examples that are evaluated."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_models import write_jsonl

from mergegate.merge_core.errors import Finding
from mergegate.merge_core.files.hashing import HashMemo
from mergegate.tasks.evaluation import CountLimit, find_repetition, pin_data, pin_task, repetition_findings
from mergegate.tasks.evaluation.repetition import Repetition

TASK = """task: t
dataset_path: json
dataset_kwargs: {data_files: {test: t.jsonl, train: train.jsonl}}
test_split: test
fewshot_split: %s
num_fewshot: %d
output_type: %s
doc_to_text: "%s"
doc_to_target: "{{a}}"
doc_to_choice: "{{choices}}"
metric_list: [{metric: %s, aggregation: mean, higher_is_better: true}]
"""


@pytest.fixture(autouse=True)
def own_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MERGEGATE_HOME", str(tmp_path / "home"))


def row(number: int, question: int | None = None, passage: int | None = None) -> dict[str, object]:
    question = number if question is None else question
    text = "" if passage is None else f"passage {passage} " * 40
    return {
        "id": number,
        "passage": text,
        "q": f"question {question}?",
        "a": f"answer {question}",
        "choices": ["x", "y"],
    }


def repetition(
    directory: Path,
    rows: list[dict[str, object]],
    train: list[dict[str, object]] | None = None,
    *,
    prompt: str = "{{passage}} {{q}}",
    num_fewshot: int = 0,
) -> Repetition:
    write_jsonl(directory / "t.jsonl", rows)
    write_jsonl(directory / "train.jsonl", train or [row(10_000 + number) for number in range(20)])
    split = "train" if train is not None else "test"
    kind = ("multiple_choice", "acc") if not prompt else ("generate_until", "exact_match")
    text = TASK % (split, num_fewshot, kind[0], prompt, kind[1])
    (directory / "t.yaml").write_text(text if not prompt else text.replace('doc_to_choice: "{{choices}}"\n', ""))
    task = pin_data(pin_task("t.yaml", directory, HashMemo(directory / "hashes.db")))
    return find_repetition.build(task, None, CountLimit()).value


def found(repetition: Repetition, clustered_by: str | None = None) -> list[Finding]:
    findings = list(repetition_findings("t", repetition, clustered_by))
    assert all(finding.severity == "warn" for finding in findings)
    return findings


@pytest.mark.story
def test_distinct_documents_have_no_findings(tmp_path: Path) -> None:
    assert found(repetition(tmp_path, [row(number) for number in range(100)])) == []


@pytest.mark.story
def test_repeated_prompts_are_reported_above_1_percent(tmp_path: Path) -> None:
    """The documents differ in their numbers, but not in what the model reads."""
    measured = repetition(tmp_path, [row(number, number % 90) for number in range(100)])
    assert (measured.documents, measured.duplicates) == (100, 10)
    (finding,) = found(measured)
    assert finding.found == "10 of 100 documents (10 %) repeat the prompt of another one, such as 'question 0?'"
    assert found(measured.model_copy(update={"documents": 1000})) == []


def test_a_repeated_passage_suggests_cluster_by(tmp_path: Path) -> None:
    measured = repetition(tmp_path, [row(number, passage=number // 5) for number in range(100)])
    (finding,) = found(measured)
    assert finding.found == "100 of 100 documents share the text in 'passage' with another one (20 different texts)"
    assert finding.remedy == "set cluster_by: passage for this guard"
    assert found(measured, "passage") == []


def test_an_instruction_that_all_documents_share_is_not_a_passage(tmp_path: Path) -> None:
    assert found(repetition(tmp_path, [row(number, passage=0) for number in range(100)])) == []


def test_examples_from_the_evaluated_split_are_reported(tmp_path: Path) -> None:
    rows = [row(number) for number in range(50)]
    (finding,) = found(repetition(tmp_path, rows, num_fewshot=2))
    assert finding.found.startswith("50 of 50 documents are also few-shot examples, because the examples come from")
    assert "fewshot_split" in finding.remedy
    assert found(repetition(tmp_path, rows, num_fewshot=0)) == []


def test_examples_that_are_evaluated_in_other_words_are_reported(tmp_path: Path) -> None:
    train = [row(number) for number in range(1000, 1030)]
    train[3] = {**train[3], "q": "  QUESTION 7 !", "a": "Answer   7."}
    (finding,) = found(repetition(tmp_path, [row(number) for number in range(50)], train, num_fewshot=2))
    assert finding.found == "1 of 50 documents are also few-shot examples, such as 'question 7?'"


def test_a_prompt_that_all_documents_share_does_not_repeat(tmp_path: Path) -> None:
    """In BLiMP, the prompt is empty and only the choices differ."""
    rows = [{**row(number), "a": "x", "choices": [f"x {number}", f"y {number}"]} for number in range(40)]
    rows = [{**each, "a": each["choices"][0]} for each in rows]  # type: ignore[index]
    assert repetition(tmp_path, rows, prompt="").duplicates == 0

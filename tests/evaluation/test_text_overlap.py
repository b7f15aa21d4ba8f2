"""Repeated prompts, shared passages and training texts that contain documents are found; unrelated texts are not."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scoring_runs import call_here, mean_of, pin, write_task
from tiny_models import write_jsonl

from mergegate.merge_core.errors import Finding
from mergegate.tasks.quality.evaluation import CountLimit, find_repetition, pin_data, repetition_findings
from mergegate.tasks.quality.evaluation.scoring import loading
from mergegate.tasks.quality.evaluation.scoring.overlap import Repetition, find_occurring, words_of

WORDS = [f"w{number}" for number in range(3000)]
SEPARATORS = [" ", "  ", "\n", ", ", " - ", "... ", " “", "\u00a0", "; "]
SEEDS = st.integers(0, 10**6)


def draw(rng: random.Random, count: int) -> list[str]:
    return [rng.choice(WORDS) for _ in range(count)]


def disguise(words: list[str], rng: random.Random, inserted: int = 0) -> str:
    """Change case, punctuation and spacing, and insert words."""
    words = list(words)
    for _ in range(inserted):
        words.insert(rng.randrange(len(words) + 1), "inserted")
    return "".join(rng.choice([word, word.upper(), word.title()]) + rng.choice(SEPARATORS) for word in words)


@given(SEEDS, st.integers(8, 150))
@settings(max_examples=20)
def test_case_punctuation_and_spacing_do_not_hide_a_document(seed: int, length: int) -> None:
    rng = random.Random(seed)
    words = draw(rng, length)
    cut = rng.randrange(length)
    text = " ".join(draw(rng, 300)) + " " + disguise(words, rng) + " ".join(draw(rng, 300))
    document = (" ".join(words[:cut]), " ".join(words[cut:]))
    assert find_occurring([("other words entirely, and nothing else", "no"), document], ["unrelated", text]) == (1,)


@given(SEEDS, st.integers(80, 200))
@settings(max_examples=20)
def test_a_few_inserted_words_do_not_hide_a_document(seed: int, length: int) -> None:
    rng = random.Random(seed)
    words = draw(rng, length)
    assert find_occurring([(" ".join(words), "")], [disguise(words, rng, inserted=3)]) == (0,)


@given(SEEDS)
@settings(max_examples=20)
def test_common_phrases_do_not_make_a_match(seed: int) -> None:
    """Both texts contain the same two phrases of a dozen words, in documents of forty."""
    rng = random.Random(seed)
    phrases = ["which of the following statements about the passage above is most likely true", "none of the above"]
    document = [*phrases[0].split(), *draw(rng, 30), *phrases[1].split()]
    text = " ".join([*phrases[0].split(), *draw(rng, 500), *phrases[1].split()])
    assert find_occurring([(" ".join(document), "A")], [text]) == ()


def test_the_instructions_of_a_template_do_not_make_a_match() -> None:
    rng = random.Random(0)
    template = " ".join(draw(rng, 40))
    documents = [(f"{template} {' '.join(draw(rng, 9))}", "yes") for _ in range(50)]
    text = f"{template} {' '.join(draw(rng, 200))}"
    assert find_occurring(documents, [text]) == ()
    assert find_occurring(documents, [text + documents[7][0] + " yes"]) == (7,)


@pytest.mark.parametrize(
    ("document", "text", "is_found"),
    [
        (("the capital of France:", "Paris"), "The Capital of FRANCE -- Paris!", True),
        (("the capital of France:", "Paris"), "the capital of france? Answer: paris", True),
        (("the capital of France:", "Paris"), "the capital of france", False),  # the answer is missing
        (("the capital of France:", "Paris"), "paris: the capital of france", False),  # the answer comes first
        (("the capital of France:", "Paris"), "the capital of france " + "word " * 20 + "paris", False),  # far away
        (("the capital of France:", "Paris"), "the capital of Southern France, Paris", False),
        (("", ""), "!? ...", False),
        (("", ""), "", False),
        (("!?", "..."), "!? ...", False),
    ],
)
def test_a_short_document_needs_all_its_words_in_order(document: tuple[str, str], text: str, is_found: bool) -> None:
    assert bool(find_occurring([document], [text])) == is_found


def test_words_are_compared_after_unicode_normalization() -> None:
    assert words_of("\uff26\uff55ll\u3000Width, cafe\u0301 — STRASSE_2") == words_of("full width café straße 2")
    assert words_of("今日は良い天気です") == tuple("今日は良い天気です")
    assert words_of("!?... --") == ()


@pytest.mark.story
def test_the_time_is_linear_in_the_texts() -> None:
    rng = random.Random(1)
    documents = [(" ".join(draw(rng, count)), "") for count in (40, 5) for _ in range(300)]
    texts = [" ".join(draw(rng, 1000)) for _ in range(160)]

    def sample(count: int) -> float:
        began = time.thread_time()  # Not the wall clock, so other programs cannot fail this test.
        find_occurring(documents, texts[:count])
        return time.thread_time() - began

    def seconds(count: int) -> float:
        return min(sample(count) for _ in range(3))

    sample(10)
    assert seconds(160) < 12 * seconds(40) + 0.2


def row(number: int, question: int | None = None, passage: int | None = None) -> dict[str, Any]:
    question = number if question is None else question
    text = "" if passage is None else f"passage {passage} " * 40
    texts = {"passage": text, "q": f"question {question}?", "a": f"answer {question}"}
    return {"id": number, **texts, "choices": ["x", "y"]}


@pytest.fixture
def repetition(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that measures the repetition in rows, with few-shot examples from the rows or from `train`."""
    monkeypatch.setenv("MERGEGATE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(loading, "call_model_process", call_here)

    def measure(rows: list[dict[str, Any]], train: list[dict[str, Any]] | None = None, **config: Any) -> Repetition:
        write_jsonl(tmp_path / "train.jsonl", train or [row(10_000 + number) for number in range(20)])
        files = {"data_files": {"test": "t.jsonl", "train": "train.jsonl"}}
        defaults: dict[str, Any] = {"dataset_kwargs": files, "fewshot_split": "test" if train is None else "train"}
        defaults |= {"num_fewshot": 0, "output_type": "generate_until", "metric_list": [mean_of("exact_match")]}
        defaults |= {"doc_to_text": "{{passage}} {{q}}", "doc_to_target": "{{a}}"}
        task = pin_data(pin(write_task(tmp_path, "t", rows, **defaults | config)))
        return find_repetition.build(task, None, CountLimit()).value

    return measure


def found(measured: Repetition, clustered_by: str | None = None) -> list[Finding]:
    findings = list(repetition_findings("t", measured, clustered_by))
    assert all(finding.severity == "warn" for finding in findings)
    return findings


def test_distinct_documents_and_an_instruction_that_all_documents_share_have_no_findings(repetition: Any) -> None:
    assert found(repetition([row(number) for number in range(100)])) == []
    assert found(repetition([row(number, passage=0) for number in range(100)])) == []


def test_repeated_prompts_are_reported_above_1_percent(repetition: Any) -> None:
    """The documents differ in their numbers, but not in what the model reads."""
    measured = repetition([row(number, number % 90) for number in range(100)])
    assert (measured.documents, measured.duplicates) == (100, 10)
    (finding,) = found(measured)
    assert finding.found == "10 of 100 documents (10 %) repeat the prompt of another one, such as 'question 0?'"
    assert found(measured.model_copy(update={"documents": 1000})) == []


def test_a_repeated_passage_suggests_cluster_by(repetition: Any) -> None:
    measured = repetition([row(number, passage=number // 5) for number in range(100)])
    (finding,) = found(measured)
    assert finding.found == "100 of 100 documents share the text in 'passage' with another one (20 different texts)"
    assert finding.remedy == "set cluster_by: passage for this guard"
    assert found(measured, "passage") == []


def test_examples_from_the_evaluated_split_are_reported(repetition: Any) -> None:
    rows = [row(number) for number in range(50)]
    (finding,) = found(repetition(rows, num_fewshot=2))
    assert finding.found.startswith("50 of 50 documents are also few-shot examples, because the examples come from")
    assert "fewshot_split" in finding.remedy
    assert found(repetition(rows, num_fewshot=0)) == []


def test_examples_that_are_evaluated_in_other_words_are_reported(repetition: Any) -> None:
    train = [row(number) for number in range(1000, 1030)]
    train[3] |= {"q": "  QUESTION 7 !", "a": "Answer   7."}
    (finding,) = found(repetition([row(number) for number in range(50)], train, num_fewshot=2))
    assert finding.found == "1 of 50 documents are also few-shot examples, such as 'question 7?'"


def test_a_prompt_that_all_documents_share_does_not_repeat(repetition: Any) -> None:
    """In BLiMP, the prompt is empty and only the choices differ."""
    rows = [row(n) | {"a": f"x {n}", "choices": [f"x {n}", f"y {n}"]} for n in range(40)]
    config = {"output_type": "multiple_choice", "doc_to_choice": "{{choices}}", "metric_list": [mean_of("acc")]}
    assert repetition(rows, doc_to_text="", **config).duplicates == 0

"""The probability of the correct choice: its value, the tasks that support it, and guards that use it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
from gate_samples import judge_guard
from hypothesis import given, settings
from hypothesis import strategies as st
from lm_eval_runs import UNWRITTEN, run_lm_eval
from scoring_runs import mean_of, pin, score, write_task
from tiny_models import make_model, words, write_choices, write_jsonl
from transformers import AutoModelForCausalLM, AutoTokenizer

from mergegate.merge_core.errors import InvalidInput
from mergegate.tasks.models.checkpoints.model import Model
from mergegate.tasks.models.checkpoints.model_cache import unload_models
from mergegate.tasks.quality.evaluation import DocumentScore, choose_metrics, pair_documents
from mergegate.tasks.quality.evaluation.results import find_results, read_task
from mergegate.tasks.quality.evaluation.scoring.metrics import (
    AnsweredChoice,
    chance_level,
    choice_from_log,
    probabilities,
)
from mergegate.tasks.quality.gate.evidence import measure_guard
from mergegate.tasks.quality.gate.settings import Guard

LIKELIHOODS = st.lists(st.floats(-900, 0), min_size=2, max_size=6)
WAYS = {
    "a position": {}, "a text": {"doc_to_target": "answer"}, "a template": {"doc_to_target": "{{right}}"},
    "a text by template": {"doc_to_target": "{{answer}}"}, "several": {"doc_to_target": "several"},
    "mutual information": {"metric_list": [mean_of("acc"), mean_of("acc_mutual_info")]},
}  # fmt: skip
OTHERS = {
    "own function": {"process_results": "!function own.judged"},
    "choices in the question": {"doc_to_text": "right", "doc_to_choice": "asks", "doc_to_target": "end"},
}
Outcomes: TypeAlias = dict[str, tuple[DocumentScore, ...]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return make_model(tmp_path_factory.mktemp("models") / "one", seed=3)


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Write one multiple-choice task of three choices for each way to specify the correct one."""
    folder = tmp_path_factory.mktemp("tasks")
    rows: list[dict[str, Any]] = []
    for position, word in enumerate(words(30)):
        choices = ["abc", "b", "cd"] if position % 2 else ["d", "ab", "e"]
        right = (position * 7) % 3
        row = {"word": word, "right": right, "choices": choices, "answer": choices[right]}
        several = sorted({right, (right + 1) % 3})
        rows.append(row | {"several": several, "asks": [f"{word}{choice}" for choice in choices], "end": "a"})
    write_choices(folder, 1, name="base")
    write_jsonl(folder / "data" / "base.jsonl", rows)
    (folder / "own.py").write_text("def judged(doc, results):\n    return {'acc': 1.0 if doc['right'] else 0.0}\n")
    return {
        name: write_task(folder, name.replace(" ", "_"), include="base.yaml", **changes)
        for name, changes in (WAYS | OTHERS).items()
    }


@pytest.fixture(scope="module")
def outcomes(model: Model, tasks: dict[str, Path]) -> Iterator[Outcomes]:
    yield {name: score(model, pin(definition)) for name, definition in tasks.items()}
    unload_models()


@cache
def by_hand(model: Model, definition: Path) -> list[list[float]]:
    """Return the log-likelihood of every choice of every document, computed token by token without lm-eval."""
    network = AutoModelForCausalLM.from_pretrained(model.directory)
    tokenizer = AutoTokenizer.from_pretrained(model.directory)
    rows = [json.loads(line) for line in (definition.parent / "data" / "base.jsonl").read_text().splitlines()]
    found = []
    for row in rows:
        of_choices = []
        for choice in row["choices"]:
            ids = torch.tensor([tokenizer(row["word"] + choice)["input_ids"]])
            with torch.no_grad():
                logs = network(input_ids=ids).logits.double().log_softmax(-1)[0]
            last = range(ids.shape[1] - len(choice), ids.shape[1])  # one token per letter
            of_choices.append(sum(float(logs[at - 1, ids[0, at]]) for at in last))
        found.append(of_choices)
    return found


def right_shares(likelihoods: list[list[float]], *, several: bool) -> list[float]:
    """Return the share of the right choice of each document, or of the right one and the next one."""
    shares = []
    for position, of_choices in enumerate(likelihoods):
        weights = [math.exp(one) for one in of_choices]
        right = {(position * 7 + more) % 3 for more in range(1 + several)}
        shares.append(sum(weights[one] for one in right) / sum(weights))
    return shares


@pytest.mark.parametrize("way", WAYS)
def test_probability_is_the_share_of_the_right_choices(
    way: str, model: Model, tasks: dict[str, Path], outcomes: Outcomes
) -> None:
    found = {row.doc_id: row.outcome for row in outcomes[way] if row.metric == "prob,none"}
    expected = right_shares(by_hand(model, tasks["a position"]), several=way == "several")
    assert [found[position] for position in range(30)] == pytest.approx(expected, rel=1e-3)
    assert len(found) == 30


def test_choices_within_the_question_have_a_probability(outcomes: Outcomes) -> None:
    rows = outcomes["choices in the question"]
    assert sum(row.metric == "prob,none" for row in rows) == 30


def test_parts_give_what_the_whole_gives_but_for_how_batches_are_rounded(
    model: Model, tasks: dict[str, Path], outcomes: Outcomes
) -> None:
    rows = [row for part in ((0, 7), (7, 30)) for row in score(model, pin(tasks["a text"]), part)]
    found, whole = (
        {row.doc_id: row.outcome for row in each if row.metric == "prob,none"} for each in (rows, outcomes["a text"])
    )
    assert found == pytest.approx(whole, abs=1e-5)


@pytest.mark.parametrize("metric", ["prob", {"own_function": "prob"}])
def test_a_task_with_its_own_scoring_has_no_probability_metric(
    outcomes: Outcomes, metric: str | dict[str, str]
) -> None:
    rows = outcomes["own function"]
    assert {row.metric for row in rows} == {"acc,none"}
    with pytest.raises(InvalidInput, match=r"'prob'.* which (the task )?does not have(.|\n)*only choice tasks"):
        choose_metrics(rows, metric, "own_function")


@pytest.mark.parametrize(
    ("metric", "label"), [(None, "acc,none"), ("prob", "prob,none"), ({"a*": "prob,none"}, "prob,none")]
)
def test_probability_is_never_the_default_metric(outcomes: Outcomes, metric: Any, label: str) -> None:
    assert choose_metrics(outcomes["a text"], metric, "t").label == label


@pytest.mark.story
def test_results_that_lm_eval_wrote_give_the_same(
    tmp_path: Path, model: Model, tasks: dict[str, Path], outcomes: Outcomes
) -> None:
    run_lm_eval(tmp_path / "out", model.directory, [tasks[name] for name in WAYS], tmp_path / "scratch")
    for name in WAYS:
        theirs = read_task(find_results(tmp_path / "out"), tasks[name].stem).outcomes
        ours, whole = (sorted(row._replace(**UNWRITTEN) for row in rows) for rows in (outcomes[name], theirs))
        assert [row._replace(outcome=0.0) for row in whole] == [row._replace(outcome=0.0) for row in ours], name
        # The tolerance covers the last digits that a different batch size changes.
        assert [row.outcome for row in whole] == pytest.approx([row.outcome for row in ours], rel=1e-4, abs=1e-9), name
        assert sum(row.metric == "prob,none" for row in theirs) == 30


def test_a_guard_judges_probabilities_as_graded_scores(outcomes: Outcomes) -> None:
    rows = outcomes["a position"]
    worse = [row._replace(outcome=row.outcome * 0.5) for row in rows]
    metrics = choose_metrics(rows, "prob", "a_position")
    paired = pair_documents(metrics.judge(rows, "r"), metrics.judge(worse, "m"), metrics.label, "w")
    guard = Guard(task="a_position", guarded_by="base", metric="prob")
    assert not measure_guard(guard, metrics.label, paired, metrics.higher_is_better).binary
    verdict = judge_guard(guard, metrics.label, paired, metrics.higher_is_better, 0.95)
    mean = sum(row.outcome for row in rows if row.metric == "prob,none") / 30
    assert verdict.drop == pytest.approx(100 * mean / 2)
    assert verdict.metric == "prob,none"


@settings(max_examples=40)
@given(LIKELIHOODS, st.data())
def test_it_lies_between_0_and_1_and_sums_to_1_over_the_choices(likelihoods: list[float], data: st.DataObject) -> None:
    parts = [AnsweredChoice(tuple(likelihoods), frozenset({one})).probability for one in range(len(likelihoods))]
    assert all(part is not None and 0 <= part <= 1 for part in parts)
    assert math.fsum(part or 0 for part in parts) == pytest.approx(1)
    # All choices are less likely by the same amount.
    shifted = tuple(one - data.draw(st.just(37.5)) for one in likelihoods)
    for one, part in enumerate(parts):
        assert AnsweredChoice(shifted, frozenset({one})).probability == pytest.approx(part, abs=1e-9)


@pytest.mark.parametrize(
    ("likelihoods", "right", "probability"),
    [
        ((math.nan, -1.0), {0}, None),
        ((-math.inf, -math.inf), {0}, None),
        ((-math.inf, -1.0), {0}, 0.0),
        ((-2.0, -1.0), set(), 0.0),
    ],
)
def test_nan_likelihoods_and_unknown_labels_have_no_probability(
    likelihoods: tuple[float, ...], right: set[int], probability: float | None
) -> None:
    assert AnsweredChoice(likelihoods, frozenset(right)).probability == probability


def test_a_contradicting_acc_removes_the_probability() -> None:
    answer = AnsweredChoice((-2.0, -1.0), frozenset({1}))
    assert probabilities([1.0, 1.0], [answer, answer]) == pytest.approx([1 / (1 + math.exp(-1))] * 2)
    assert probabilities([1.0, 0.0], [answer, answer]) is None
    assert probabilities([1.0, 1.0], [answer, None]) is None


@pytest.mark.parametrize(
    ("config", "target", "right"),
    [
        ({"doc_to_target": "{{n}}"}, "1", {1}),  # lm-eval treats rendered digits as an index
        ({"doc_to_target": "n"}, "1", {0}),  # a field with the text '1' is matched against the choices
        ({"doc_to_target": "def right(doc): ..."}, "1", None),  # could be either
        ({"doc_to_target": "def right(doc): ..."}, "2", {2}),
        ({"doc_to_target": 0}, "0", {0}),
        ({"doc_to_target": "{{n}}"}, "[0, 2]", {0, 2}),
        ({"doc_to_target": "{{n}}"}, "9", set()),
    ],
)
def test_a_logged_target_is_interpreted_like_lm_eval_or_not_at_all(
    config: dict[str, Any], target: str, right: set[int] | None
) -> None:
    sample = {
        "doc": {"n": "1"},
        "target": target,
        "arguments": {f"gen_args_{i}": {"arg_0": "?", "arg_1": f" {text}"} for i, text in enumerate(("1", "x", "y"))},
        "filtered_resps": [["-1.0", "True"], ["-2.0", "False"], ["-3.0", "False"]],
    }
    answer = choice_from_log({"output_type": "multiple_choice", **config}, sample)
    assert (answer and set(answer.right)) == right


def test_the_chance_level_is_the_share_of_right_choices() -> None:
    four_requests = {"arguments": [("question", letter) for letter in "abcd"]}
    assert chance_level("multiple_choice", four_requests, (5, 2)) == 0.4
    assert chance_level("multiple_choice", four_requests, (5, 0)) == 0  # The label is not among the choices.
    assert chance_level("multiple_choice", four_requests, None) == 0.25  # The task scores with its own function.
    assert chance_level("multiple_choice", {}, None) == 0
    assert chance_level("generate_until", four_requests, None) == 0

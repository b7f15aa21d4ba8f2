"""One rule selects the metric that judges each task of a group, tested on groups of all kinds."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeAlias

import pytest
from gate_samples import GUARD, part
from hypothesis import given
from hypothesis import strategies as st

from mergegate.merge_core.errors import InvalidInput
from mergegate.tasks.quality.evaluation.scoring.document_scores import DocumentScore, pair_documents
from mergegate.tasks.quality.evaluation.scoring.metrics import (
    check_all_scored,
    checked_score,
    choose_known_metrics,
    choose_metrics,
    default_metric,
    metrics_by_leaf,
)
from mergegate.tasks.quality.evaluation.scoring.scores import score_table
from mergegate.tasks.quality.gate.evidence import GatePlan
from mergegate.tasks.quality.gate.settings import GateRule, Guard
from mergegate.tasks.quality.gate.stage import gate

METRICS = ("acc,none", "acc_norm,none", "exact_match,strict-match", "exact_match,flexible-extract", "ter,none")
Sides: TypeAlias = tuple[list[DocumentScore], list[DocumentScore]]


def row(leaf: str, metric: str, doc: int, score: float, higher: bool = True) -> DocumentScore:
    return DocumentScore(leaf, metric, doc, f"d{doc}", f"p{doc}", f"t{doc}", score, higher_is_better=higher)


@st.composite
def groups(draw: st.DrawFn) -> Sides:
    """Draw the scores of two models on one to five leaf tasks with one to six documents each."""
    sides: Sides = ([], [])
    for leaf in draw(st.lists(st.sampled_from("abcdefg"), min_size=1, max_size=5, unique=True)):
        metrics = draw(st.lists(st.sampled_from(METRICS), min_size=1, max_size=4, unique=True))
        directions = {metric: draw(st.booleans()) for metric in metrics}
        for doc in range(draw(st.integers(1, 6))):
            for metric in metrics:
                for side in sides:
                    score = draw(st.sampled_from([0.0, 0.25, 1.0]))
                    side.append(row(leaf, metric, doc, score, directions[metric]))
    return sides


@pytest.mark.story
@given(groups())
def test_every_document_counts_once_under_the_metric_of_its_leaf(sides: Sides) -> None:
    """The reference handles one document at a time and does not use groups."""
    theirs, ours = sides
    metrics = choose_metrics(theirs, None, "g")
    paired = pair_documents(metrics.judge(theirs, "g"), metrics.judge(ours, "g"), metrics.label, "g")
    assert sorted(paired.documents) == sorted({(one.task, one.doc_id) for one in theirs})
    sign = 1 if metrics.higher_is_better else -1
    for (leaf, doc), reference, merge in zip(paired.documents, paired.reference, paired.merge, strict=True):
        of_leaf = [one.metric for one in theirs if one.task == leaf and one.doc_id == doc]
        chosen = default_metric(of_leaf)
        before, after = (
            next(one for one in side if (one.task, one.doc_id, one.metric) == (leaf, doc, chosen)) for side in sides
        )
        worse_by = before.outcome - after.outcome if before.higher_is_better else after.outcome - before.outcome
        assert sign * (reference - merge) == pytest.approx(worse_by)


@pytest.mark.story
@given(groups(), st.sampled_from(METRICS))
def test_one_metric_name_applies_to_all_leaves_that_have_it(sides: Sides, wanted: str) -> None:
    rows, known = sides[0], metrics_by_leaf(sides[0])
    if not any(wanted in metrics for metrics in known.values()):
        with pytest.raises(InvalidInput, match="which the task does not have"):
            choose_metrics(rows, wanted, "g")
        return
    chosen = {leaf: name for leaf, (name, _) in choose_metrics(rows, wanted, "g").by_leaf.items()}
    assert chosen == {
        leaf: wanted if wanted in metrics else default_metric(tuple(metrics)) for leaf, metrics in known.items()
    }


@pytest.mark.story
@given(groups(), st.data())
def test_an_error_names_the_document_without_a_score(sides: Sides, data: st.DataObject) -> None:
    rows = sides[0]
    metrics = choose_metrics(rows, None, "g")
    judged = [one for one in rows if metrics.by_leaf[one.task][0] == one.metric]
    lost = data.draw(st.sampled_from(judged))
    rest = [one for one in rows if one is not lost]
    with pytest.raises(InvalidInput, match=f"documents of {lost.task} without a score under .*document {lost.doc_id}"):
        check_all_scored(
            "g",
            [(one.task, one.doc_id) for one in rows],
            metrics.select(rest),
            {leaf: name for leaf, (name, _) in metrics.by_leaf.items()},
        )


@pytest.mark.story
@given(groups())
def test_the_table_has_a_line_for_the_whole_group_where_its_metrics_differ(sides: Sides) -> None:
    rows = sides[0]
    metrics = choose_metrics(rows, None, "g")
    table = {score.metric: score for score in score_table("g", rows)}
    every = len({(one.task, one.doc_id) for one in rows})
    assert (metrics.label in table and table[metrics.label].n == every) or not metrics.by_leaf_if_different
    for name in {one.metric for one in rows}:
        assert table[name].n == sum(one.metric == name for one in rows)


MIXED = [
    row("bbh", "acc_norm,none", 0, 1.0),
    row("math_a", "exact_match,none", 0, 1.0),
    row("math_b", "x,none", 0, 0.0),
]


def test_names_in_a_mapping_precede_patterns() -> None:
    rows = [*MIXED, row("math_a", "x,none", 0, 0.0)]
    chosen = choose_metrics(rows, {"math_*": "x,none", "math_a": "exact_match,none"}, "g")
    assert chosen.by_leaf_if_different == {"bbh": "acc_norm,none", "math_a": "exact_match,none", "math_b": "x,none"}
    assert chosen.label == "acc_norm,none + exact_match,none + x,none"


@pytest.mark.parametrize(
    ("setting", "complaint"),
    [
        ("acc,none", "'acc,none', which the task does not have(.|\n)*acc_norm,none or exact_match,none"),
        ({"math_a": "acc,none"}, "'acc,none' for math_a, which does not have it(.|\n)*expected: exact_match,none"),
        ({"mth_*": "acc,none"}, "'mth_\\*', which matches none of its tasks"),
    ],
)
def test_a_metric_that_a_leaf_does_not_have_is_refused(setting: str | dict[str, str], complaint: str) -> None:
    with pytest.raises(InvalidInput, match=complaint):
        choose_metrics(MIXED, setting, "g")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_score_that_is_no_number_is_refused_with_its_document(value: float) -> None:
    with pytest.raises(InvalidInput, match="acc,none of document 7 is"):
        checked_score("merge: task bbh", "acc,none", 7, value)


def test_the_gate_judges_a_group_of_several_metrics_on_all_of_its_documents(tmp_path: Path) -> None:
    """The gate sees all documents of all leaves, including a loss in a leaf with another metric."""
    leaves = {"bbh": "acc_norm,none", "gpqa": "acc,none", "math": "exact_match,none"}

    def scores(right: dict[str, int]) -> list[DocumentScore]:
        return [
            row(leaf, metric, doc, float(doc < right[leaf])) for leaf, metric in leaves.items() for doc in range(200)
        ]

    parent = part(tmp_path / "parent", scores({"bbh": 150, "gpqa": 150, "math": 150}))
    merge = part(tmp_path / "merge", scores({"bbh": 150, "gpqa": 150, "math": 20}))
    guard = GUARD.model_copy(update={"task": "bbh"})  # the name that ``part`` gives the group's first leaf
    for setting in (None, "acc,none", {"m*": "exact_match,none"}):
        asked = guard.model_copy(update={"metric": setting})
        verdict = gate.work((asked,), {"reverser": [parent], "merge": [merge]}, {}, None, GatePlan(GateRule()))
        (judged,) = verdict.guards
        assert (judged.n, judged.documents_asked, judged.lost, judged.outcome) == (600, 600, 130, "fail")
        assert judged.metric == "acc_norm,none + acc,none + exact_match,none"
        assert judged.leaf_metrics == leaves
    assert Guard(task="g", guarded_by="a", metric={"math_*": "x,none"}).metric == {"math_*": "x,none"}


GSM8K = {"exact_match,strict-match": True, "exact_match,flexible-extract": True}
ARC = {"acc,none": True}


@pytest.mark.parametrize(
    ("known", "setting", "chosen"),
    [
        # A name without a filter means the only label that begins with it.
        ({"arc": {**ARC, "acc_norm,none": True}}, "acc_norm", {"arc": "acc_norm,none"}),
        ({"arc": {**ARC, "acc_norm,none": True}}, {"arc": "acc_norm"}, {"arc": "acc_norm,none"}),
        # A leaf without the metric keeps its own.
        ({"gsm8k": GSM8K, "arc": ARC}, "acc", {"gsm8k": "exact_match,flexible-extract", "arc": "acc,none"}),
    ],
)
def test_a_metric_is_chosen_before_anything_is_scored(known: Any, setting: Any, chosen: dict[str, str]) -> None:
    metrics = choose_known_metrics(known, setting, "t")
    assert {leaf: name for leaf, (name, _) in metrics.by_leaf.items()} == chosen
    assert metrics.by_leaf_if_different == (chosen if len(chosen) > 1 else {})


@pytest.mark.parametrize(
    ("known", "setting", "found", "expected"),
    [
        (
            {"gsm8k": GSM8K},
            "exact_match",
            "which is ambiguous",
            "exact_match,strict-match or exact_match,flexible-extract",
        ),
        ({"gsm8k": GSM8K, "arc": ARC}, "f1", "which the task does not have", "acc,none"),
    ],
)
def test_an_ambiguous_or_unknown_metric_is_refused_with_the_available_ones(
    known: Any, setting: str, found: str, expected: str
) -> None:
    with pytest.raises(InvalidInput, match=found) as refused:
        choose_known_metrics(known, setting, "t")
    assert expected in refused.value.expected

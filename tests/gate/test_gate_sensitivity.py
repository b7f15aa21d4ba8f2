"""A guard decides only if its reference could have shown a loss: it beats chance, and its prompts are complete."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import pytest
from benchmark_scripts import script_fixture
from gate_samples import pair

from mergegate.tasks.quality.evaluation.scoring.document_scores import DocumentScore
from mergegate.tasks.quality.gate import Guard, GuardVerdict, undecided_tasks
from mergegate.tasks.quality.gate.evidence import measure_guard
from mergegate.tasks.quality.gate.regression import judge_guards
from mergegate.tasks.quality.gate.stage import gate_verdict

GUARD = Guard(task="quiz", guarded_by="base")


def rows(right: list[bool], targets: list[int], chance: float) -> list[DocumentScore]:
    return [
        DocumentScore("quiz", "acc,none", i, f"d{i}", f"p{i}", f"t{target}", float(score), chance=chance)
        for i, (score, target) in enumerate(zip(right, targets, strict=True))
    ]


def judge(
    reference: list[DocumentScore],
    merge: list[DocumentScore],
    guard: Guard = GUARD,
    schedule: tuple[int, ...] = (),
    higher_is_better: bool = True,
) -> GuardVerdict:
    evidence = measure_guard(guard, "acc,none", pair(reference, merge), higher_is_better, schedule=schedule)
    return judge_guards([evidence], 0.95)[0]


def answers(share_right: float, n: int, chance: float, seed: int = 0) -> list[DocumentScore]:
    rng = np.random.default_rng(seed)
    choices = round(1 / chance) if chance else n
    right = np.arange(n) < round(share_right * n)
    return rows(list(rng.permutation(right)), [i % choices for i in range(n)], chance)


@pytest.mark.parametrize(
    ("share", "chance", "outcome"),
    [
        *((0.25, 0.25, "inconclusive"), (0.29, 0.25, "inconclusive"), (0.40, 0.25, "pass")),
        *((0.40, 0.50, "inconclusive"), (0.0, 0.0, "inconclusive"), (0.035, 0.0, "inconclusive"), (0.1, 0.0, "pass")),
    ],
)
def test_a_guard_passes_only_if_its_reference_beats_chance_by_the_margin(
    share: float, chance: float, outcome: str
) -> None:
    reference = answers(share, 1000, chance)
    verdict = judge(reference, reference)
    assert verdict.outcome == outcome
    if outcome != "pass":
        begin, end = "quiz cannot show a loss, because base scores", "Use a task that base can do, or check its prompt"
        assert verdict.reason.startswith(f"Not shown to be safe: {begin} {100 * share:.1f}")
        assert verdict.reason.endswith(f"at least the margin (3). {end} and chat template")


def test_the_most_frequent_answer_counts_as_chance() -> None:
    # Two choices, and 'yes' is right for 62 %. A model that always answers 'yes' beats 1 / choices by 12 points.
    targets = [0] * 620 + [1] * 380
    always_yes = rows([target == 0 for target in targets], targets, 0.5)
    verdict = judge(always_yes, always_yes)
    assert verdict.outcome == "inconclusive"
    assert "base scores 62.0, and the most frequent answer alone would score 62.0" in verdict.reason


def test_a_shown_failure_stays_a_failure() -> None:
    reference, merge = answers(0.26, 1000, 0.25), answers(0.0, 1000, 0.25)
    assert judge(reference, merge).outcome == "fail"


def test_a_score_that_is_better_if_lower_is_compared_with_the_highest() -> None:
    reference = [row._replace(outcome=1.0, higher_is_better=False) for row in answers(0.5, 500, 0.0)]
    assert judge(reference, reference, higher_is_better=False).outcome == "inconclusive"
    reference = [row._replace(outcome=0.0) for row in reference]
    assert judge(reference, reference, higher_is_better=False).outcome == "pass"


def test_graded_scores_are_compared_with_the_lowest_score_of_their_range() -> None:
    guard = Guard(task="quiz", guarded_by="base", score_range=(1, 10))
    for mark, outcome in ((1.0, "inconclusive"), (5.0, "pass")):
        reference = [row._replace(outcome=mark + 0.01 * (row.doc_id % 3)) for row in answers(0.5, 500, 0.0)]
        assert judge(reference, reference, guard).outcome == outcome


def test_a_group_is_judged_as_a_whole_and_names_its_tasks_at_chance() -> None:
    easy = answers(0.9, 500, 0.25)
    hard = [
        row._replace(task="hard", doc_id=row.doc_id + 500, prompt_hash=f"h{row.doc_id}")
        for row in answers(0.25, 100, 0.25)
    ]
    verdict = judge([*easy, *hard], [*easy, *hard])
    assert verdict.outcome == "pass"
    assert [finding.reason for finding in verdict.findings if finding.kind == "reference"] == [
        "quiz: base is not shown to be above chance on hard, so a loss on this task would not show"
    ]


def test_more_documents_are_evaluated_only_if_they_may_show_a_better_reference() -> None:
    for share, expected in ((0.32, ("quiz",)), (0.25, ())):
        reference = answers(share, 500, 0.25)
        verdict = judge(reference, reference, schedule=(500, 1000, 2000))
        assert verdict.outcome == "inconclusive"
        assert undecided_tasks(gate_verdict([verdict], None, "block")) == expected


@pytest.mark.parametrize(("cut", "outcome"), [(0, "pass"), (4, "pass"), (5, "inconclusive")])
def test_truncated_prompts_make_a_guard_inconclusive(cut: int, outcome: str) -> None:
    reference = answers(0.9, 400, 0.0)
    merge = [row._replace(prompt_cut=12 * (row.doc_id < cut)) for row in reference]
    for sides in ((reference, merge), (merge, reference)):
        verdict = judge(*sides)
        assert verdict.outcome == outcome
        if outcome != "pass":
            assert "truncated 5 of 400 prompts for" in verdict.reason
            assert "The longest prompt is 12 tokens too long. Increase evaluate.max_length" in verdict.reason


def test_guards_that_cannot_detect_their_limit_do_not_carry_a_release() -> None:
    small = judge(answers(1.0, 24, 0.0), answers(1.0, 24, 0.0), Guard(task="quiz", guarded_by="base", margin=11))
    assert small.outcome == "pass"
    assert [finding.kind for finding in small.findings] == ["power"]
    alone = gate_verdict([small, small], None, "block")
    assert (alone.outcome, alone.publishable) == ("inconclusive", False)
    assert alone.reasons[0].startswith("Not shown to be safe: too few documents to detect the loss of a skill")
    large = judge(answers(0.9, 500, 0.0), answers(0.9, 500, 0.0))
    assert gate_verdict([small, large], None, "block").outcome == "pass"


def test_the_real_case_of_24_documents_is_not_published() -> None:
    reference, merge = answers(2 / 24, 24, 0.0), answers(0.0, 24, 0.0)
    verdict = judge(reference, merge, Guard(task="quiz", guarded_by="base", max_drop=20, margin=30))
    assert verdict.outcome == "inconclusive"
    assert not gate_verdict([verdict], None, "block").publishable


# --- Rates, simulated with the gate's own functions


script = script_fixture("gate_sensitivity")


@pytest.mark.parametrize("skill", [0, 2, 3, 4, 6])
@pytest.mark.parametrize("quiz", [0, 1, 2, 3])
def test_a_merge_that_knows_nothing_is_published_in_at_most_5_percent(
    script: ModuleType, quiz: int, skill: float
) -> None:
    samples = script.ignorant(script.QUIZZES[quiz], skill, 500, 4000, np.random.default_rng(skill))
    before, after = samples.published()
    assert after.mean() <= 0.05
    assert skill or before.mean() > 0.9  # By the interval alone, it is published if the reference knows nothing either.


def test_an_equal_merge_is_published_as_often_as_before_if_its_reference_is_above_chance(script: ModuleType) -> None:
    before, after = script.equal(20, 0.05, 500, 4000, np.random.default_rng(0)).published()
    assert before.mean() > 0.85
    assert (before == after).all()


@pytest.mark.story
@pytest.mark.parametrize("skill", [4, 6, 10, 20])
def test_the_simulation_decides_like_the_gate(script: ModuleType, skill: float) -> None:
    rng = np.random.default_rng(skill)
    for samples in (
        script.equal(skill, 0.05, 500, 12, rng),
        script.ignorant(script.QUIZZES[2], skill / 2, 500, 12, rng),
    ):
        _, after = samples.published()
        for at in range(12):
            counts = (samples.right, samples.lost, samples.won, samples.frequent)
            right, lost, won, frequent = (int(each[at]) for each in counts)
            targets = [0] * frequent + [1 + i % 9 for i in range(500 - frequent)]
            reference = [True] * right + [False] * (500 - right)
            merge = [False] * lost + [True] * (right - lost + won) + [False] * (500 - right - won)
            verdict = judge(rows(reference, targets, samples.chance), rows(merge, targets, samples.chance))
            assert gate_verdict([verdict], None, "block").publishable == after[at]


def test_a_weak_reference_is_described_in_the_terms_of_the_task() -> None:
    """A score of 0.99 is an error rate of 99 %, which is nearly that of an empty transcript."""
    wrong = [row._replace(metric="wer,none", outcome=0.99, higher_is_better=False) for row in answers(0.0, 200, 0.0)]
    transcription = {"kind": "transcription", "data": "calls.jsonl"}
    guard = Guard(task=transcription, guarded_by="base")
    verdict = judge(wrong, wrong, guard, higher_is_better=False)
    recorded = guard.model_copy(update={"built_in": None})  # as in the evidence of a release
    assert judge(wrong, wrong, recorded, higher_is_better=False).reason == verdict.reason
    assert "base has an error rate of 99.0, and an empty transcript would have 100.0" in verdict.reason
    assert "chat template" not in verdict.reason

    unranked = [row._replace(metric="ndcg@10,none", outcome=0.1) for row in answers(0.0, 200, 0.1)]
    retrieval = {"kind": "retrieval", "data": "queries.jsonl"}
    verdict = judge(unranked, unranked, Guard(task=retrieval, guarded_by="base"))
    assert "base scores 10.0, and a random answer would score 10.0" in verdict.reason
    assert verdict.reason.endswith("Use a task that base can do")

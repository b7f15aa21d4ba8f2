"""Cut-off answers count for and against the merge, and a guard decides only if both cases agree."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from benchmark_scripts import script_fixture
from gate_samples import gate_scores, outcome, pair, part
from hypothesis import given, settings
from hypothesis import strategies as st
from samples import sampled

from mergegate.tasks.quality.evaluation.scoring.document_scores import DocumentScore
from mergegate.tasks.quality.gate import (
    BEST_PARENT,
    GateRule,
    Guard,
    GuardVerdict,
    tasks_with_short_answers,
    undecided_tasks,
)
from mergegate.tasks.quality.gate.evidence import GuardEvidence, measure_guard
from mergegate.tasks.quality.gate.regression import judge_guards
from mergegate.tasks.quality.gate.stage import gate_verdict
from mergegate.tasks.quality.gate.suite import judge_suite

GUARD = Guard(task="reverse", guarded_by="thinker")
Answer = tuple[float, str, int, tuple[int, ...]]  # score, end, tokens, budgets
RIGHT: Answer = (1.0, "eos", 20, (40,))
WRONG: Answer = (0.0, "eos", 20, (40,))
CUT: Answer = (0.0, "length", 40, (40,))
RIGHT_BUT_CUT: Answer = (1.0, "length", 40, (40,))
ENDLESS: Answer = (0.0, "length", 320, (40, 80, 160, 320))


def row(doc: int, answer: Answer, *, higher_is_better: bool = True) -> DocumentScore:
    score, end, tokens, budgets = answer
    answered = {"ended": (end,), "answer_tokens": (tokens,), "budgets": budgets, "higher_is_better": higher_is_better}
    return outcome(doc, score)._replace(metric="exact_match,none", **answered)


def evidence(
    pairs: Sequence[Sequence[Answer]],
    guard: Guard = GUARD,
    *,
    higher_is_better: bool = True,
    schedule: Sequence[int] = (),
    **fields: object,
) -> GuardEvidence:
    """Return the evidence of (reference, merge) answers."""
    rows = (
        [row(doc, answer, higher_is_better=higher_is_better) for doc, answer in enumerate(answers)]
        for answers in zip(*pairs, strict=True)
    )
    measured = measure_guard(guard, "exact_match,none", pair(*rows), higher_is_better, schedule=schedule)
    for name, value in fields.items():
        object.__setattr__(measured, name, value)
    return measured


def judge(*guard_evidence: GuardEvidence, as_suite: bool = False) -> GuardVerdict:
    return judge_guards(guard_evidence, 0.95, as_suite=as_suite)[0]


# The example: a wordy reference and a merge of two other skills, with a budget of 40 tokens.
WORDY = [(CUT, RIGHT)] * 10 + [(CUT, WRONG)] * 87 + [(RIGHT, RIGHT)] * 301 + [(RIGHT, WRONG)] * 2


def test_a_merge_that_wins_by_the_token_budget_alone_is_not_decided() -> None:
    verdict = judge(evidence(WORDY))
    assert verdict.drop == pytest.approx(-2.0)
    assert (verdict.outcome, [finding.kind for finding in verdict.findings]) == ("inconclusive", ["cut-off answers"])
    assert verdict.reason == (
        "Not shown to be safe: reverse: 24.2 % of the answers of thinker and 0.0 % of those of the merge were cut off "
        "at 40 tokens. Depending on how they are counted, the drop is between -2.0 and 22.2 points; the margin is 3. "
        "Longer answers would decide"
    )


def test_the_same_scores_pass_if_no_answer_was_cut_off() -> None:
    ended = [tuple(WRONG if answer is CUT else answer for answer in pair) for pair in WORDY]
    verdict = judge(evidence(ended))
    assert (verdict.outcome, verdict.cut_answers, verdict.findings) == ("pass", None, ())


def test_complete_answers_of_the_reference_show_the_drop() -> None:
    complete = [((1.0, "eos", 60, (40, 80)) if left is CUT else left, right) for left, right in WORDY]
    verdict = judge(evidence(complete))
    assert (verdict.outcome, round(verdict.drop, 1)) == ("fail", 22.2)


def test_cut_off_answers_that_cannot_change_the_outcome_do_not_matter() -> None:
    verdict = judge(evidence([(RIGHT, WRONG)] * 100 + [(RIGHT, CUT)] * 2 + [(RIGHT, RIGHT)] * 298))
    assert (verdict.outcome, verdict.findings) == ("fail", ())
    assert not verdict.cut_answers.decide


def test_a_failure_that_cut_off_answers_may_explain_is_not_decided() -> None:
    verdict = judge(evidence([(RIGHT, CUT)] * 60 + [(RIGHT, RIGHT)] * 340))
    assert verdict.low > verdict.max_drop
    assert verdict.outcome == "inconclusive"
    # An answer that is right although it was cut off may become wrong.
    verdict = judge(evidence([(RIGHT, RIGHT_BUT_CUT)] * 100 + [(RIGHT, RIGHT)] * 300))
    assert (verdict.drop, verdict.outcome) == (0.0, "inconclusive")


@pytest.mark.parametrize(
    "answer", [ENDLESS, (0.0, "context", 90, (40, 80)), (0.0, "context", 20, (40,))], ids=["budget", "context", "early"]
)
def test_an_answer_that_never_ends_counts_as_measured(answer: Answer) -> None:
    verdict = judge(evidence([(RIGHT, answer)] * 60 + [(RIGHT, RIGHT)] * 340))
    assert (verdict.outcome, verdict.cut_answers) == ("fail", None)
    assert (verdict.answers.merge.endless, verdict.answers.merge.cut_off, verdict.answers.extensible) == (60, 0, 0)


def test_a_small_limit_does_not_make_answers_endless() -> None:
    limited = evidence(WORDY, answer_limit=40)
    verdict = judge(limited)
    assert verdict.outcome == "inconclusive"
    assert verdict.reason.endswith("evaluate.max_answer_tokens above 40 would decide")
    assert tasks_with_short_answers(gate_verdict([verdict], None, "block")) == ()


def test_scores_for_which_lower_is_better_are_counted_the_other_way_round() -> None:
    flipped = [tuple((1.0 - answer[0], *answer[1:]) for answer in pair) for pair in WORDY]
    verdict = judge(evidence(flipped, higher_is_better=False))
    plain = judge(evidence(WORDY))
    assert verdict.cut_answers == plain.cut_answers
    assert verdict.outcome == "inconclusive"


def test_graded_scores_are_counted_as_the_ends_of_their_range() -> None:
    guard = Guard(task="reverse", guarded_by="thinker", score_range=(1, 10))
    pairs = [((7.0, "length", 40, (40,)), (7.0, "eos", 9, (40,)))] * 50 + [((7.0, "eos", 9, (40,)),) * 2] * 50
    verdict = judge(evidence(pairs, guard))
    assert verdict.cut_answers.lowest_drop == pytest.approx(-100 * 0.5 * 6 / 9)
    assert verdict.cut_answers.highest_drop == pytest.approx(100 * 0.5 * 3 / 9)


answers = st.sampled_from([RIGHT, WRONG, CUT, ENDLESS, RIGHT_BUT_CUT, (1.0, "context", 40, (40,))])


@pytest.mark.story
@settings(max_examples=60, deadline=None)
@given(
    pairs=st.lists(st.tuples(answers, answers), min_size=4, max_size=60),
    completed=st.lists(st.booleans(), min_size=120, max_size=120),
    as_suite=st.booleans(),
)
def test_a_decision_holds_however_the_cut_off_answers_end(
    pairs: list[tuple[Answer, Answer]], completed: list[bool], as_suite: bool
) -> None:
    """Whatever longer answers turn out to be, they confirm a verdict that passed or failed."""
    repeated = pairs * 8
    guard = GUARD.model_copy(update={"max_drop": 10.0, "margin": 20.0, "limit": 30.0})
    verdict = judge(evidence(repeated, guard), as_suite=as_suite)
    ends = iter(completed * 16)
    longer = [
        tuple(
            (float(next(ends)), "eos", 70, (40, 80)) if answer[1] == "length" and answer is not ENDLESS else answer
            for answer in pair
        )
        for pair in repeated
    ]
    later = judge(evidence(longer, guard), as_suite=as_suite)
    assert later.cut_answers is None
    # Other checks may become more or less severe with longer answers.
    by_interval = all(
        finding.outcome == "pass" or finding.kind == "cut-off answers"
        for each in (verdict, later)
        for finding in each.findings
    )
    if by_interval and verdict.outcome != "inconclusive":
        assert later.outcome == verdict.outcome


def test_the_mean_of_a_suite_is_decided_in_the_same_way() -> None:
    other = evidence([(RIGHT, RIGHT)] * 400, GUARD.model_copy(update={"task": "copy"}))
    suite = judge_suite([evidence(WORDY), other], 0.95)
    assert suite.outcome == "inconclusive"
    assert "Depending on how they are counted, the drop is between -1.0 and 11.1 points" in suite.reason
    guards = judge_guards([evidence(WORDY), other], 0.95, as_suite=True)
    verdict = gate_verdict(guards, None, "block", suites=[suite])
    assert tasks_with_short_answers(verdict) == ("reverse",)


@pytest.mark.parametrize("limit", [None, 40])
def test_a_short_budget_does_not_hide_the_best_parent(tmp_path: Path, limit: int | None) -> None:
    """``other`` scores higher than ``thinker``, whose complete answers may be better."""
    merge = [RIGHT if doc % 5 else WRONG for doc in range(400)]
    models = {"other": merge, "thinker": [RIGHT if doc % 4 else CUT for doc in range(400)], "merge": merge}
    scores = {
        name: [part(tmp_path / name, [row(doc, answer) for doc, answer in enumerate(answers)])]
        for name, answers in models.items()
    }
    best = GUARD.model_copy(update={"guarded_by": BEST_PARENT})
    (guard,) = gate_scores(scores, best, rule=GateRule(max_answer_tokens=limit)).guards
    assert (guard.reference, guard.outcome) == ("thinker", "inconclusive")
    assert guard.cut_answers.decide


def test_more_documents_are_not_evaluated_while_answers_are_too_short() -> None:
    verdict = judge(evidence(WORDY, schedule=(400, 800), answer_limit=40))
    assert verdict.documents_left == 400
    assert undecided_tasks(gate_verdict([verdict], None, "block")) == ()


def test_a_few_cut_off_answers_do_not_stop_the_evaluation() -> None:
    few = [(CUT, RIGHT)] * 2 + [(RIGHT, CUT)] * 2 + [(RIGHT, WRONG)] * 4 + [(WRONG, RIGHT)] * 4
    verdict = judge(evidence([*few, *[(RIGHT, RIGHT)] * 188], schedule=(200, 400), answer_limit=40))
    assert verdict.outcome == "inconclusive"
    assert undecided_tasks(gate_verdict([verdict], None, "block")) == ("reverse",)


def long(tokens: int) -> Answer:
    return (1.0, "eos", tokens, (4000,))


@pytest.mark.parametrize(
    ("tokens", "limit", "outcome"),
    [
        (lambda doc: 110, 2.0, None),
        (lambda doc: 160, 2.0, "pass"),
        (lambda doc: 210 + doc % 9, 2.0, "fail"),
        (lambda doc: 210 + doc % 9, 3.0, "pass"),
        (lambda doc: 4000 if doc % 40 == 0 else 105, 2.0, "inconclusive"),  # ten documents of 400 explain it
        (lambda doc: 130 + doc % 9, 1.2, "fail"),
    ],
)
def test_answers_that_become_much_longer_fail(tokens: object, limit: float, outcome: str | None) -> None:
    assert callable(tokens)
    pairs = [(long(100), long(tokens(doc))) for doc in range(400)]
    verdict = judge(evidence(pairs, max_length_ratio=limit))
    assert [finding.outcome for finding in verdict.findings] == ([outcome] if outcome else [])
    assert verdict.outcome == (outcome or "pass")


def test_only_documents_that_both_models_answer_completely_count_for_the_length() -> None:
    pairs = [(long(100), long(100))] * 300 + [(long(100), ENDLESS)] * 4 + [(ENDLESS, long(100))] * 4
    verdict = judge(evidence(pairs))
    assert verdict.answers.length_ratio == 1.0


@pytest.mark.parametrize(("endless", "outcome"), [(2, "pass"), (30, "fail")])
def test_many_more_endless_answers_fail_even_if_the_scores_are_equal(endless: int, outcome: str) -> None:
    right_but_endless: Answer = (1.0, "length", 320, (40, 80, 160, 320))
    verdict = judge(evidence([(RIGHT, right_but_endless)] * endless + [(RIGHT, RIGHT)] * (500 - endless)))
    assert (verdict.drop, verdict.outcome) == (0.0, outcome)
    (finding,) = verdict.findings
    assert finding.reason.startswith(f"reverse: 0 of 500 answers of thinker and {endless} of the merge never end")


script = script_fixture("cut_answers")


def drawn(model: Any, factor: int, run: int, doc: int) -> Answer:
    """Return an answer of a simulated model with ``factor`` times its token budget."""
    score = float(model.scores(factor, None)[run, doc])
    is_cut = model.needed[run, doc] > factor
    return (score, "length", 40 * factor, (40, 40 * factor)) if is_cut else (score, "eos", 20, (40,))


@pytest.mark.story
def test_the_script_decides_like_the_gate(script: ModuleType) -> None:
    rng, runs, n = np.random.default_rng(3), 12, 400
    right = rng.random((2, runs, n)) < np.array([0.70, 0.69])[:, None, None]
    right[1] = np.where(rng.random((runs, n)) < 0.95, right[0], right[1])
    models = [script.draw_answers(each, 0.03, rng) for each in right]
    outcomes = set()
    for factor in script.FACTORS:
        cases = [script.passing([models], factor, for_merge) for for_merge in (None, True, False)]
        for run in range(runs):
            pairs = [tuple(drawn(model, factor, run, doc) for model in models) for doc in range(n)]
            verdict = judge(evidence(pairs, script.GUARD, answer_limit=10_000))
            assert (verdict.outcome == "pass") == all(case[run] for case in cases)
            outcomes.add(verdict.outcome)
    assert len(outcomes) > 1


@pytest.mark.parametrize("cut", sampled([(0.3, 0.0), (0.0, 0.3), (0.3, 0.3)], [(0.0, 0.3)]))
def test_a_merge_at_the_margin_is_rarely_published_and_an_equal_merge_as_often_as_ever(
    script: ModuleType, cut: tuple[float, float]
) -> None:
    runs = 600
    worse = script.simulate(1, 1319, 0.03, cut, runs, np.random.default_rng(1))
    assert worse.again <= 0.05 + 3 * (0.05 * 0.95 / runs) ** 0.5
    assert worse.once <= worse.again
    equal = script.simulate(1, 1319, 0.0, cut, runs, np.random.default_rng(2))
    assert equal.again == pytest.approx(equal.complete, abs=0.01)
    assert equal.complete > 0.9

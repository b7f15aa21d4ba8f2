"""A guard pairs documents, its outcome is one of three, and alarms are corrected for the number of guards."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from gate_samples import GUARD, judge_guard, measured, outcome, paired, verdict_of
from samples import sampled
from scipy import stats
from statsmodels.stats.multitest import multipletests

from mergegate.merge_core.errors import InvalidInput
from mergegate.tasks.quality.evaluation.scoring import document_scores
from mergegate.tasks.quality.evaluation.scoring.document_scores import DocumentScore, PairedScores, pair_documents
from mergegate.tasks.quality.gate.evidence import GuardEvidence, ReferenceChoice
from mergegate.tasks.quality.gate.regression import alarm_confidences, judge_guards

NOT_BY_CHANCE = "and not by chance (at least 2.74)"


@pytest.mark.parametrize(
    ("counts", "outcome", "reason"),
    [
        ((43, 0, 300), "fail", "lost 14.3 points against reverser, at least 10.8; max_drop is 3"),
        ((1, 2, 400), "pass", "gained 0.2 points over reverser and lost at most 0.7; the margin is 4"),
        ((0, 0, 400), "pass", "lost 0.0 points against reverser and at most 0.7; the margin is 4"),
        ((302, 0, 10_000), "fail", f"lost 3.02 points against reverser, {NOT_BY_CHANCE}; max_drop is 3"),
    ],
)
def test_an_outcome_has_a_reason(counts: tuple[int, int, int], outcome: str, reason: str) -> None:
    verdict = verdict_of(*counts)
    assert (verdict.outcome, verdict.reason) == (outcome, f"reverse {reason}")
    assert (verdict.lost, verdict.won, verdict.n) == counts
    assert verdict.documents_needed is None
    lost, won, n = counts
    assert (verdict.reference_score, verdict.merge_score) == (pytest.approx(1 - won / n), pytest.approx(1 - lost / n))


def test_noise_above_the_threshold_is_inconclusive_and_the_needed_documents_would_decide() -> None:
    verdict = verdict_of(12, 8, 100)  # 4 points, but 12 against 8 is chance
    assert verdict.outcome == "inconclusive"
    assert verdict.reason == (
        "Not shown to be safe: reverse lost 4.0 points against reverser and may have lost up to 11.7; the margin is 4. "
        "All 100 documents of this run are used. About 832 documents would decide"
    )
    assert verdict.documents_needed > 500
    factor = verdict.documents_needed / 100
    assert verdict_of(round(12 * factor), round(8 * factor), verdict.documents_needed).outcome == "fail"


def test_few_documents_show_that_a_drop_is_small_only_within_a_wide_margin() -> None:
    verdict = verdict_of(1, 1, 40)
    assert (verdict.drop, verdict.outcome) == (0.0, "inconclusive")
    assert verdict.high > verdict.margin
    assert verdict_of(1, 1, 40, GUARD.model_copy(update={"margin": 12.0})).outcome == "pass"


def test_a_rise_is_a_drop_if_lower_is_better() -> None:
    flipped = judge_guard(GUARD, "error,none", paired(0, 43, 300), False)
    assert (flipped.drop, flipped.outcome) == (verdict_of(43, 0, 300).drop, "fail")


def test_graded_scores_are_judged_by_their_mean_difference() -> None:
    reference = tuple(0.5 + 0.01 * (i % 7) for i in range(300))
    merge = tuple(value - 0.08 - 0.01 * (i % 3) for i, value in enumerate(reference))
    verdict = judge_guard(GUARD, "f1,none", PairedScores((("t", 0),) * 300, reference, merge))
    assert verdict.drop == pytest.approx(9.0)
    assert (verdict.outcome, verdict.lost, verdict.won) == ("fail", 300, 0)


def test_documents_are_paired_by_identity_not_by_order() -> None:
    found = pair_documents([outcome(1, 0.0), outcome(2)], [outcome(2, 0.0), outcome(1)], "acc,none", "x")
    rows = ((outcome(2), outcome(2, 0.0)), (outcome(1, 0.0), outcome(1)))
    assert found == PairedScores((("reverse", 2), ("reverse", 1)), (1.0, 0.0), (0.0, 1.0), ("", ""), rows)


def test_other_metrics_are_ignored() -> None:
    other = outcome(1, 0.5)._replace(metric="f1,none")
    assert pair_documents([outcome(1), other], [outcome(1), other], "acc,none", "x").reference == (1.0,)


@pytest.mark.parametrize(
    ("merge", "complaint"),
    [
        ([outcome(1), outcome(2, doc_hash="changed")], "a different doc on each side, first for document 2"),
        ([outcome(1), outcome(2, prompt_hash="changed")], "a different prompt on each side"),
        ([outcome(1), outcome(2, target_hash="changed")], "a different target on each side"),
        ([outcome(1)], "a score of document 2 of reverse on one side only"),
        ([outcome(1), outcome(2), outcome(3)], "a score of document 3 of reverse on one side only"),
    ],
)
def test_different_prompts_are_rejected(merge: list[DocumentScore], complaint: str) -> None:
    with pytest.raises(InvalidInput, match=complaint):
        pair_documents([outcome(1), outcome(2)], merge, "acc,none", "reverse: merge against reverser")


def test_outcomes_survive_the_disk_and_may_lack_clusters(tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    written = (outcome(1, 0.25), outcome(2))
    document_scores.write_document_scores(tmp_path / "now", written)
    assert document_scores.read_document_scores(tmp_path / "now") == written
    pq.write_table(pq.read_table(tmp_path / "now").drop_columns(["cluster"]), tmp_path / "then")
    assert document_scores.read_document_scores(tmp_path / "then") == written


# --- Several guards: passing needs no correction, because every guard must pass


def evidence(lost: int, won: int, n: int, task: str = "reverse", candidates: int = 1) -> GuardEvidence:
    guard = GUARD.model_copy(update={"task": task})
    return measured(guard, lost, won, n, choice=ReferenceChoice("base", candidates))


def p_value(lost: int, won: int, n: int) -> float:
    """Return the p-value of no drop: the larger of McNemar's and a Wald test's with one more change each way."""
    p_lost, p_won = (lost + 1) / (n + 2), (won + 1) / (n + 2)
    wald = (p_lost - p_won) / math.sqrt((p_lost + p_won - (p_lost - p_won) ** 2) / (n + 2))
    return float(stats.norm.sf(min(wald, (lost - won) / math.sqrt(lost + won))))


def test_a_guard_is_tested_at_the_confidence_of_the_profile_and_each_parent_is_a_question() -> None:
    assert alarm_confidences([evidence(30, 10, 500)], 0.95) == [0.95]
    assert alarm_confidences([evidence(30, 20, 500, candidates=3)], 0.95) == [pytest.approx(1 - 0.05 / 3)]


@pytest.mark.proof
def test_alarms_follow_holms_procedure() -> None:
    rng = np.random.default_rng(21)
    differing = 0
    for _ in range(20):
        counts = [(int(rng.integers(20, 45)), int(rng.integers(15, 30)), 500) for _ in range(4)]
        wanted = multipletests([p_value(*count) for count in counts], alpha=0.05, method="holm")[0]
        guards = [evidence(*count) for count in counts]
        levels = alarm_confidences(guards, 0.95)
        found = [guard.interval(level).low > 0 for guard, level in zip(guards, levels, strict=True)]
        assert found == wanted.tolist()
        differing += sum(p_value(*count) < 0.05 for count in counts) != sum(found)
    assert differing > 2  # otherwise the test could not detect a missing correction


def test_one_alarm_makes_the_next_one_easier() -> None:
    clear, close = evidence(90, 10, 500, "copy"), evidence(48, 32, 500)
    alone = alarm_confidences([evidence(20, 20, 500, "copy"), close], 0.95)
    beside = alarm_confidences([clear, close], 0.95)
    assert (alone[1], beside[1]) == (pytest.approx(0.975), 0.95)
    assert judge_guards([clear, close], 0.95)[1].outcome == "fail"


def test_a_drop_that_may_be_chance_among_many_guards_is_inconclusive() -> None:
    close = evidence(39, 22, 500)
    assert judge_guards([close], 0.95)[0].outcome == "fail"
    among = judge_guards([close, *(evidence(20, 20, 500, f"other {i}") for i in range(4))], 0.95)[0]
    assert among.outcome == "inconclusive"
    assert among.low > 0
    assert "One of 5 comparisons may deviate by chance" in among.reason


def test_passing_does_not_depend_on_the_number_of_guards() -> None:
    one = evidence(5, 5, 500)
    assert judge_guards([one], 0.95)[0].outcome == "pass"
    assert judge_guards([one, *(evidence(30, 30, 500, f"other {i}") for i in range(9))], 0.95)[0].outcome == "pass"


@pytest.mark.proof
@pytest.mark.parametrize("guards", sampled([5, 12], [5], pytest.mark.proof))
def test_an_equal_merge_raises_no_more_alarms_on_many_tasks_than_on_one(guards: int) -> None:
    rng = np.random.default_rng(22)
    strict = GUARD.model_copy(update={"max_drop": 0.0})  # every significant drop is an alarm
    alarmed = uncorrected = 0
    runs = 300
    for _ in range(runs):
        counts = (map(int, rng.multinomial(300, [0.05, 0.05, 0.9])[:2]) for _ in range(guards))
        some = [measured(strict, lost, won, 300) for lost, won in counts]
        alarmed += any(verdict.outcome == "fail" for verdict in judge_guards(some, 0.95))
        uncorrected += any(one.interval(0.95).low > 0 for one in some)
    assert alarmed / runs <= 0.05 + 3 * (0.05 * 0.95 / runs) ** 0.5
    assert uncorrected / runs > 0.15

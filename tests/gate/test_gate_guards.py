"""A guard pairs documents, and its outcome is one of three, each explained in a sentence."""

from __future__ import annotations

from pathlib import Path

import pytest
from gate_samples import GUARD, judge_guard, outcome, paired, verdict_of

from mergegate.merge_core.errors import InvalidInput
from mergegate.tasks.evaluation import document_scores
from mergegate.tasks.evaluation.document_scores import DocumentScore, PairedScores, pair_documents


def test_a_lost_skill_fails_with_a_reason() -> None:
    verdict = verdict_of(43, 0, 300)
    assert verdict.outcome == "fail"
    assert verdict.reason == "reverse lost 14.3 points against reverser, at least 10.8; max_drop is 3"
    assert (verdict.lost, verdict.won, verdict.n) == (43, 0, 300)
    assert (verdict.reference_score, verdict.merge_score) == (1.0, pytest.approx(257 / 300))


def test_an_unchanged_skill_passes() -> None:
    verdict = verdict_of(1, 2, 400)
    assert verdict.outcome == "pass"
    assert verdict.reason == "reverse gained 0.2 points over reverser and lost at most 0.7; the margin is 4"
    assert verdict.documents_needed is None


def test_equal_scores_are_a_drop_of_zero_with_an_interval() -> None:
    expected = "reverse lost 0.0 points against reverser and at most 0.7; the margin is 4"
    assert verdict_of(0, 0, 400).reason == expected


def test_noise_above_the_threshold_is_not_a_failure() -> None:
    verdict = verdict_of(12, 8, 100)  # 4 points, but 12 against 8 is chance
    assert verdict.outcome == "inconclusive"
    assert verdict.reason == (
        "Not shown to be safe: reverse lost 4.0 points against reverser and may have lost up to 11.7; the margin is 4. "
        "All 100 documents of this run are used. About 832 documents would decide"
    )
    assert verdict.documents_needed is not None
    assert verdict.documents_needed > 500


def test_few_documents_do_not_show_that_a_drop_is_small() -> None:
    verdict = verdict_of(1, 1, 40)
    assert (verdict.drop, verdict.outcome) == (0.0, "inconclusive")
    assert verdict.high > verdict.margin


def test_the_needed_documents_would_decide_the_same_shares() -> None:
    first = verdict_of(12, 8, 100)
    assert first.documents_needed is not None
    factor = first.documents_needed / 100
    assert verdict_of(round(12 * factor), round(8 * factor), first.documents_needed).outcome == "fail"


def test_a_drop_just_over_the_limit_is_shown_to_be_over_it() -> None:
    verdict = verdict_of(302, 0, 10_000)
    assert verdict.outcome == "fail"
    assert "lost 3.02 points" in verdict.reason


def test_a_rise_is_a_drop_if_lower_is_better() -> None:
    flipped = judge_guard(GUARD, "error,none", paired(0, 43, 300), False, 0.95)
    assert (flipped.drop, flipped.outcome) == (verdict_of(43, 0, 300).drop, "fail")


def test_graded_scores_are_judged_by_their_mean_difference() -> None:
    reference = tuple(0.5 + 0.01 * (i % 7) for i in range(300))
    merge = tuple(value - 0.08 - 0.01 * (i % 3) for i, value in enumerate(reference))
    verdict = judge_guard(GUARD, "f1,none", PairedScores((("t", 0),) * 300, reference, merge), True, 0.95)
    assert verdict.drop == pytest.approx(9.0)
    assert (verdict.outcome, verdict.lost, verdict.won) == ("fail", 300, 0)


def test_the_margin_is_configurable() -> None:
    wide = GUARD.model_copy(update={"margin": 12.0})
    assert verdict_of(1, 1, 40, wide).outcome == "pass"


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


def test_outcomes_survive_the_disk(tmp_path: Path) -> None:
    written = (outcome(1, 0.25), outcome(2))
    document_scores.write_document_scores(tmp_path / document_scores.SCORES_FILE, written)
    assert document_scores.read_document_scores(tmp_path / document_scores.SCORES_FILE) == written


def test_outcomes_stored_without_clusters_can_be_read(tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    document_scores.write_document_scores(tmp_path / "now", [outcome(1)])
    pq.write_table(pq.read_table(tmp_path / "now").drop_columns(["cluster"]), tmp_path / "then")
    assert document_scores.read_document_scores(tmp_path / "then") == (outcome(1),)


# --- Clusters


def test_subjects_of_a_group_can_be_the_independent_units() -> None:
    # Of twenty subjects, three account for all losses: clear for the documents, chance for the subjects. No subject
    # has lost enough to raise an alarm on its own.
    subjects = tuple((f"subject {doc // 50}", doc) for doc in range(1000))
    lost = [0.0 if doc < 150 and doc % 50 < 11 else 1.0 for doc in range(1000)]
    found = PairedScores(subjects, (1.0,) * 1000, tuple(lost))
    alone = judge_guard(GUARD, "acc,none", found, True, 0.95)
    by_subject = judge_guard(GUARD.model_copy(update={"cluster_by": "task"}), "acc,none", found, True, 0.95)
    assert (alone.outcome, by_subject.outcome) == ("fail", "inconclusive")
    assert (alone.clusters, by_subject.clusters) == (None, 20)
    assert by_subject.low < 0 < alone.low
    assert by_subject.drop == alone.drop


def test_clusters_are_read_from_the_field_that_was_recorded() -> None:
    found = paired(20, 0, 200)
    passages = PairedScores(found.documents, found.reference, found.merge, tuple(str(doc % 20) for doc in range(200)))
    guard = GUARD.model_copy(update={"cluster_by": "passage"})
    assert judge_guard(guard, "acc,none", passages, True, 0.95).clusters == 20
    with pytest.raises(InvalidInput, match="'passage', which some documents lack"):
        judge_guard(guard, "acc,none", found, True, 0.95)


def test_a_single_cluster_is_rejected() -> None:
    with pytest.raises(InvalidInput, match=r"all documents in one cluster \(reverse\)"):
        judge_guard(GUARD.model_copy(update={"cluster_by": "task"}), "acc,none", paired(1, 0, 200), True, 0.95)

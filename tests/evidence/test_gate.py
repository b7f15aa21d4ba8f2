"""The gate: three outcomes per guard, drift before all, and a verdict that says why in a sentence."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import pytest
from prefect import flow

from merge_core.errors import InvalidInput, Refused
from merge_core.store import Artifact
from tasks import outcomes
from tasks.evaluate import Scores, TaskScore
from tasks.gate import (
    GuardVerdict,
    ModelLikelihoods,
    Verdict,
    check_guards,
    gate,
    judge,
    judge_drift,
    judge_guard,
)
from tasks.guards import GateRule, Guard
from tasks.outcomes import DocumentOutcome, Paired, pair
from tasks.perplexity import FILE, DocumentLikelihood, DriftLimits, Likelihoods, write_documents

GUARD = Guard(task="reverse", guarded_by="reverser", max_drop=3)


def paired(lost: int, won: int, n: int) -> Paired:
    """``lost`` documents right by the reference only, ``won`` by the merge only, the others by both."""
    reference = [1.0] * lost + [0.0] * won + [1.0] * (n - lost - won)
    merge = [0.0] * lost + [1.0] * won + [1.0] * (n - lost - won)
    return Paired(tuple(("reverse", i) for i in range(n)), tuple(reference), tuple(merge))


def verdict_of(lost: int, won: int, n: int, guard: Guard = GUARD) -> GuardVerdict:
    return judge_guard(guard, "acc,none", paired(lost, won, n), True, 0.95)


def test_a_lost_skill_fails_and_says_so() -> None:
    verdict = verdict_of(43, 0, 300)
    assert verdict.outcome == "fail"
    assert verdict.reason == "reverse: 14.3 points below reverser [10.8, 17.6], limit 3.0"
    assert (verdict.lost, verdict.won, verdict.n) == (43, 0, 300)
    assert (verdict.reference_score, verdict.merge_score) == (1.0, pytest.approx(257 / 300))


def test_a_kept_skill_passes() -> None:
    verdict = verdict_of(1, 2, 400)
    assert verdict.outcome == "pass"
    assert verdict.reason.startswith("reverse: 0.2 points above reverser [-0.7, 1.2]")
    assert verdict.documents_needed is None


def test_equal_scores_are_level_with_an_interval() -> None:
    assert verdict_of(0, 0, 400).reason == "reverse: level with reverser [-0.6, 0.6], limit 3.0"


def test_noise_above_the_threshold_is_not_a_failure() -> None:
    verdict = verdict_of(12, 8, 100)  # 4 points, but 12 against 8 is a coin
    assert verdict.outcome == "inconclusive"
    assert "undecided after 100 documents; about" in verdict.reason
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
    assert "3.02 points below" in verdict.reason


def test_where_less_is_better_a_rise_is_the_drop() -> None:
    flipped = judge_guard(GUARD, "error,none", paired(0, 43, 300), False, 0.95)
    assert (flipped.drop, flipped.outcome) == (verdict_of(43, 0, 300).drop, "fail")


def test_graded_scores_are_judged_by_their_mean_difference() -> None:
    reference = tuple(0.5 + 0.01 * (i % 7) for i in range(300))
    merge = tuple(value - 0.08 - 0.01 * (i % 3) for i, value in enumerate(reference))
    verdict = judge_guard(GUARD, "f1,none", Paired((("t", 0),) * 300, reference, merge), True, 0.95)
    assert verdict.drop == pytest.approx(9.0)
    assert (verdict.outcome, verdict.lost, verdict.won) == ("fail", 300, 0)


def test_the_margin_is_what_the_profile_says() -> None:
    wide = GUARD.model_copy(update={"margin": 12.0})
    assert verdict_of(1, 1, 40, wide).outcome == "pass"


# --- pairing


def outcome(doc: int, value: float = 1.0, **other: str) -> DocumentOutcome:
    hashes = {"doc_hash": f"d{doc}", "prompt_hash": f"p{doc}", "target_hash": f"t{doc}"} | other
    return DocumentOutcome(task="reverse", metric="acc,none", doc_id=doc, outcome=value, **hashes)


def test_documents_are_paired_by_identity_not_by_order() -> None:
    found = pair([outcome(1, 0.0), outcome(2)], [outcome(2, 0.0), outcome(1)], "acc,none", "x")
    assert found == Paired((("reverse", 1), ("reverse", 2)), (0.0, 1.0), (1.0, 0.0))


def test_other_metrics_take_no_part() -> None:
    other = outcome(1, 0.5)._replace(metric="f1,none")
    assert pair([outcome(1), other], [outcome(1), other], "acc,none", "x").reference == (1.0,)


@pytest.mark.parametrize(
    ("merge", "complaint"),
    [
        ([outcome(1), outcome(2, doc_hash="changed")], "another doc on each side, first for document 2"),
        ([outcome(1), outcome(2, prompt_hash="changed")], "another prompt on each side"),
        ([outcome(1), outcome(2, target_hash="changed")], "another target on each side"),
        ([outcome(1)], "document 2 of reverse scored on one side only"),
        ([outcome(1), outcome(2), outcome(3)], "document 3 of reverse scored on one side only"),
    ],
)
def test_what_was_asked_differently_is_not_compared(merge: list[DocumentOutcome], complaint: str) -> None:
    with pytest.raises(InvalidInput, match=complaint):
        pair([outcome(1), outcome(2)], merge, "acc,none", "reverse: merge against reverser")


def test_outcomes_survive_the_disk(tmp_path: Path) -> None:
    written = (outcome(1, 0.25), outcome(2))
    outcomes.write(tmp_path / outcomes.FILE, written)
    assert outcomes.read(tmp_path / outcomes.FILE) == written


def test_a_guard_against_nobody_is_refused_with_a_suggestion() -> None:
    with pytest.raises(InvalidInput, match="did you mean 'reverser'") as caught:
        check_guards([GUARD, Guard(task="x", guarded_by="revreser")], ["base", "reverser"])
    assert caught.value.where == "evaluate.tasks[1].guarded_by"


# --- drift


def likelihoods(
    nats: Sequence[float], *, vocabulary: str = "v", window: int | None = 128, tokens: int = 10
) -> ModelLikelihoods:
    """Documents of ``tokens`` tokens and 40 bytes, with so many nats a token each."""
    documents = tuple(DocumentLikelihood(i, -tokens * value, tokens, 40) for i, value in enumerate(nats))
    total = sum(document.loglik for document in documents)
    finite = math.isfinite(total)
    n = len(documents)
    value = Likelihoods(
        model="as measured",
        documents=n,
        tokens=tokens * n,
        bytes=40 * n,
        loglik=total if finite else None,
        perplexity=math.exp(-total / tokens / n) if finite else None,
        bits_per_byte=-total / 40 / n / math.log(2) if finite else None,
        vocabulary=vocabulary,
        window=window,
    )
    return ModelLikelihoods(value, documents)


LIMITS = DriftLimits()
PARENT = likelihoods([2.0 + 0.1 * math.sin(i) for i in range(500)])


def worse(by: float, noise: float = 0.01, **other: object) -> ModelLikelihoods:
    """A merge that is worse by ``by`` nats a token, a bit more or less from document to document."""
    nats = [-d.loglik / d.tokens + by + noise * math.cos(7 * i) for i, d in enumerate(PARENT.documents)]
    return likelihoods(nats, **other)  # type: ignore[arg-type]  # tests pass what the parameters take


@pytest.mark.parametrize(
    ("increase", "outcome", "warning"),
    [(0.0, "pass", False), (0.01, "pass", False), (0.03, "pass", True), (0.06, "fail", False), (0.5, "fail", False)],
)
def test_drift_passes_warns_and_fails_at_its_limits(increase: float, outcome: str, warning: bool) -> None:
    verdict = judge_drift({"base": PARENT}, worse(math.log(1 + increase)), LIMITS, 0.95)
    assert verdict.ratio == pytest.approx(1 + increase, abs=1e-3)
    assert (verdict.outcome, verdict.warning, verdict.broken) == (outcome, warning, False)
    assert verdict.low is not None
    assert verdict.high is not None
    assert verdict.low < verdict.ratio < verdict.high


def test_drift_is_said_in_a_sentence() -> None:
    verdict = judge_drift({"base": PARENT}, worse(math.log(1.003)), LIMITS, 0.95)
    assert verdict.reason == "perplexity: 1.003 times base's [1.002, 1.004], limit 1.05"


def test_noisy_documents_leave_drift_undecided() -> None:
    verdict = judge_drift({"base": PARENT}, worse(math.log(1.06), noise=1.5), LIMITS, 0.95)
    assert verdict.outcome == "inconclusive"
    assert "undecided after 500 documents" in verdict.reason


def test_the_better_parent_is_the_reference() -> None:
    assert (
        judge_drift({"bad": worse(0.3), "good": PARENT, "so-so": worse(0.1)}, PARENT, LIMITS, 0.95).reference == "good"
    )


def test_a_broken_parent_is_no_reference() -> None:
    broken = likelihoods([math.nan] * 500)
    assert judge_drift({"a": broken, "b": worse(0.1)}, PARENT, LIMITS, 0.95).reference == "b"
    with pytest.raises(InvalidInput, match="no parent whose likelihood is finite"):
        judge_drift({"a": broken}, PARENT, LIMITS, 0.95)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_one_document_that_is_not_finite_breaks_the_merge(bad: float) -> None:
    verdict = judge_drift({"base": PARENT}, likelihoods([2.0] * 499 + [bad]), LIMITS, 0.95)
    assert (verdict.broken, verdict.outcome, verdict.ratio) == (True, "fail", None)
    assert verdict.reason == "perplexity: not finite, the merge is broken"


def test_more_than_double_is_broken() -> None:
    assert judge_drift({"base": PARENT}, worse(math.log(2.05)), LIMITS, 0.95).broken
    assert not judge_drift({"base": PARENT}, worse(math.log(1.95)), LIMITS, 0.95).broken


def test_other_tokens_are_compared_by_bytes() -> None:
    verdict = judge_drift({"base": PARENT}, worse(0.0, vocabulary="other"), LIMITS, 0.95)
    assert verdict.unit == "byte"
    assert "times base's per byte" in verdict.reason


def test_documents_read_in_other_windows_are_not_compared() -> None:
    with pytest.raises(InvalidInput, match="windows of 128 and 64 tokens"):
        judge_drift({"base": PARENT}, worse(0.0, window=64), LIMITS, 0.95)


def test_other_documents_are_not_compared() -> None:
    with pytest.raises(InvalidInput, match="other documents"):
        judge_drift({"base": PARENT}, likelihoods([2.0] * 499), LIMITS, 0.95)


# --- the verdict


def test_the_worst_guard_decides_and_is_named_first() -> None:
    drifted = judge_drift({"base": PARENT}, worse(math.log(1.03)), LIMITS, 0.95)
    verdict = judge([verdict_of(0, 0, 400), verdict_of(1, 1, 40), verdict_of(43, 0, 300)], drifted, "pass")
    assert (verdict.outcome, verdict.publishable) == ("fail", False)
    assert [reason.split(" [")[0] for reason in verdict.reasons] == [
        "reverse: 14.3 points below reverser",
        "reverse: level with reverser",
    ]
    refused = verdict.refused()
    assert isinstance(refused, Refused)
    assert "14.3 points below reverser [10.8, 17.6], limit 3.0" in str(refused)
    assert verdict.refusal() is None  # the report is written before the flow stops


@pytest.mark.parametrize(("policy", "publishable"), [("block", False), ("warn", True), ("pass", True)])
def test_the_profile_says_what_an_open_question_means(policy: str, publishable: bool) -> None:
    verdict = judge([verdict_of(1, 1, 40)], None, policy)  # type: ignore[arg-type]  # parametrised
    assert (verdict.outcome, verdict.publishable) == ("inconclusive", publishable)
    assert (verdict.refused() is None) == publishable
    assert verdict.reasons


def test_a_clean_merge_is_publishable_without_reasons() -> None:
    verdict = judge([verdict_of(0, 0, 400)], judge_drift({"base": PARENT}, worse(0.0), LIMITS, 0.95), "block")
    assert (verdict.outcome, verdict.publishable, verdict.reasons, verdict.refused()) == ("pass", True, (), None)


def test_the_overall_drop_is_the_mean_over_tasks_and_surer_than_each() -> None:
    one = verdict_of(8, 0, 400)
    two = verdict_of(0, 0, 400, GUARD.model_copy(update={"task": "shift"}))
    verdict = judge([one, two], None, "block")
    assert verdict.overall_drop == pytest.approx((one.drop + two.drop) / 2)
    assert verdict.overall_low is not None
    assert verdict.overall_high is not None
    assert verdict.overall_drop - verdict.overall_low == pytest.approx(
        math.hypot(one.drop - one.low, two.drop - two.low) / 2
    )


def test_guards_of_one_task_make_its_mean_no_surer() -> None:
    one = verdict_of(8, 0, 400)
    verdict = judge([one, one], None, "block")
    assert (verdict.overall_low, verdict.overall_high) == pytest.approx((one.low, one.high))


def test_a_verdict_survives_its_json() -> None:
    broken = judge_drift({"base": PARENT}, likelihoods([math.nan] * 500), LIMITS, 0.95)
    verdict = judge([verdict_of(43, 0, 300)], broken, "block")
    assert Verdict.model_validate_json(verdict.model_dump_json()) == verdict


# --- the stage


def stored(directory: Path, value: Scores | Likelihoods) -> Artifact[Scores] | Artifact[Likelihoods]:
    return Artifact("made here", "key", f"{directory}", directory, value, {})  # type: ignore[return-value]  # generic


def scores(directory: Path, right: int, *, version: str = "0.4.13", n: int = 400) -> Artifact[Scores]:
    directory.mkdir(parents=True)
    outcomes.write(directory / outcomes.FILE, [outcome(i, float(i < right)) for i in range(n)])
    score = TaskScore(task="reverse", metric="acc,none", n=n, score=right / n, stderr=0.0, higher_is_better=True)
    return stored(directory, Scores(model="x", tasks=(score,), lm_eval_version=version))  # type: ignore[return-value]


def read(directory: Path, evidence: ModelLikelihoods) -> Artifact[Likelihoods]:
    directory.mkdir(parents=True)
    write_documents(directory / FILE, evidence.documents)
    return stored(directory, evidence.value)  # type: ignore[return-value]


def test_the_stage_judges_stored_evidence(tmp_path: Path) -> None:
    found = {"reverser": [scores(tmp_path / "r", 400)], "merge": [scores(tmp_path / "m", 340)]}
    likelihood = {"base": read(tmp_path / "b", PARENT), "merge": read(tmp_path / "l", worse(0.0))}
    verdict = gate.work(tmp_path, (GUARD,), found, likelihood, LIMITS, GateRule())
    assert verdict.outcome == "fail"
    assert verdict.drift is not None
    assert verdict.drift.outcome == "pass"
    assert verdict.summary().startswith("reverse: 15.0 points below reverser")


def test_a_broken_merge_needs_no_scores(tmp_path: Path) -> None:
    likelihood = {"base": read(tmp_path / "b", PARENT), "merge": read(tmp_path / "l", worse(5.0))}
    verdict = gate.work(tmp_path, (GUARD,), {}, likelihood, LIMITS, GateRule())
    assert (verdict.outcome, verdict.guards) == ("fail", ())
    assert verdict.reasons[0].startswith("perplexity: 148 times base's")


def test_scores_of_two_versions_of_lm_eval_are_not_compared(tmp_path: Path) -> None:
    found = {"reverser": [scores(tmp_path / "r", 400)], "merge": [scores(tmp_path / "m", 400, version="0.4.12")]}
    with pytest.raises(InvalidInput, match=r"lm-eval 0\.4\.13 and 0\.4\.12"):
        gate.work(tmp_path, (GUARD,), found, {}, None, GateRule())


def test_a_metric_that_the_task_has_not_is_refused_with_those_it_has(tmp_path: Path) -> None:
    found = {"reverser": [scores(tmp_path / "r", 400)], "merge": [scores(tmp_path / "m", 400)]}
    guard = GUARD.model_copy(update={"metric": "acc"})
    with pytest.raises(InvalidInput, match="known here: acc,none"):
        gate.work(tmp_path, (guard,), found, {}, None, GateRule())


@pytest.mark.usefixtures("prefect_api", "home")
def test_a_changed_threshold_is_another_verdict_on_the_same_evidence(tmp_path: Path) -> None:
    found = {"reverser": [scores(tmp_path / "r", 400)], "merge": [scores(tmp_path / "m", 380)]}

    @flow
    def run() -> list[tuple[str, str]]:
        strict = gate((GUARD,), found, {}, None, GateRule())
        again = gate((GUARD,), found, {}, None, GateRule())
        lenient = gate((GUARD.model_copy(update={"max_drop": 8.0}),), found, {}, None, GateRule())
        return [(a.key, a.value.outcome) for a in (strict, again, lenient)]

    strict, again, lenient = run()
    assert strict == again
    assert (strict[1], lenient[1]) == ("fail", "pass")
    assert strict[0] != lenient[0]

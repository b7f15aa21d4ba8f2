"""Perplexity drift is measured against the better parent, has limits, and is checked before everything else."""

from __future__ import annotations

import math

import pytest
from gate_samples import PARENT, likelihoods, worse

from mergegate.merge_core.errors import InvalidInput
from mergegate.tasks.gate.drift import judge_drift
from mergegate.tasks.perplexity.settings import DriftLimits

LIMITS = DriftLimits()


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


def test_drift_is_reported_in_a_sentence() -> None:
    verdict = judge_drift({"base": PARENT}, worse(math.log(1.003)), LIMITS, 0.95)
    assert verdict.reason == "perplexity is 1.003 times that of base and at most 1.004; the limit is 1.05"


def test_noisy_documents_leave_drift_inconclusive() -> None:
    verdict = judge_drift({"base": PARENT}, worse(math.log(1.06), noise=1.5), LIMITS, 0.95)
    assert verdict.outcome == "inconclusive"
    assert verdict.reason.endswith("; the limit is 1.05. More than 500 documents are needed to decide")


def test_the_better_parent_is_the_reference() -> None:
    assert (
        judge_drift({"bad": worse(0.3), "good": PARENT, "so-so": worse(0.1)}, PARENT, LIMITS, 0.95).reference == "good"
    )


def test_a_broken_parent_is_not_a_reference() -> None:
    broken = likelihoods([math.nan] * 500)
    assert judge_drift({"a": broken, "b": worse(0.1)}, PARENT, LIMITS, 0.95).reference == "b"
    with pytest.raises(InvalidInput, match="no parent with a finite likelihood"):
        judge_drift({"a": broken}, PARENT, LIMITS, 0.95)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_one_nonfinite_document_breaks_the_merge(bad: float) -> None:
    verdict = judge_drift({"base": PARENT}, likelihoods([2.0] * 499 + [bad]), LIMITS, 0.95)
    assert (verdict.broken, verdict.outcome, verdict.ratio) == (True, "fail", None)
    assert verdict.reason == "perplexity is not finite, so the merge is broken"


def test_more_than_double_the_perplexity_is_broken() -> None:
    assert judge_drift({"base": PARENT}, worse(math.log(2.05)), LIMITS, 0.95).broken
    assert not judge_drift({"base": PARENT}, worse(math.log(1.95)), LIMITS, 0.95).broken


def test_models_with_different_tokenizers_are_compared_by_bytes() -> None:
    verdict = judge_drift({"base": PARENT}, worse(0.0, vocabulary="other"), LIMITS, 0.95)
    assert verdict.unit == "byte"
    assert "times that of base per byte" in verdict.reason


def test_different_windows_are_rejected() -> None:
    with pytest.raises(InvalidInput, match="windows of 128 and 64 tokens"):
        judge_drift({"base": PARENT}, worse(0.0, window=64), LIMITS, 0.95)


def test_different_documents_are_rejected() -> None:
    with pytest.raises(InvalidInput, match="different documents"):
        judge_drift({"base": PARENT}, likelihoods([2.0] * 499), LIMITS, 0.95)

"""Compare the error rates and the latency of both arms on user traffic.

The functions are pure. Each request fails or succeeds, so the error rate ``p`` of an arm has an exact interval that is
valid at every interim look. The interval contains all rates against which a mixture of Bernoulli likelihoods, with
Beta(1/2, 1/2) weights, has gained less than ``1 / alpha`` (Robbins 1970, Ann. Math. Stat. 41:1397; Ville 1939)::

    { p :  B(f + 1/2, s + 1/2) / B(1/2, 1/2)  <  p^f (1 - p)^s / alpha }       f requests failed, s succeeded

The interval needs no normal approximation, which is inaccurate for rates near zero. Each arm uses half of the error
probability, and the interval of the difference follows from the ends of the two intervals. It is slightly wider than
necessary, but valid for any share of the traffic. It assumes independent errors. During an outage, errors depend on
each other and the interval is too narrow.

No statistical test covers latency. The report shows the quantiles of both arms, and the kill switch reacts to severe
delays.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, TypeAlias

import numpy as np
from pydantic import BaseModel, ConfigDict

from mergegate.tasks.shadow.recorded_traffic import ArmRow, is_fault, is_refusal, own_rows

LatencyQuantiles: TypeAlias = tuple[float, float, float]  # median, 95th and 99th percentile, in seconds
_HALVINGS = 60


class ErrorRate(BaseModel):
    """Error rate of one arm, with an interval that is valid at all interim looks together."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    requests: int
    failed: int
    rate: float
    low: float
    high: float


class ArmSummary(BaseModel):
    """Errors and latency of one arm. The latency quantiles cover only good answers, and are None without any."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    errors: ErrorRate
    fallbacks: int  # requests of the candidate that the parent answered instead
    first_byte: LatencyQuantiles | None
    seconds: LatencyQuantiles | None


class ArmComparison(BaseModel):
    """Comparison of both arms.

    Attributes:
        candidate: Summary of the candidate.
        parent: Summary of the parent.
        low: Lower bound of the candidate's error rate minus the parent's, valid at all interim looks together.
        high: Upper bound of the difference, valid at all interim looks together.
        outcome: Whether the candidate has significantly more or fewer errors.
        reason: The rates and the interval, in words.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    candidate: ArmSummary
    parent: ArmSummary
    low: float
    high: float
    outcome: Literal["more errors", "fewer errors", "not told apart"]
    reason: str


_FINDINGS = {
    "more errors": "the candidate fails more often",
    "fewer errors": "the candidate fails less often",
    "not told apart": "no difference is shown",
}


def compare_arms(candidate: Sequence[ArmRow], parent: Sequence[ArmRow], confidence: float = 0.95) -> ArmComparison:
    """Compare the errors and the latency of two arms.

    Every request without a good answer counts as failed, even with a 4xx status, because users' own mistakes affect
    both arms equally. A fallback counts as a failure of the candidate and is left out of the parent's numbers.
    ``confidence`` is the two-sided confidence of the difference over all interim looks.
    """
    ours, theirs = _summary(candidate, confidence), _summary(parent, confidence)
    low, high = ours.errors.low - theirs.errors.high, ours.errors.high - theirs.errors.low
    outcome: Literal["more errors", "fewer errors", "not told apart"]
    outcome = "more errors" if low > 0 else "fewer errors" if high < 0 else "not told apart"
    return ArmComparison(
        candidate=ours,
        parent=theirs,
        low=low,
        high=high,
        outcome=outcome,
        reason=f"{_rate_text('the candidate', ours.errors)}, {_rate_text('the parent', theirs.errors)}; "
        f"{_FINDINGS[outcome]} (difference {100 * low:+.2f} to {100 * high:+.2f} points with {100 * confidence:g} % "
        "confidence)",
    )


def error_rate(failures: int, requests: int, confidence: float) -> ErrorRate:
    """Return the error rate with an interval that is valid for all numbers of requests simultaneously."""
    answered = requests - failures
    if not requests:
        return ErrorRate(requests=0, failed=0, rate=0.0, low=0.0, high=1.0)
    mixture = _log_beta(failures + 0.5, answered + 0.5) - _log_beta(0.5, 0.5)
    floor, rate = mixture + math.log1p(-confidence), failures / requests

    def interval_end(refuted_rate: float) -> float:
        """Find the end of the interval between ``refuted_rate`` and the observed rate, by bisection."""
        outer, inner = refuted_rate, rate
        for _ in range(_HALVINGS):
            p = (outer + inner) / 2
            likelihood = (failures * math.log(p) if failures else 0.0) + (
                answered * math.log1p(-p) if answered else 0.0
            )
            outer, inner = (outer, p) if likelihood > floor else (p, inner)
        return outer

    low, high = (interval_end(0.0) if failures else 0.0), (interval_end(1.0) if answered else 1.0)
    return ErrorRate(requests=requests, failed=failures, rate=rate, low=low, high=high)


def _summary(rows: Sequence[ArmRow], confidence: float) -> ArmSummary:
    arm_rows = own_rows(rows)
    answered = [row for row in arm_rows if not is_fault(row) and not is_refusal(row)]
    return ArmSummary(
        # Each arm uses half of the error probability, so the difference has the requested confidence.
        errors=error_rate(len(arm_rows) - len(answered), len(arm_rows), (1 + confidence) / 2),
        fallbacks=sum(row.fallback for row in arm_rows),
        first_byte=_quantiles([row.first_byte for row in answered if row.first_byte is not None]),
        seconds=_quantiles([row.seconds for row in answered]),
    )


def _quantiles(seconds: Sequence[float]) -> LatencyQuantiles | None:
    if not seconds:
        return None
    median, p95, p99 = (float(value) for value in np.quantile(seconds, (0.5, 0.95, 0.99)))
    return median, p95, p99


def _log_beta(a: float, b: float) -> float:
    return math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)


def _rate_text(arm: str, errors: ErrorRate) -> str:
    return f"{arm} failed {errors.failed:,} of {errors.requests:,} requests ({100 * errors.rate:.2f} %)"

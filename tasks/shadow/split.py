"""What only users show: how often each arm fails, and how long it takes. Pure functions of what was recorded.

A request fails or it does not, so its arm's error rate ``p`` has an exact interval that holds whenever one looks: of
all rates, those against which a mixture of Bernoulli likelihoods with the weights of a Beta(1/2, 1/2) has not gained
``1 / alpha`` (Robbins 1970, Ann. Math. Stat. 41:1397; Ville 1939)::

    { p :  B(f + 1/2, s + 1/2) / B(1/2, 1/2)  <  p^f (1 - p)^s / alpha }       f failed, s did not

It needs no variance and no normal limit, which rates near zero would not grant. Each arm gets half of the error, and
the difference lies between the differences of the ends: a little wider than need be, and certain for any share of the
traffic. It counts on errors that come one by one; an outage is a row of them, and looks surer than it is.

Latency has no such rule here: quantiles are shown side by side, and what cannot wait is the kill switch's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np
from pydantic import BaseModel, ConfigDict

from mergegate.tasks.shadow.arms import ArmRow, is_fault, is_refusal, own_rows

_HALVINGS = 60
_LEVELS = (0.5, 0.95, 0.99)


class ErrorRate(BaseModel):
    """How often an arm failed, and the interval of its rate that holds at all looks."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    requests: int
    failed: int
    rate: float
    low: float
    high: float


class LatencyQuantiles(BaseModel):
    """Seconds within which half, 95 % and 99 % of the answers came."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    answers: int
    median: float
    p95: float
    p99: float


class ArmSummary(BaseModel):
    """One arm. Of latency only what was answered well counts; None where nothing was."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    errors: ErrorRate
    fallbacks: int  # of the candidate's arm: how often the parent answered in its place
    first_byte: LatencyQuantiles | None
    seconds: LatencyQuantiles | None


class ArmComparison(BaseModel):
    """Both arms. ``low`` and ``high``: of the candidate's error rate less the parent's, at all looks."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    candidate: ArmSummary
    parent: ArmSummary
    difference: float
    low: float
    high: float
    outcome: Literal["more errors", "fewer errors", "not told apart"]
    reason: str


def compare_arms(candidate: Sequence[ArmRow], parent: Sequence[ArmRow], confidence: float = 0.95) -> ArmComparison:
    """Errors and latency of two arms.

    Whatever is not answered well counts as failed, 4xx too: users' own mistakes meet both arms alike. What the parent
    answered in the candidate's place is the candidate's failure, and left out of the parent's numbers.

    Args:
        confidence: Two-sided, of the difference, over all looks.
    """
    ours, theirs = _summary(candidate, confidence), _summary(parent, confidence)
    low, high = ours.errors.low - theirs.errors.high, ours.errors.high - theirs.errors.low
    outcome: Literal["more errors", "fewer errors", "not told apart"] = "not told apart"
    if low > 0:
        outcome = "more errors"
    elif high < 0:
        outcome = "fewer errors"
    return ArmComparison(
        candidate=ours,
        parent=theirs,
        difference=ours.errors.rate - theirs.errors.rate,
        low=low,
        high=high,
        outcome=outcome,
        reason=f"{_said('the candidate', ours.errors)}, {_said('the parent', theirs.errors)}: {outcome} "
        f"({100 * low:+.2f} to {100 * high:+.2f} points, {100 * confidence:g} % confidence at all looks)",
    )


def error_rate(failed: int, requests: int, confidence: float) -> ErrorRate:
    """The rate and its interval, whose coverage holds at all numbers of requests at once."""
    answered = requests - failed
    if not requests:
        return ErrorRate(requests=0, failed=0, rate=0.0, low=0.0, high=1.0)
    mixture = _log_beta(failed + 0.5, answered + 0.5) - _log_beta(0.5, 0.5)
    floor, rate = mixture + math.log1p(-confidence), failed / requests

    def inside(p: float) -> bool:
        likelihood = (failed * math.log(p) if failed else 0.0) + (answered * math.log1p(-p) if answered else 0.0)
        return likelihood > floor

    def end(outside: float) -> float:
        """Between a rate that is refuted and the one that was seen."""
        out, within = outside, rate
        for _ in range(_HALVINGS):
            middle = (out + within) / 2
            out, within = (out, middle) if inside(middle) else (middle, within)
        return out

    low, high = (end(0.0) if failed else 0.0), (end(1.0) if answered else 1.0)
    return ErrorRate(requests=requests, failed=failed, rate=rate, low=low, high=high)


def _summary(rows: Sequence[ArmRow], confidence: float) -> ArmSummary:
    own = own_rows(tuple(rows))
    well = [row for row in own if not is_fault(row) and not is_refusal(row)]
    return ArmSummary(
        # Half of the error for each arm, so that the difference of the ends holds with the confidence that was asked.
        errors=error_rate(len(own) - len(well), len(own), (1 + confidence) / 2),
        fallbacks=sum(row.fallback for row in own),
        first_byte=_quantiles([row.first_byte for row in well if row.first_byte is not None]),
        seconds=_quantiles([row.seconds for row in well]),
    )


def _quantiles(seconds: Sequence[float]) -> LatencyQuantiles | None:
    if not seconds:
        return None
    median, p95, p99 = (float(value) for value in np.quantile(seconds, _LEVELS))
    return LatencyQuantiles(answers=len(seconds), median=median, p95=p95, p99=p99)


def _log_beta(a: float, b: float) -> float:
    return math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)


def _said(who: str, errors: ErrorRate) -> str:
    return f"{who} failed {errors.failed:,} of {errors.requests:,} requests ({100 * errors.rate:.2f} %)"

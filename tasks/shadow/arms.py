"""Compare both arms on recorded requests: errors, latency, and the kill switch. Pure functions of plain values.

An :class:`ArmRow` is the outcome of one request at one arm, without its content. A :class:`ShadowRecord` adds the
content. Each request fails or succeeds, so the error rate ``p`` of an arm has an exact interval that is valid at every
interim look. The interval contains all rates against which a mixture of Bernoulli likelihoods, with Beta(1/2, 1/2)
weights, has gained less than ``1 / alpha`` (Robbins 1970, Ann. Math. Stat. 41:1397; Ville 1939)::

    { p :  B(f + 1/2, s + 1/2) / B(1/2, 1/2)  <  p^f (1 - p)^s / alpha }       f requests failed, s succeeded

The interval needs no normal approximation, which is inaccurate for rates near zero. Each arm uses half of the error
probability, and the interval of the difference follows from the ends of the two intervals. It is slightly wider than
necessary, but valid for any share of the traffic. It assumes independent errors. During an outage, errors depend on
each other and the interval is too narrow.

No statistical test covers latency. The report shows the quantiles of both arms.

The kill switch takes a candidate off the traffic without waiting for a judge or for statistics. It reacts if too many
of the candidate's requests fail, or if its first bytes arrive much later than the parent's.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Literal, NamedTuple, TypeAlias

import numpy as np

from mergegate.tasks.shadow.settings import FrozenModel, SwitchRule

# Request timeout and too many requests: the server is at fault, not the request.
_FAULTS_BELOW = frozenset({408, 429})


class ArmRow(NamedTuple):
    """Outcome of one request at one arm."""

    at: float  # start of the request, as Unix time
    arm: Literal["parent", "candidate"]
    role: Literal["answer", "copy"]  # 'answer' if the user received the response, 'copy' if it was only recorded
    status: int  # HTTP status, or 0 if the server sent none
    error: str  # failure of the server or of the connection; empty if there was none, or if the user disconnected
    fallback: bool  # whether the candidate failed and the parent answered instead
    first_byte: float | None  # seconds until the first byte of the body, or None if no body arrived
    seconds: float  # until the last byte, or until the request was abandoned


class ShadowRecord(NamedTuple):
    """A request at one arm, with its answer. Headers are never recorded, and the stored bodies are redacted."""

    exchange: str  # shared by an answer and its copy
    candidate: str
    role: Literal["answer", "copy"]
    arm: Literal["parent", "candidate"]
    request_id: str  # sent by the client, or else generated
    session: str  # a hash
    at: float  # Unix time
    path: str  # without its query
    request: bytes  # empty for a copy, whose request is the same as that of the answer
    status: int = 0  # HTTP status, or 0 if there was none
    response: bytes = b""
    error: str = ""
    fallback: bool = False
    first_byte: float | None = None  # seconds
    seconds: float = 0.0

    @property
    def row(self) -> ArmRow:
        """Outcome of the request, without its content."""
        return ArmRow(*(getattr(self, name) for name in ArmRow._fields))


class RecordedPair(NamedTuple):
    """A request with the records of both arms. The user received the parent's answer."""

    parent: ShadowRecord
    candidate: ShadowRecord


def is_fault(row: ArmRow) -> bool:
    """Return whether the server failed.

    A fallback counts as a fault of the candidate, even if the parent then answered well.
    """
    is_fallback = row.fallback and row.arm == "candidate"
    return is_fallback or bool(row.error) or row.status >= 500 or row.status < 100 or row.status in _FAULTS_BELOW


def is_refusal(row: ArmRow) -> bool:
    """Return whether the server refused the request (4xx).

    The request itself is often the cause, so refusals count against the candidate only if it refuses more requests than
    the parent does.
    """
    return not is_fault(row) and row.status >= 400


def is_good(row: ArmRow) -> bool:
    return not is_fault(row) and row.status < 400


def own_rows(rows: Iterable[ArmRow]) -> tuple[ArmRow, ...]:
    """Return ``rows`` without the parent's fallback answers.

    With the requests that failed at the candidate, the parent's traffic would not be a fair sample.
    """
    return tuple(row for row in rows if not (row.fallback and row.arm == "parent"))


_SLOW = 0.95  # the quantile at which users notice delays


def kill_reason(candidate: Sequence[ArmRow], parent: Sequence[ArmRow], rule: SwitchRule) -> str | None:
    """Return why the candidate must be taken off the traffic now, as a sentence, or None if it may stay.

    Both sequences hold requests in the order in which they ended. Only the last ``window`` of each count.

    **Errors**: the switch counts faults (no answer, 5xx, 408, 429, a fallback). It counts other refusals (4xx) only as
    far as they exceed the parent's rate, because users' own mistakes affect both arms. Before the candidate has
    received ``window`` requests, the missing ones count as answered. A candidate that answers nothing is therefore
    stopped at the first request above ``max_error_percent`` percent of ``window`` (by default the 11th), and a single
    early error does not stop it.

    **First bytes**: the switch compares the 95th percentiles once each arm has answered ``window`` requests. With
    fewer, a 95th percentile would depend on a few requests.
    """
    rows, parent_rows = own_rows(candidate[-rule.window :]), own_rows(parent)[-rule.window :]
    faults = [row for row in rows if is_fault(row)]
    refusals = [row for row in rows if is_refusal(row)]
    usual_rate = sum(map(is_refusal, parent_rows)) / len(parent_rows) if parent_rows else 0.0
    excess = max(0.0, len(refusals) - usual_rate * len(rows))
    if len(faults) + excess > rule.max_error_percent / 100 * rule.window:
        kinds = Counter(row.error or f"HTTP {row.status}" for row in [*faults, *(refusals if excess else ())])
        failures = ", ".join(f"{count} times {kind}" for kind, count in kinds.most_common(3))
        parent_note = f"; the parent refused {100 * usual_rate:.1f} % of its own" if excess and usual_rate else ""
        return (
            f"{sum(kinds.values())} of the candidate's last {len(rows)} requests failed ({failures}{parent_note}), "
            f"more than {rule.max_error_percent:g} % of {rule.window}"
        )
    seconds, parent_seconds = _first_bytes(candidate, rule.window), _first_bytes(parent, rule.window)
    if min(len(seconds), len(parent_seconds)) < rule.window:
        return None
    slow, usual = float(np.quantile(seconds, _SLOW)), float(np.quantile(parent_seconds, _SLOW))
    if slow <= rule.max_slowdown * usual:
        return None
    return (
        f"95 % of the candidate's last {rule.window} first bytes arrived within {slow:.3g} s, the parent's within "
        f"{usual:.3g} s, so the candidate is more than {rule.max_slowdown:g} times slower"
    )


def _first_bytes(rows: Sequence[ArmRow], limit: int) -> list[float]:
    """Return the seconds to the first byte of the last ``limit`` requests that were answered well."""
    good = (row.first_byte for row in reversed(rows) if not row.fallback and is_good(row))
    return list(islice((seconds for seconds in good if seconds is not None), limit))


LatencyQuantiles: TypeAlias = tuple[float, float, float]  # median, 95th and 99th percentile, in seconds
_HALVINGS = 60


class ErrorRate(FrozenModel):
    """Error rate of one arm, with an interval that is valid at all interim looks together."""

    requests: int
    failed: int
    rate: float
    low: float
    high: float


class ArmSummary(FrozenModel):
    """Errors and latency of one arm. The latency quantiles cover only good answers, and are None without any."""

    errors: ErrorRate
    fallbacks: int  # requests of the candidate that the parent answered instead
    first_byte: LatencyQuantiles | None
    seconds: LatencyQuantiles | None


class ArmComparison(FrozenModel):
    """Comparison of both arms."""

    candidate: ArmSummary
    parent: ArmSummary
    low: float  # bounds of the candidate's error rate minus the parent's, valid at all interim looks together
    high: float
    outcome: Literal["more errors", "fewer errors", "not told apart"]
    reason: str  # the rates and the interval, in words


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
    answered = list(filter(is_good, arm_rows))
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

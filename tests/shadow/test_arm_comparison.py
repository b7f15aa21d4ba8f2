"""Errors and latency of two arms: intervals that are valid at every look, and which arm a failure counts for."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from arm_rows import rows
from hypothesis import given, settings
from hypothesis import strategies as st

from mergegate.tasks.shadow import compare_arms
from mergegate.tasks.shadow.arm_comparison import error_rate


def exact_mixture(failed: int, answered: int) -> Fraction:
    """Return the mixture of the likelihoods over all rates, weighted by Beta(1/2, 1/2), computed from its moments."""
    found = Fraction(1)
    for n in range(failed + answered):
        found *= Fraction(2 * n + 1 if n < failed else 2 * (n - failed) + 1, 2 * (n + 1))
    return found


@settings(max_examples=50)
@given(failed=st.integers(0, 40), answered=st.integers(0, 400))
def test_the_interval_contains_all_rates_that_are_not_refuted(failed: int, answered: int) -> None:
    requests = failed + answered
    found = error_rate(failed, requests, 0.95)
    assert 0 <= found.low <= found.rate <= found.high <= 1
    assert (found.low == 0) == (not failed)
    assert (found.high == 1) == (not answered)
    for end in (found.low, found.high):
        if 0 < end < 1:
            likelihood = failed * math.log(end) + answered * math.log1p(-end)
            assert math.log(exact_mixture(failed, answered)) - likelihood == pytest.approx(math.log(20), abs=1e-6)


def test_the_interval_covers_the_true_rate_at_every_request() -> None:
    """400 arms fail 3 % of 2,000 requests; at an error rate of 5 %, 95 % of such samples are below 7 %."""
    truth, alpha = 0.03, 0.05
    n = np.arange(1, 2_001)
    failed = np.cumsum(np.random.default_rng(5).random((400, 2_000)) < truth, axis=1)
    gammas = np.array([math.lgamma(k + 0.5) for k in range(2_001)])
    evidence = gammas[failed] + gammas[n - failed] - np.array([math.lgamma(k + 1) for k in n]) - math.log(math.pi)
    evidence -= failed * math.log(truth) + (n - failed) * math.log1p(-truth)
    left_out = evidence >= math.log(1 / alpha)
    assert 0 < left_out.any(axis=1).mean() <= 0.07
    for run, k in ((0, 10), (1, 500), (2, 2_000), *np.argwhere(left_out)[:5]):
        found = error_rate(int(failed[run, k - 1]), int(k), 1 - alpha)
        outside = evidence[run, k - 1] >= math.log(1 / alpha)
        assert outside == (not found.low <= truth <= found.high)


def test_significant_differences_between_arms_are_found() -> None:
    worse = compare_arms(rows("candidate", 940) + rows("candidate", 60, status=503), rows("parent", 9_990, more=10))
    assert worse.outcome == "more errors"
    assert worse.low > 0
    assert worse.reason.startswith("the candidate failed 60 of 1,000 requests (6.00 %), the parent failed 10 of 10,000")
    assert compare_arms(rows("candidate", 1_000), rows("parent", 1_000)).outcome == "not told apart"
    better = compare_arms(rows("candidate", 5_000), rows("parent", 4_800, more=200))
    assert (better.outcome, better.high < 0) == ("fewer errors", True)
    nothing = compare_arms((), ())
    assert (nothing.low, nothing.high, nothing.candidate.first_byte) == (-1, 1, None)


def test_a_fallback_counts_as_a_failure_but_not_as_latency() -> None:
    candidate = rows("candidate", 99, seconds=1.0) + rows("candidate", 1, fallback=True, seconds=50.0)
    parent = rows("parent", 100, seconds=2.0) + rows("parent", 7, fallback=True, seconds=90.0)
    found = compare_arms(candidate, parent)
    assert (found.candidate.errors.failed, found.candidate.fallbacks) == (1, 1)
    assert (found.parent.errors.requests, found.parent.errors.failed) == (100, 0)
    assert found.candidate.seconds is not None
    assert found.parent.seconds is not None
    assert (found.candidate.seconds.p99, found.parent.seconds.p99) == (1.0, 2.0)


def test_latency_quantiles_cover_only_good_answers() -> None:
    times = [0.01 * k for k in range(1, 101)]
    candidate = tuple(row for t in times for row in rows("candidate", 1, first_byte=t, seconds=10 * t))
    found = compare_arms(candidate + rows("candidate", 50, status=500, seconds=99.0), ()).candidate
    assert found.first_byte is not None
    assert found.first_byte.answers == 100
    assert found.first_byte.p95 == pytest.approx(np.quantile(times, 0.95))
    assert found.seconds is not None
    assert found.seconds.median == pytest.approx(10 * np.median(times))

"""Verdicts: errors and latency of two arms, the kill switch, and what takes precedence over the evidence."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mergegate.tasks import shadow
from mergegate.tasks.shadow import ArmRow, JudgedTotals, ShadowSettings, ShadowVerdict, SwitchRule, kill_reason
from mergegate.tasks.shadow.arms import compare_arms, error_rate

Rows = tuple[ArmRow, ...]


def rows(arm: Literal["parent", "candidate"], count: int, *, more: int = 0, **facts: Any) -> Rows:
    """Return `count` successful rows changed by `facts`, and `more` failed rows."""
    usual = {"at": 0.0, "arm": arm, "role": "answer", "status": 200, "error": "", "fallback": False}
    one = ArmRow(**{**usual, "first_byte": 0.1, "seconds": 1.0, **facts})
    return (one,) * count + (one._replace(status=502),) * more


def exact_mixture(failed: int, answered: int) -> Fraction:
    """Return the mixture of the likelihoods over all rates, weighted by Beta(1/2, 1/2), computed from its moments."""
    found = Fraction(1)
    for n in range(failed + answered):
        found *= Fraction(2 * n + 1 if n < failed else 2 * (n - failed) + 1, 2 * (n + 1))
    return found


@settings(max_examples=20)
@given(failed=st.integers(0, 40), answered=st.integers(0, 400))
def test_the_interval_contains_all_rates_that_are_not_refuted(failed: int, answered: int) -> None:
    found = error_rate(failed, failed + answered, 0.95)
    assert 0 <= found.low <= found.rate <= found.high <= 1
    assert (found.low == 0, found.high == 1) == (not failed, not answered)
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
    assert (worse.outcome, worse.low > 0) == ("more errors", True)
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
    assert (found.candidate.seconds[2], found.parent.seconds[2]) == (1.0, 2.0)


def test_latency_quantiles_cover_only_good_answers() -> None:
    times = [0.01 * k for k in range(1, 101)]
    candidate = tuple(row for t in times for row in rows("candidate", 1, first_byte=t, seconds=10 * t))
    found = compare_arms(candidate + rows("candidate", 50, status=500, seconds=99.0), ()).candidate
    assert found.first_byte is not None
    assert found.seconds is not None
    assert found.first_byte[1] == pytest.approx(np.quantile(times, 0.95))
    assert found.seconds[0] == pytest.approx(10 * np.median(times))


# The kill switch.

RULE = SwitchRule()
PARENT = rows("parent", 200)


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param({"status": 503}, id="5xx"),
        pytest.param({"status": 429}, id="too much to do"),
        pytest.param({"status": 0, "error": "connection refused"}, id="no answer"),
        pytest.param({"status": 200, "error": "broke off"}, id="half an answer"),
        pytest.param({"status": 200, "fallback": True}, id="the parent stood in"),
        pytest.param({"status": 404}, id="declined, as nobody declines at the parent"),
    ],
)
def test_more_than_five_percent_failures_of_the_last_200_kill_the_candidate(fault: dict[str, object]) -> None:
    well = rows("candidate", 300)
    assert kill_reason(well + rows("candidate", 10, **fault), PARENT, RULE) is None
    said = kill_reason(well + rows("candidate", 11, **fault), PARENT, RULE)
    assert said is not None
    assert said.startswith("11 of the candidate's last 200 requests failed (11 times ")
    assert said.endswith("more than 5 % of 200")


def test_a_dead_candidate_is_killed_at_its_eleventh_request_but_not_for_old_failures() -> None:
    dead = rows("candidate", 11, status=0, error="connection refused")
    assert kill_reason(dead[:10], (), RULE) is None
    assert kill_reason(dead, (), RULE) == (
        "11 of the candidate's last 11 requests failed (11 times connection refused), more than 5 % of 200"
    )
    assert kill_reason(rows("candidate", 50, status=503) + rows("candidate", 200), PARENT, RULE) is None


def test_user_mistakes_on_both_arms_do_not_kill_the_candidate() -> None:
    """Every tenth request is malformed in either arm; the candidate refuses twice as many only if it is at fault."""
    parent = rows("parent", 180) + rows("parent", 20, status=400)
    assert kill_reason(rows("candidate", 172) + rows("candidate", 28, status=400), parent, RULE) is None
    said = kill_reason(rows("candidate", 160) + rows("candidate", 40, status=400), parent, RULE)
    assert said is not None
    assert "40 times HTTP 400; the parent refused 10.0 % of its own" in said
    # Answers of the parent in place of the candidate do not count for the parent.
    parent = PARENT + rows("parent", 200, fallback=True, status=400)
    assert kill_reason(rows("candidate", 189) + rows("candidate", 11, status=400), parent, RULE) is not None


def test_first_bytes_twice_as_slow_kill_the_candidate_after_200_requests() -> None:
    late, usual = rows("candidate", 200, first_byte=0.41), rows("parent", 200, first_byte=0.2)
    assert kill_reason(late, usual, RULE) == (
        "95 % of the candidate's last 200 first bytes arrived within 0.41 s, the parent's within 0.2 s, "
        "so the candidate is more than 2 times slower"
    )
    mostly = rows("candidate", 191, first_byte=0.2) + rows("candidate", 9, first_byte=60.0)
    for candidate, parent, reason in (
        (late[1:], usual, "too few requests"),
        (late, usual[1:], "too few requests of the parent"),
        (rows("candidate", 200, first_byte=0.4), usual, "not more than twice as slow"),
        (mostly, usual, "the slowest 5 % are nobody's business here"),
        (late[:199] + rows("candidate", 1, status=503, first_byte=0.1), usual, "how fast it failed says nothing"),
    ):
        assert kill_reason(candidate, parent, RULE) is None, reason


@pytest.mark.story
def test_an_equal_candidate_is_rarely_killed_by_chance() -> None:
    """The switch is checked after every 20 of 4,000 requests, with a first-byte latency as under load (log sd 0.6)."""
    rng = np.random.default_rng(2)
    for _ in range(10):
        candidate, parent = (
            [rows(arm, 1, first_byte=float(t))[0] for t in rng.lognormal(-2, 0.6, 4_000)]
            for arm in ("candidate", "parent")
        )
        assert all(kill_reason(candidate[:n], parent[:n], RULE) is None for n in range(20, 4_001, 20))


@given(st.lists(st.sampled_from([200, 400, 503]), max_size=60), st.lists(st.sampled_from([200, 400]), max_size=60))
def test_another_fault_never_saves_the_candidate(ours: list[int], theirs: list[int]) -> None:
    rule = SwitchRule(max_error_percent=20, window=50)
    candidate = tuple(row for status in ours for row in rows("candidate", 1, status=status))
    parent = tuple(row for status in theirs for row in rows("parent", 1, status=status))
    if kill_reason(candidate, parent, rule):
        assert kill_reason(candidate + rows("candidate", 1, status=503), parent, rule)


# The verdict.

SERVER = {"url": "http://127.0.0.1:9/v1"}
SETTINGS = ShadowSettings.model_validate(
    {"parent": SERVER, "candidate": SERVER, "judge": {"model": "judge", **SERVER}, "rule": {"minimum_pairs": 50}}
)
WELL = rows("candidate", 250) + rows("parent", 250)
FAILS = rows("candidate", 200, more=50) + rows("parent", 250)
BETTER, WORSE, TIES = [1.0, 0.5] * 100, [0.0, 0.5] * 100, [0.5] * 2000


def verdict(
    scores: Sequence[float], consistency: float | None = 1.0, traffic: Rows = WELL, found: float = 0.9, **totals: Any
) -> ShadowVerdict:
    """Return the verdict if the judge found the share ``found`` of 40 control pairs."""
    judged = JudgedTotals(scores, consistency, [number < 40 * found for number in range(40)], **totals)
    return shadow.shadow_verdict("v1", judged, traffic, 30.0, SETTINGS)


@pytest.mark.parametrize(
    ("shadow", "outcome", "stage_outcome"),
    [
        (verdict(BETTER), "promote", "pass"),
        (verdict(TIES, None), "promote", "pass"),
        (verdict(TIES, 0.1), "wait", "inconclusive"),
        (verdict(BETTER[:10]), "wait", "inconclusive"),
        (verdict(WORSE), "roll back", "fail"),
        (verdict(WORSE, 0.1), "roll back", "fail"),
        (verdict(WORSE, found=0.0, characters=(10, 1000), cut_off=(0.0, 90.0)), "roll back", "fail"),  # no limit helps
        (verdict(BETTER, traffic=FAILS), "kill", "fail"),
    ],
)
def test_the_kill_switch_comes_first_then_the_evidence(shadow: ShadowVerdict, outcome: str, stage_outcome: str) -> None:
    stage_verdict = shadow.as_verdict()
    assert (shadow.outcome, stage_verdict.outcome) == (outcome, stage_outcome)
    assert stage_verdict.publishable == (outcome == "promote")
    assert stage_verdict.reasons == (() if outcome == "promote" else (shadow.reason,))
    assert stage_verdict.evidence == shadow


@pytest.mark.parametrize(
    ("shadow", "reason"),
    [
        (verdict(TIES[:500], found=0.0), "the judge found 0 of 40 control pairs (at least 0 %, more than 25 %"),
        (verdict(BETTER, found=0.3), "the judge found 12 of 40 control pairs"),
        (verdict(BETTER, characters=(1000, 2100)), "2.1 times as long as the parent's, and max_length_ratio is 2"),
        (verdict(BETTER, cut_off=(1.0, 6.5)), "cuts off 6.5 % of the candidate's answers and 1.0 % of the parent's"),
    ],
)
def test_blind_judges_and_long_or_cut_off_answers_do_not_promote(shadow: ShadowVerdict, reason: str) -> None:
    assert (shadow.outcome, shadow.as_verdict().publishable) == ("wait", False)
    assert reason in shadow.reason

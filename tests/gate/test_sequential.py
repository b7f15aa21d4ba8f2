"""Several looks have the same error rate as one, because each uses the confidence that alpha spending allows."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from samples import sampled
from scipy import stats

from mergegate.tasks.evaluation.document_order import interim_looks
from mergegate.tasks.gate.sequential import InterimLook, plan_looks

SCHEDULES = [(500, 1000), (500, 1000, 1319), (500, 1000, 2000, 4000, 8000, 14042), (100, 1000, 1001)]


def never_crossed(schedule: tuple[int, ...], bounds: list[float]) -> float:
    """Return the probability that no z statistic crosses its bound.

    The statistics of looks j <= k correlate with ``sqrt(n_j / n_k)``.
    """
    shares = np.array(schedule[: len(bounds)], dtype=float)
    correlation = np.sqrt(np.minimum.outer(shares, shares) / np.maximum.outer(shares, shares))
    integral = stats.multivariate_normal(cov=correlation, allow_singular=True, abseps=1e-7, maxpts=2_000_000, seed=1)
    return float(integral.cdf(bounds))


def test_a_single_look_has_the_requested_confidence() -> None:
    assert plan_looks((1319,), 0.95) == (InterimLook(number=1, of=1, documents=1319, confidence=0.95),)


@pytest.mark.story
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("confidence", sampled([0.95, 0.99], [0.95]))
def test_every_look_spends_its_part_of_the_error(schedule: tuple[int, ...], confidence: float) -> None:
    bounds = [stats.norm.ppf(look.confidence) for look in plan_looks(schedule, confidence)]
    for k, documents in enumerate(schedule, start=1):
        spent = (1 - confidence) * (documents / schedule[-1]) ** 2
        assert 1 - never_crossed(schedule, bounds[:k]) == pytest.approx(spent, abs=2e-5)


def test_simulated_errors_match_the_bounds() -> None:
    schedule = (500, 1000, 2000, 4000, 8000, 14042)
    plan = plan_looks(schedule, 0.95)
    steps = np.diff((0, *schedule))
    walk = np.cumsum(np.random.default_rng(1).normal(size=(200_000, 6)) * np.sqrt(steps), axis=1)
    bounds = np.array([stats.norm.ppf(look.confidence) * math.sqrt(look.documents) for look in plan])
    assert np.mean((walk > bounds).any(axis=1)) == pytest.approx(0.05, abs=3 * math.sqrt(0.05 * 0.95 / 200_000))


@pytest.mark.story
def test_repeated_tests_at_the_same_level_would_err_far_more_often() -> None:
    level = [stats.norm.ppf(0.95)] * 6
    assert 1 - never_crossed((500, 1000, 2000, 4000, 8000, 14042), level) > 0.13


@given(st.integers(2, 20_000), st.integers(1, 20_000), st.floats(0.6, 0.999))
@settings(max_examples=60)
def test_every_look_has_at_least_the_joint_confidence(total: int, first: int, confidence: float) -> None:
    plan = plan_looks(interim_looks(total, first), confidence)
    assert all(confidence - 1e-9 <= look.confidence <= 1 for look in plan)
    assert sum(1 - look.confidence for look in plan) >= 1 - confidence - 1e-6  # not more conservative than necessary
    assert [look.number for look in plan] == list(range(1, len(plan) + 1))
    assert {look.of for look in plan} == {len(plan)}


def test_a_look_at_few_documents_has_a_confidence_below_1() -> None:
    assert 0.999999 < plan_looks((1, 10**9), 0.95)[0].confidence < 1


@pytest.mark.parametrize("schedule", [(), (0, 5), (5, 5), (10, 5)])
def test_a_schedule_must_increase(schedule: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="must increase"):
        plan_looks(schedule, 0.95)

"""Intervals agree with independent references, have their nominal coverage, and decide as often as stated."""

from __future__ import annotations

import math

import numpy as np
import pytest
from gate_samples import verdict_of
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize, stats

from mergegate.tasks.quality.gate import Guard, binary_difference, decide_guard
from mergegate.tasks.quality.gate.statistics import binary_bounds, documents_needed, score_statistic, selection_bias

STANDARD_ERROR = math.sqrt(0.90 * 0.10 / 10_000)  # of 90% coverage in 10,000 simulations


def most_likely_spread(lost: int, won: int, n: int, difference: float) -> float:
    """Return the variance of one document's difference, at the most likely shares that differ by ``difference``."""

    def surprise(p_won: float) -> float:
        shares = np.array([p_won + difference, p_won, 1 - 2 * p_won - difference])
        return -float(np.array([lost, won, n - lost - won]) @ np.log(np.maximum(shares, 1e-300)))

    bounds = (max(0.0, -difference), (1 - difference) / 2)
    p_won = optimize.minimize_scalar(surprise, bounds=bounds, method="bounded", options={"xatol": 1e-12}).x
    return 2 * p_won + difference - difference**2


@given(st.integers(2, 500), st.data())
@settings(max_examples=25)
def test_the_binary_interval_is_the_wider_of_an_adjusted_wald_and_a_score_interval(n: int, data: st.DataObject) -> None:
    lost = data.draw(st.integers(0, n))
    won = data.draw(st.integers(0, n - lost))
    estimate = binary_difference(lost, won, n, 0.95)
    added = np.array([1.0] * (lost + 1) + [-1.0] * (won + 1) + [0.0] * (n - lost - won))
    low, high = stats.norm.interval(0.90, loc=added.mean(), scale=added.std() / math.sqrt(len(added)))
    assert estimate.mean == pytest.approx((lost - won) / n)
    for bound, wald, side in ((estimate.low, max(-1, low), 1), (estimate.high, min(1, high), -1)):
        assert side * bound <= side * wald + 1e-9
        if side * bound < side * wald - 1e-6 and abs(bound) < 1 - 1e-6:  # here the score test determines the bound
            spread = most_likely_spread(lost, won, n, bound)
            score = (lost - won - n * bound) / math.sqrt(n * spread)
            assert score == pytest.approx(side * stats.norm.ppf(0.95), abs=2e-3)


def test_the_score_interval_matches_the_published_example() -> None:
    # Airway hyper-responsiveness before and after transplantation, where 1 and 7 of 21 pairs change (Fagerland et al.
    # 2014, Stat. Med. 33:2850). Tango's interval is (-0.517, -0.026).
    lower = binary_difference(1, 7, 21, 0.975).low
    assert lower == pytest.approx(-0.517, abs=5e-4)
    upper = optimize.brentq(lambda d: float(score_statistic(np.array(1.0), np.array(7.0), 21, d)) + 1.959964, -0.2, 0.2)
    assert upper == pytest.approx(-0.026, abs=5e-4)


def test_the_score_statistic_of_no_difference_is_mcnemars() -> None:
    assert float(score_statistic(np.array(30.0), np.array(14.0), 500, 0.0)) == pytest.approx(16 / math.sqrt(44))


def test_the_interval_of_agreeing_documents_is_wider_than_a_point() -> None:
    estimate = binary_difference(0, 0, 200, 0.95)
    # The bound is z^2 / (n + z^2), the largest difference that the score test accepts when no document changed.
    assert (estimate.low, estimate.high) == pytest.approx((-0.01335, 0.01335), abs=1e-5)


@pytest.mark.parametrize(
    ("discordant", "delta", "n"),
    [(0.10, 0.0, 300), (0.10, 0.03, 300), (0.2, 0.1, 100), (0.05, 0.02, 1319), (0.05, 0.03, 500), (0.035, 0.03, 500)],
)
def test_the_binary_interval_covers_at_its_level(discordant: float, delta: float, n: int) -> None:
    rng = np.random.default_rng(1)
    counts = rng.multinomial(n, [(discordant + delta) / 2, (discordant - delta) / 2, 1 - discordant], size=10_000)
    low, high = binary_bounds(counts[:, 0].astype(float), counts[:, 1].astype(float), n, 0.95)
    assert 0.90 - 3 * STANDARD_ERROR <= np.mean((low <= delta) & (delta <= high)) <= 0.95
    # These sides would publish a bad merge and refuse a good one.
    assert np.mean(high < delta) <= 0.05 + 3 * STANDARD_ERROR
    assert np.mean(low > delta) <= 0.05 + 3 * STANDARD_ERROR


@pytest.mark.parametrize(("count", "wanted"), [(1, 0.0), (2, 0.5642), (3, 0.8463), (5, 1.1630)])
def test_the_expected_maximum_matches_the_tables(count: int, wanted: float) -> None:
    # Each model is right on a document of its own, so half the squared difference of two has the variance 1 / (n - 1).
    bias = selection_bias(np.eye(count).tolist())
    assert bias * math.sqrt(count * (count - 1)) == pytest.approx(wanted, abs=1e-4)


@pytest.mark.story
def test_the_best_of_equals_looks_better_by_the_selection_bias() -> None:
    rng, models = np.random.default_rng(13), 3
    gained, stated = [], []
    for _ in range(2000):
        easy = rng.random(400)  # documents are equally easy for all models, so scores correlate
        scores = (rng.random((models, 400)) < np.clip(easy, 0.2, 0.8)).astype(float)
        gained.append(scores.mean(axis=1).max() - np.clip(easy, 0.2, 0.8).mean())
        stated.append(selection_bias(scores.tolist()))
    # Here, each model's expectation is the mean chance over documents, so the whole gain is selection bias.
    assert np.mean(stated) == pytest.approx(np.mean(gained), rel=0.05)


@pytest.mark.parametrize(
    ("drop", "discordant", "wanted"),
    [
        *((0.02, 0.05, 771), (0.02, 0.08, 1235), (0.02, 0.10, 1544), (0.02, 0.15, 2317), (0.02, 0.20, 3090)),
        *((0.03, 0.05, 342), (0.03, 0.08, 548), (0.03, 0.10, 685), (0.03, 0.15, 1029), (0.03, 0.20, 1372)),
    ],
)
def test_sample_sizes_match_connor(drop: float, discordant: float, wanted: int) -> None:
    assert documents_needed(discordant - drop**2, drop, 0.95) == pytest.approx(wanted, abs=1)


def test_the_needed_documents_decide_four_times_in_five() -> None:
    n = documents_needed(0.10 - 0.03**2, 0.03, 0.95)
    counts = np.random.default_rng(7).multinomial(n, [0.065, 0.035, 0.90], size=4000).astype(float)
    seen = np.mean(binary_bounds(counts[:, 0], counts[:, 1], n, 0.95)[0] > 0)
    assert 0.77 <= seen <= 0.83


def test_the_detectable_drop_matches_the_published_table() -> None:
    # GSM8K at accuracy 0.75 and correlation 0.8 has discordance 0.075 and a standard error of 0.75 points.
    verdict = verdict_of(49, 48, 1319, Guard(task="gsm8k", guarded_by="base"))
    assert verdict.detectable_drop == pytest.approx(1.87, abs=0.02)


@pytest.mark.parametrize(
    ("n", "discordant", "drop", "wanted"),
    [
        *((1319, 0.10, 0.00, (0.96, 0.03, 0.01)), (1319, 0.10, 0.02, (0.32, 0.19, 0.49))),
        *((1319, 0.10, 0.03, (0.05, 0.08, 0.87)), (1319, 0.15, 0.00, (0.88, 0.09, 0.03))),
        *((500, 0.12, 0.00, (0.61, 0.34, 0.05)), (500, 0.12, 0.03, (0.05, 0.34, 0.61))),
        *((14042, 0.10, 0.01, (1.0, 0.0, 0.0)), (14042, 0.10, 0.03, (0.0, 0.0, 1.0))),
    ],
)
def test_the_rule_has_its_claimed_power(
    n: int, discordant: float, drop: float, wanted: tuple[float, float, float]
) -> None:
    rng = np.random.default_rng(8)
    counts = rng.multinomial(n, [(discordant + drop) / 2, (discordant - drop) / 2, 1 - discordant], size=4000)
    lost, won = counts[:, 0].astype(float), counts[:, 1].astype(float)
    found = {"pass": 0, "inconclusive": 0, "fail": 0}
    for seen, low, high in zip((lost - won) / n, *binary_bounds(lost, won, n, 0.95), strict=True):
        found[decide_guard(100 * seen, 100 * low, 100 * high, 2.0, 3.0)] += 1
    assert [count / 4000 for count in found.values()] == pytest.approx(wanted, abs=0.035)
    if drop == 0.03:
        assert found["pass"] / 4000 <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / 4000)

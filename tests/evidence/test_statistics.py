"""Intervals agree with independent references, cover at their level, and decide as often as is claimed."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from tasks.gate import decide
from tasks.statistics import (
    binary_difference,
    detectable_difference,
    documents_needed,
    graded_difference,
    likelihood_ratio,
)


@given(st.integers(1, 500), st.data())
def test_the_binary_interval_is_walds_on_two_documents_more(n: int, data: st.DataObject) -> None:
    lost = data.draw(st.integers(0, n))
    won = data.draw(st.integers(0, n - lost))
    estimate = binary_difference(lost, won, n, 0.95)
    added = np.array([1.0] * (lost + 1) + [-1.0] * (won + 1) + [0.0] * (n - lost - won))
    low, high = stats.norm.interval(0.90, loc=added.mean(), scale=added.std() / math.sqrt(len(added)))
    assert estimate.mean == pytest.approx((lost - won) / n)
    assert (estimate.low, estimate.high) == pytest.approx((max(-1, low), min(1, high)), abs=1e-12)


def test_documents_that_all_agree_leave_about_a_point_open() -> None:
    estimate = binary_difference(0, 0, 200, 0.95)
    assert (estimate.low, estimate.high) == pytest.approx((-0.0115, 0.0115), abs=1e-4)


@pytest.mark.parametrize(
    ("discordant", "delta", "n"), [(0.10, 0.0, 300), (0.10, 0.03, 300), (0.2, 0.1, 100), (0.05, 0.02, 1319)]
)
def test_the_binary_interval_covers_at_its_level(discordant: float, delta: float, n: int) -> None:
    rng = np.random.default_rng(1)
    counts = rng.multinomial(n, [(discordant + delta) / 2, (discordant - delta) / 2, 1 - discordant], size=10_000)
    estimates = [binary_difference(int(lost), int(won), n, 0.95) for lost, won, _ in counts]
    assert 0.89 <= np.mean([e.low <= delta <= e.high for e in estimates]) <= 0.93
    # The side that would publish a bad merge. With 100 documents the skew of a large drop still shows in it.
    assert np.mean([e.high < delta for e in estimates]) <= (0.056 if n >= 300 else 0.06)


def test_the_graded_interval_is_students() -> None:
    differences = np.random.default_rng(2).normal(0.02, 0.3, 150)
    estimate = graded_difference(differences.tolist(), 0.95)
    wanted = stats.ttest_1samp(differences, 0).confidence_interval(0.90)
    assert (estimate.low, estimate.high) == pytest.approx((wanted.low, wanted.high), rel=1e-9)


def test_the_graded_interval_is_never_of_zero_width() -> None:
    estimate = graded_difference([0.0] * 200, 0.95)
    assert estimate.low < -0.01 < 0.01 < estimate.high


def test_the_graded_interval_covers_at_its_level() -> None:
    rng = np.random.default_rng(3)
    samples = rng.beta(2, 3, (3000, 80)) - rng.beta(2, 3, (3000, 80)) * 0.9
    true = 0.4 - 0.9 * 0.4
    covered = [e.low <= true <= e.high for e in (graded_difference(sample, 0.95) for sample in samples)]
    assert 0.885 <= np.mean(covered) <= 0.93


def likelihoods(rng: np.random.Generator, documents: int, drift: float) -> tuple[np.ndarray, np.ndarray]:
    """Differences and tokens of documents of unequal length, on which the merge is ``drift`` nats a token worse."""
    tokens = rng.integers(20, 400, documents)
    return tokens * (drift + rng.normal(0, 0.02, documents)), tokens


def test_the_ratio_of_perplexities_is_that_of_the_sums() -> None:
    differences, tokens = likelihoods(np.random.default_rng(4), 200, 0.03)
    parent = -2.0 * tokens
    perplexities = [math.exp(-loglik.sum() / tokens.sum()) for loglik in (parent, parent - differences)]
    found = likelihood_ratio(differences.tolist(), tokens.tolist(), 0.95)
    assert found.ratio == pytest.approx(perplexities[1] / perplexities[0], rel=1e-12)


def test_the_interval_of_the_ratio_is_that_of_a_bootstrap_over_documents() -> None:
    rng = np.random.default_rng(5)
    differences, tokens = likelihoods(rng, 300, 0.03)
    draws = rng.integers(0, 300, (20_000, 300))
    ratios = np.exp(differences[draws].sum(axis=1) / tokens[draws].sum(axis=1))
    found = likelihood_ratio(differences.tolist(), tokens.tolist(), 0.95)
    assert (found.low, found.high) == pytest.approx(tuple(np.quantile(ratios, [0.05, 0.95])), abs=3e-4)


def test_the_interval_of_the_ratio_covers_at_its_level() -> None:
    rng = np.random.default_rng(6)
    covered = []
    for _ in range(4000):
        differences, tokens = likelihoods(rng, 60, 0.03)
        found = likelihood_ratio(differences.tolist(), tokens.tolist(), 0.95)
        covered.append(found.low <= math.exp(0.03) <= found.high)
    assert 0.88 <= np.mean(covered) <= 0.925


def test_an_enormous_ratio_stays_a_number() -> None:
    assert math.isfinite(likelihood_ratio([1e6, 2e6], [1, 1], 0.95).high)


@pytest.mark.parametrize(
    ("drop", "discordant", "wanted"),
    [
        *((0.02, 0.05, 771), (0.02, 0.08, 1235), (0.02, 0.10, 1544), (0.02, 0.15, 2317), (0.02, 0.20, 3090)),
        *((0.03, 0.05, 342), (0.03, 0.08, 548), (0.03, 0.10, 685), (0.03, 0.15, 1029), (0.03, 0.20, 1372)),
    ],
)
def test_sample_sizes_are_connors(drop: float, discordant: float, wanted: int) -> None:
    assert documents_needed(discordant - drop**2, drop, 0.95) == pytest.approx(wanted, abs=1)


def test_the_needed_documents_do_decide_four_times_in_five() -> None:
    n = documents_needed(0.10 - 0.03**2, 0.03, 0.95)
    counts = np.random.default_rng(7).multinomial(n, [0.065, 0.035, 0.90], size=4000)
    seen = np.mean([binary_difference(int(lost), int(won), n, 0.95).low > 0 for lost, won, _ in counts])
    assert 0.77 <= seen <= 0.83


def test_the_detectable_drop_is_that_of_the_published_table() -> None:
    # GSM8K at 0.75 correct and correlation 0.8: discordance 0.075, standard error 0.75 points.
    assert 100 * detectable_difference(0.075, 1319, 0.95) == pytest.approx(1.87, abs=0.02)


@pytest.mark.parametrize(
    ("n", "discordant", "drop", "wanted"),
    [
        (1319, 0.10, 0.00, (0.96, 0.03, 0.01)),
        (1319, 0.10, 0.02, (0.32, 0.19, 0.49)),
        (1319, 0.10, 0.03, (0.05, 0.08, 0.87)),
        (1319, 0.15, 0.00, (0.88, 0.09, 0.03)),
        (500, 0.12, 0.00, (0.61, 0.34, 0.05)),
        (500, 0.12, 0.03, (0.05, 0.34, 0.61)),
        (14042, 0.10, 0.01, (1.0, 0.0, 0.0)),
        (14042, 0.10, 0.03, (0.0, 0.0, 1.0)),
    ],
)
def test_the_rule_decides_as_often_as_is_claimed(
    n: int, discordant: float, drop: float, wanted: tuple[float, float, float]
) -> None:
    rng = np.random.default_rng(8)
    counts = rng.multinomial(n, [(discordant + drop) / 2, (discordant - drop) / 2, 1 - discordant], size=4000)
    found = {"pass": 0, "inconclusive": 0, "fail": 0}
    for lost, won, _ in counts:
        e = binary_difference(int(lost), int(won), n, 0.95)
        found[decide(100 * e.mean, 100 * e.low, 100 * e.high, 2.0, 3.0)] += 1
    assert [count / 4000 for count in found.values()] == pytest.approx(wanted, abs=0.03)
    if drop == 0.03:
        assert found["pass"] / 4000 <= 0.055

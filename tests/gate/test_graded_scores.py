"""The bound of graded scores agrees with a direct martingale implementation and keeps its error rate."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from benchmark_scripts import script_fixture
from gate_samples import GUARD, judge_guard, outcome, part
from hypothesis import given, settings
from hypothesis import strategies as st
from samples import sampled_rows
from scipy import stats

from mergegate.merge_core.errors import InvalidInput
from mergegate.tasks.quality.evaluation import by_task
from mergegate.tasks.quality.evaluation.document_order import DocumentRange
from mergegate.tasks.quality.evaluation.scoring.document_scores import PairedScores
from mergegate.tasks.quality.gate import Guard, graded_difference, graded_documents_needed, graded_scores
from mergegate.tasks.quality.gate.evidence import measure_guard
from mergegate.tasks.quality.gate.graded_scores import refutes
from mergegate.tasks.quality.gate.regression import judge_guards
from mergegate.tasks.quality.gate.sequential import plan_looks

script = script_fixture("error_rates")


def most_wealth(differences: list[float], mean: float, confidence: float) -> float:
    """Return the highest wealth, up to the target, of a bettor on a mean below ``mean``, with a document per step."""
    alpha, n = 1 - confidence, len(differences)
    wealth = most = 1.0
    for t, difference in enumerate(differences):
        seen = differences[:t]
        squares = sum((value - sum(seen) / t) ** 2 for value in seen)
        spread = math.sqrt((0.25 + squares) / (t + 1))
        p = min(max(alpha * wealth / 1.1, 1e-7), 1 - 1e-4)
        stake = float(stats.norm.pdf(stats.norm.ppf(p))) / p / math.sqrt(n - t) / spread
        wealth *= 1 + min(stake, 0.95 / (1 - mean)) * (mean - difference)
        most = max(most, wealth)
        if wealth >= 1 / alpha:
            break
    return most


@pytest.mark.story
@given(st.integers(0, 10_000), st.integers(1, 120), st.sampled_from([0.8, 0.95]))
@settings(max_examples=40)
def test_a_mean_is_refuted_if_a_plain_martingale_reaches_its_target(seed: int, n: int, confidence: float) -> None:
    rng = np.random.default_rng(seed)
    differences = rng.choice([-1.0, -0.2, 0.0, 0.1, 1.0], n, p=[0.05, 0.2, 0.5, 0.2, 0.05])
    means = rng.uniform(-0.2, 0.9, 8)
    wealth = np.array([most_wealth(differences.tolist(), mean, confidence) for mean in means])
    found = refutes(differences, means, confidence, (n,))
    clear = np.abs(np.log(wealth * (1 - confidence))) > 0.02  # the slopes come from a table
    assert (found == (wealth >= 1 / (1 - confidence)))[clear].all()


def crossing(sum_so_far: float, schedule: tuple[int, ...], confidence: float) -> float:
    """Return the probability that a Brownian motion from ``sum_so_far`` is beyond its bound at one of two looks."""
    first, second = plan_looks(schedule, confidence)
    bounds = [stats.norm.ppf(look.confidence) * math.sqrt(look.documents) - sum_so_far for look in (first, second)]
    covariance = [[schedule[0], schedule[0]], [schedule[0], schedule[1]]]
    return 1 - float(stats.multivariate_normal(cov=covariance, abseps=1e-9, releps=1e-9).cdf(bounds))


@pytest.mark.parametrize("sum_so_far", [-15.0, 0.0, 20.0, 40.0])
def test_a_bet_is_the_slope_of_the_chance_to_cross_at_any_look(sum_so_far: float) -> None:
    schedule, step = (400, 1000), 0.5
    chances = [crossing(sum_so_far + by, schedule, 0.95) for by in (-step, 0.0, step)]
    slope = (math.log(chances[2]) - math.log(chances[0])) / (2 * step)
    before_the_first = graded_scores._slopes(schedule, 0.95)[0]
    assert np.interp(math.log(chances[1]), graded_scores._LOG_P, before_the_first) == pytest.approx(slope, rel=0.01)


SHARES = {  # shares of the differences -1, -.5, 0, .5 and 1
    "symmetric": (0.2, 0.1, 0.4, 0.1, 0.2),
    "rare losses": (0.0, 0.0, 0.9, 0.0, 0.1),
    "little wins, great losses": (0.0, 0.7, 0.0, 0.0, 0.3),
}


@pytest.mark.parametrize("schedule", [(6,), (2, 4, 6)])
@pytest.mark.parametrize("shares", SHARES.values(), ids=SHARES.keys())
@pytest.mark.parametrize("confidence", [0.6, 0.8, 0.95])
def test_exact_enumeration_refutes_the_truth_no_more_often_than_allowed(
    schedule: tuple[int, ...], shares: tuple[float, ...], confidence: float
) -> None:
    values = np.array([-1, -0.5, 0, 0.5, 1])
    every = np.array(list(product(range(5), repeat=6)))
    chances = np.prod(np.asarray(shares)[every], axis=1)
    assert chances.sum() == pytest.approx(1)
    truth = float(values @ np.asarray(shares))
    wrong = refutes(values[every], truth, confidence, schedule)
    assert float(chances @ wrong) <= 1 - confidence + 1e-12
    if confidence == 0.6 and shares == SHARES["symmetric"]:
        assert wrong.any()


@pytest.mark.story
def test_bets_are_finite_for_every_plan() -> None:
    for schedule in ((1,), (2, 3), (10, 20, 40, 80, 160, 14042), (5000, 5001)):
        for confidence in (0.6, 0.95, 0.9999):
            slopes = graded_scores._slopes(schedule, confidence)
            assert np.isfinite(slopes).all()
            assert (slopes >= 0).all()
            assert slopes[-1].max() > 0


def test_a_batch_of_samples_is_judged_like_single_samples() -> None:
    samples = np.random.default_rng(1).normal(-0.03, 0.2, (30, 80)).clip(-1, 1)
    one_by_one = [bool(refutes(sample, np.array([0.03]), 0.95, (80,))[0]) for sample in samples]
    assert refutes(samples, 0.03, 0.95, (80,)).tolist() == one_by_one
    assert 0 < sum(one_by_one) < 30


@settings(max_examples=40)
@given(st.lists(st.sampled_from([-1.0, -0.3, 0.0, 0.01, 0.7, 1.0]), min_size=1, max_size=60))
def test_bounds_contain_the_mean_and_are_symmetric(differences: list[float]) -> None:
    found = graded_difference(differences, 0.95)
    other = graded_difference([-value for value in differences], 0.95)
    assert -1 <= found.low <= found.mean <= found.high <= 1
    assert (other.low, other.high) == pytest.approx((-found.high, -found.low))


def test_every_mean_above_the_bound_is_refuted() -> None:
    differences = np.random.default_rng(2).choice([0.0, 1.0, -0.05], 300, p=[0.5, 0.03, 0.47])
    found = graded_difference(differences, 0.95)
    above = np.linspace(found.high + 1e-9, 0.999, 2000)
    assert refutes(differences, above, 0.95, (300,)).all()
    assert not refutes(differences, np.array([found.high - 0.0011]), 0.95, (300,)).any()


def test_a_mean_refuted_at_an_early_look_stays_refuted() -> None:
    differences = np.random.default_rng(3).normal(-0.02, 0.15, 400).clip(-1, 1)
    differences[100:] += 0.1  # as if the first hundred were lucky
    schedule = (100, 400)
    highs = [graded_difference(differences[:n], 0.95, schedule).high for n in schedule]
    assert highs[1] <= max(highs[0], float(differences.mean()))


def test_near_normal_scores_have_nearly_students_interval() -> None:
    differences = np.random.default_rng(4).normal(0.01, 0.2, 2000).clip(-1, 1)
    student = stats.ttest_1samp(differences, 0).confidence_interval(0.90)
    found = graded_difference(differences, 0.95)
    assert found.high - found.low == pytest.approx(student.high - student.low, rel=0.1)


def test_a_sample_without_differences_has_a_wide_enough_bound() -> None:
    found = graded_difference([0.0] * 200, 0.95)
    assert 0.013 < found.high < 0.02
    assert 0.985**200 < 0.05  # at 95% confidence, at most 1.5% of documents lose everything
    # Fifty documents cannot show it.
    assert graded_difference([0.0] * 50, 0.95).high > 0.03


def test_documents_needed_is_the_minimum_if_all_documents_agree() -> None:
    n = graded_documents_needed(0.0, 0.03, 0.95)
    highs = [graded_difference([0.0] * count, 0.95).high for count in (n - 1, n)]
    assert highs[1] <= 0.03 < highs[0]


def test_invalid_differences_are_rejected() -> None:
    for value in (1.5, math.nan):
        with pytest.raises(ValueError, match=r"must be in \[-1, 1\]"):
            graded_difference([0.0, value], 0.95)
    with pytest.raises(ValueError, match="3 differences, but 2 were planned"):
        graded_difference([0.0] * 3, 0.95, (1, 2))


# --- The tables in dev/measurements


SHAPED = ("F1, mass at 0 and 1", "rare great losses", "19 of 20 tie", "subjects apart")


@pytest.mark.parametrize(
    ("shape", "n", "parts"),
    sampled_rows(product(SHAPED, (100, 500), (1, 4)), [(SHAPED[1], 100, 4), (SHAPED[3], 100, 1)]),
)
def test_graded_merges_at_the_margin_are_published_in_at_most_5_percent(
    script: ModuleType, shape: str, n: int, parts: int
) -> None:
    schedule = script.interim_looks(n, math.ceil(n / parts))
    found = script.published(script.SHAPES[shape], 0.03, schedule, 2000, np.random.default_rng(5))
    assert found.ours <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / 2000)


# --- In a guard


def graded_pair(n: int, by: float, scale: float = 1.0) -> PairedScores:
    rng = np.random.default_rng(8)
    reference = rng.beta(5, 2, n) * 0.8 + 0.1
    merge = (reference - by + rng.normal(0, 0.1, n)).clip(0, 1)
    return PairedScores(tuple(("t", i) for i in range(n)), tuple(scale * reference), tuple(scale * merge))


def test_scores_of_another_range_are_judged_on_that_range() -> None:
    plain = judge_guard(GUARD, "f1,none", graded_pair(300, 0.01))
    percent = GUARD.model_copy(update={"score_range": (0.0, 100.0)})
    scaled = judge_guard(percent, "f1,none", graded_pair(300, 0.01, 100.0))
    assert (scaled.drop, scaled.low, scaled.high) == pytest.approx((plain.drop, plain.low, plain.high))
    assert scaled.reference_score == pytest.approx(plain.reference_score)
    assert scaled.outcome == plain.outcome


@pytest.mark.parametrize(("score", "message"), [(1.2, "1.2"), (math.nan, "nan"), (math.inf, "inf"), (-0.1, "-0.1")])
def test_an_impossible_score_is_reported_with_model_task_and_document(score: float, message: str) -> None:
    found = graded_pair(50, 0.0)
    broken = PairedScores(found.documents, found.reference, (*found.merge[:7], score, *found.merge[8:]))
    with pytest.raises(InvalidInput) as raised:
        measure_guard(GUARD, "f1,none", broken, True)
    assert raised.value.where == "reverse: f1,none of the merge"
    assert raised.value.found == f"{message} for document 7 of t"
    assert raised.value.expected == "a number from 0 to 1"
    assert ("score_range" in raised.value.remedy) == math.isfinite(score)


def test_rounding_beyond_the_score_range_is_accepted() -> None:
    found = graded_pair(50, 0.0)
    rounded = PairedScores(found.documents, found.reference, (*found.merge[:7], 1.0 + 2e-16, -1e-17, *found.merge[9:]))
    assert max(map(abs, measure_guard(GUARD, "f1,none", rounded, True).differences)) <= 1


@pytest.mark.parametrize("wrong", [(1.0, 0.0), (0.0, 0.0), (0.0, math.inf)])
def test_an_invalid_score_range_is_rejected(wrong: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="is not a range"):
        Guard(task="t", guarded_by="a", score_range=wrong)


def test_bounds_of_graded_scores_are_not_corrected_for_looks_a_second_time() -> None:
    found = graded_pair(100, 0.0)
    schedule = (100, 200)
    evidence = measure_guard(GUARD, "f1,none", found, True, schedule=schedule)
    (verdict,) = judge_guards([evidence], 0.95)
    wanted = graded_difference(evidence.differences, 0.95, schedule)
    assert verdict.high == pytest.approx(100 * wanted.high)


def test_documents_are_in_scoring_order(tmp_path: Path) -> None:
    first = part(tmp_path / "1", [outcome(doc) for doc in range(0, 400, 2)])
    second = part(tmp_path / "2", [outcome(doc) for doc in range(1, 100, 2)])
    parts = [
        replace(one, value=one.value.model_copy(update={"part": DocumentRange(first=begin, last=end)}))
        for one, begin, end in ((first, 200, 400), (second, 0, 50))
    ]
    rows = [row.doc_id for row in by_task("x", parts)["reverse"].rows]
    assert set(rows[:200]) == set(range(0, 400, 2))  # the first look: the sample starts at position 200
    assert rows[:200] != sorted(rows[:200])
    halves = np.array(rows[:200]).reshape(2, 100).mean(axis=1)
    assert abs(halves[0] - halves[1]) < 60  # shuffled; in ascending order they would be 200 apart

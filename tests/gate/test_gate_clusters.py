"""Cluster intervals use the CR2 error and a quantile that covers skewed and unequal clusters; too few are refused."""

from __future__ import annotations

import math
from itertools import product
from types import ModuleType

import numpy as np
import pytest
import statsmodels.api as sm
from benchmark_scripts import script_fixture
from gate_samples import GUARD, judge_guard, paired
from samples import sampled, sampled_rows
from scipy import stats

from mergegate.merge_core.errors import InvalidInput
from mergegate.tasks.quality.evaluation.scoring.document_scores import PairedScores
from mergegate.tasks.quality.gate import clusters
from mergegate.tasks.quality.gate.clusters import (
    check_clusters,
    clustered_difference,
    critical_value,
    effective_clusters,
)
from mergegate.tasks.quality.gate.graded_scores import graded_difference
from mergegate.tasks.quality.gate.settings import Guard
from mergegate.tasks.quality.gate.statistics import Difference, binary_bounds

UNEQUAL = (20, 30, 30, 50, 80, 120)
script = script_fixture("error_rates")


def in_clusters(
    rng: np.random.Generator, sizes: tuple[int, ...], shared: float, mean: float = 0.02
) -> tuple[np.ndarray, list[str]]:
    """Return differences in clusters, with a component that all members of a cluster share."""
    members = np.repeat(np.arange(len(sizes)), sizes)
    differences = mean + rng.normal(0, shared, len(sizes))[members] + rng.normal(0, 0.2, len(members))
    return differences.clip(-1, 1), [f"passage {member}" for member in members]


def textbook_error(differences: np.ndarray, members: list[str]) -> float:
    """Return the CR2 error of a regression on a constant: residuals times the inverse root of their block of I - H."""
    x = np.ones((len(differences), 1))
    bread = np.linalg.inv(x.T @ x)
    hat = x @ bread @ x.T
    residuals = differences - differences.mean()
    meat = 0.0
    for name in set(members):
        own = np.flatnonzero(np.asarray(members) == name)
        values, vectors = np.linalg.eigh(np.eye(len(own)) - hat[np.ix_(own, own)])
        adjusted = vectors @ np.diag(values**-0.5) @ vectors.T @ residuals[own]
        meat += float(x[own, 0] @ adjusted) ** 2
    return math.sqrt(float(bread[0, 0]) * meat * float(bread[0, 0]))


def test_the_error_is_the_textbook_cr2() -> None:
    differences, members = in_clusters(np.random.default_rng(1), UNEQUAL, 0.1)
    sizes = np.array(UNEQUAL)
    means = np.array([part.mean() for part in np.split(differences, np.cumsum(sizes)[:-1])])
    found = float(clusters.cluster_errors(means - differences.mean(), sizes))
    assert found == pytest.approx(textbook_error(differences, members), rel=1e-9)


def test_the_error_of_equal_clusters_matches_a_clustered_regression() -> None:
    sizes = (50,) * 20
    differences, members = in_clusters(np.random.default_rng(2), sizes, 0.1)
    groups = np.unique(members, return_inverse=True)[1]
    fit = sm.OLS(differences, np.ones(1000)).fit(cov_type="cluster", cov_kwds={"groups": groups})
    plain = graded_difference(differences, 0.95)
    found = clustered_difference(differences.tolist(), members, plain, 0.95)
    half = critical_value(sizes, 0.95) * float(fit.bse[0])
    assert (found.low, found.high) == pytest.approx((differences.mean() - half, differences.mean() + half))
    assert found.high - found.low > 1.5 * (plain.high - plain.low)


@pytest.mark.parametrize("count", sampled([14, 57], [14]))
def test_the_quantile_of_equal_normal_clusters_is_students(count: int) -> None:
    normal, noise, *_ = clusters._ratios((100,) * count)
    for ratios in (normal, noise):
        assert stats.kstest(ratios, stats.t(count - 1).cdf).statistic < 0.006
    # The quantile in use is larger, because effects may be skewed.
    assert critical_value((100,) * count, 0.95) > 1.2 * stats.t.ppf(0.95, count - 1)


@pytest.mark.parametrize(
    ("sizes", "confidence"),
    sampled_rows(product(((50,) * 20, (50,) * 30, tuple(range(10, 210, 10))), (0.9, 0.99)), [((50,) * 20, 0.9)]),
)
def test_the_quantile_holds_for_other_draws_of_each_kind(sizes: tuple[int, ...], confidence: float) -> None:
    rng = np.random.default_rng(3)
    value, weights = critical_value(sizes, confidence), np.array(sizes) / sum(sizes)
    error = math.sqrt(confidence * (1 - confidence) / 40_000)
    shape = (40_000, len(sizes))
    for effects in (rng.gamma(1, 1, shape) - 1, rng.normal(0, 1, shape), rng.binomial(1, 0.25, shape) - 0.25):
        means = effects @ weights
        ratios = means / (np.sqrt(((effects - means[:, None]) ** 2) @ (weights**2 / (1 - weights))) + 1e-12)
        assert np.mean(ratios < -value) <= 1 - confidence + 3 * error
        assert np.mean(ratios > value) <= 1 - confidence + 3 * error


def test_a_quantile_that_cannot_be_simulated_decides_nothing() -> None:
    assert critical_value((50,) * 20, 1 - 1e-9) == math.inf
    differences, members = in_clusters(np.random.default_rng(4), (50,) * 20, 0.0, mean=0.0)
    found = clustered_difference(differences.tolist(), members, graded_difference(differences, 0.95), 1 - 1e-9)
    assert (found.low, found.high) == (-1.0, 1.0)


def test_the_clustered_interval_is_never_narrower_than_without_clusters() -> None:
    differences = [0.5, -0.5] * 50  # every cluster sums to zero, so clusters seem not to differ
    plain = graded_difference(differences, 0.95)
    assert clustered_difference(differences, [str(i // 2) for i in range(100)], plain, 0.95) == plain


@pytest.mark.parametrize(
    ("sizes", "wanted"),
    [((7,) * 9, 9.0), ((1, 1, 2), 16 / 6), ((10,), 1.0), ((50,) * 19 + (950,), 1 / (0.25 + 19 / 38**2))],
)
def test_unequal_clusters_count_as_fewer(sizes: tuple[int, ...], wanted: float) -> None:
    assert effective_clusters(sizes) == pytest.approx(wanted)


def test_too_few_clusters_are_rejected_with_a_remedy() -> None:
    with pytest.raises(InvalidInput) as raised:
        check_clusters(["a"] * 500 + [f"b{i % 19}" for i in range(500)], "task", "mmlu")
    assert raised.value.found == "20 clusters that count as 3.8 of equal size (a has 50 % of the documents)"
    assert raised.value.expected.startswith("14 or more")
    assert "population: new questions" in raised.value.remedy
    check_clusters([str(i % 14) for i in range(140)], "task", "mmlu")


# --- The tables in dev/measurements


NAMES, EFFECTS = ("14 equal", "20 equal", "30 unequal", "57 of MMLU"), ("normal", "skewed", "a fifth falls")


@pytest.mark.parametrize(
    ("name", "effects", "binary"),
    sampled_rows(
        product(NAMES, EFFECTS, (True, False)), [(NAMES[1], "skewed", True), (NAMES[0], "a fifth falls", False)]
    ),
)
def test_clustered_merges_at_the_margin_are_published_in_at_most_5_percent(
    script: ModuleType, name: str, effects: str, binary: bool
) -> None:
    for spread in (0.0, 0.06, 0.1):
        rng = np.random.default_rng(5)
        found = script.clusters_published(script.SIZES[name], 0.03, spread, effects, binary, 4000, rng)
        assert found.ours <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / 4000)


@pytest.mark.story
@pytest.mark.parametrize("spread", [0.0, 0.06])
def test_the_table_decides_like_the_interval_of_a_single_sample(script: ModuleType, spread: float) -> None:
    # The script vectorizes over samples; this test passes one sample at a time to the gate's interval.
    sizes, runs, passed, rng = (60,) * 20, 300, 0, np.random.default_rng(7)
    for _ in range(runs):
        differences, members = in_clusters(rng, sizes, spread, mean=0.0)
        plain = Difference(differences.mean(), differences.mean(), differences.mean(), 0.0)  # as in the script
        passed += clustered_difference(differences.tolist(), members, plain, 0.95).high <= 0.03
    many = script.clusters_published(sizes, 0.0, spread, "normal", False, 20_000, np.random.default_rng(8)).ours
    assert passed / runs == pytest.approx(many, abs=4 * math.sqrt(many * (1 - many) / runs))


# --- In a guard


def subjects(count: int, each: int, *lost: int) -> PairedScores:
    """Return clustered pairs in which only the reference gets the first ``lost[i]`` documents of subject i right."""
    documents = tuple((f"subject {doc // each}", doc) for doc in range(count * each))
    counts = (*lost, *[0] * (count - len(lost)))
    merge = tuple(0.0 if doc % each < counts[doc // each] else 1.0 for doc in range(count * each))
    return PairedScores(documents, (1.0,) * len(documents), merge)


def test_each_population_has_its_verdict() -> None:
    # Of twenty subjects, three account for all losses: a real drop for new questions, but chance for new subjects.
    # No subject has lost enough to raise an alarm on its own.
    found = subjects(20, 50, 11, 11, 11)
    of_questions, of_subjects, by_task = (
        judge_guard(Guard(task="t", guarded_by="a", max_drop=3, **unit), "acc,none", found)
        for unit in ({"population": "new questions"}, {"population": "new subjects"}, {"cluster_by": "task"})
    )
    assert (of_questions.outcome, of_subjects.outcome) == ("fail", "inconclusive")
    assert (of_questions.clusters, of_subjects.clusters) == (None, 20)
    assert of_subjects.low < 0 < of_questions.low
    assert of_questions.drop == of_subjects.drop
    assert of_subjects == by_task


def test_clusters_are_read_from_the_field_that_was_recorded() -> None:
    found = subjects(2, 500, 20)
    fields = PairedScores(found.documents, found.reference, found.merge, tuple(str(i % 20) for i in range(1000)))
    guard = Guard(task="t", guarded_by="a", cluster_by="category")
    for unit in (guard, guard.model_copy(update={"population": "new subjects"})):
        assert judge_guard(unit, "acc,none", fields).clusters == 20
    with pytest.raises(InvalidInput, match="'category', which some documents lack"):
        judge_guard(guard, "acc,none", found)


@pytest.mark.parametrize("unit", [{"population": "new subjects"}, {"cluster_by": "task"}])
def test_a_single_cluster_is_rejected(unit: dict[str, str]) -> None:
    with pytest.raises(InvalidInput, match=r"all documents in one cluster \(reverse\)"):
        judge_guard(GUARD.model_copy(update=unit), "acc,none", paired(1, 0, 200))


@pytest.mark.parametrize("spread", [0.0, 0.1])
def test_new_questions_need_no_clusters(spread: float) -> None:
    # With fixed stratum weights, the interval over documents counts differences between strata as noise, so it is safe.
    rng = np.random.default_rng(9)
    sizes = np.array([300, 100, 100, 50, 50, 400])
    lost_by = 0.03 + spread * np.array([1.0, -1.0, 1.0, -1.0, 1.0, -0.75])
    assert float(sizes @ lost_by) / 1000 == pytest.approx(0.03)
    changed = np.maximum(0.1, np.abs(lost_by))
    lost = rng.binomial(sizes, (changed + lost_by) / 2, (20_000, 6)).sum(axis=1).astype(float)
    won = rng.binomial(sizes, (changed - lost_by) / 2, (20_000, 6)).sum(axis=1).astype(float)
    assert np.mean(binary_bounds(lost, won, 1000, 0.95)[1] < 0.03) <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / 20_000)

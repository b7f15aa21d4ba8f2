"""Test the confirmation of a sweep's winner: its error rate is the declared one, and its power is stated in advance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from scipy.stats import multivariate_normal, norm, ttest_rel
from toy_search import COPY, REV, ToyModels, search_toy, toy_objective, toy_settings

from mergegate.merge_core.errors import InvalidInput
from mergegate.merge_core.files import RecordJournal
from mergegate.tasks.sweep import Confirmation, Ledger, Study, Trial, confirm, reason_not_to_confirm
from mergegate.tasks.sweep.confirmation import MIN_P_VALUE, both_right, confirmation_power
from mergegate.tasks.sweep.objective import MetricKey, Objective, ScoresByMetric, Term

LOG = MetricKey("rev", "log_likelihood")


def trial(number: int, score: float, origin: str = "sampler", **more: Any) -> Trial:
    return Trial(number, 0, origin, "ties" if origin == "hand-written" else "", {}, (score,), **more)


@cache
def small_study() -> Study:
    """Run a small toy study. A test replaces the parts that it examines."""
    return search_toy(ToyModels(), Ledger(RecordJournal(None), ""), toy_settings(budget={"trials": 4}))


def study_of(objective: Objective, searched: float = 0.9, by_hand: float = 0.8, **more: Any) -> Study:
    reference, best = trial(0, by_hand, "hand-written"), trial(1, searched, **more)
    tables = {
        number: {key: np.full(8, one.scores[0]) for key in objective.metric_keys}
        for number, one in enumerate((reference, best))
    }
    return replace(
        small_study(),
        settings=toy_settings(confidence=0.95),
        objective=objective,
        trials=(reference, best),
        best=best if not np.isnan(searched) else None,
        tables=tables,
    )


def compared(winner: ScoresByMetric, reference: ScoresByMetric, *terms: Term, clusters: Any = None) -> Confirmation:
    return confirm(study_of(Objective(terms)), winner, reference, clusters)


def binary(rng: np.random.Generator, n: int, gain: float) -> tuple[ScoresByMetric, ScoresByMetric]:
    reference = (rng.random(n) < 0.7) * 1.0
    winner = np.where(rng.random(n) < gain, 1.0, reference)
    return {REV: winner}, {REV: reference}


def test_a_clear_gain_is_confirmed_and_its_opposite_is_not() -> None:
    winner, reference = binary(np.random.default_rng(0), 400, 0.3)
    one, turned = compared(winner, reference, Term(REV, 1.0)), compared(reference, winner, Term(REV, 1.0))
    assert (one.confirmed, one.p_value) == (True, MIN_P_VALUE)
    verdict = one.as_verdict()
    assert (verdict.outcome, verdict.publishable, verdict.reasons) == ("pass", True, ())
    assert "above ties on 400 held-out documents" in one.sentence()
    assert one.optimism == pytest.approx(0.9 - one.held_out)
    assert one.searched - one.searched_reference == pytest.approx(0.1)
    assert (turned.confirmed, turned.p_value) == (False, 1)
    verdict = turned.as_verdict()
    assert (verdict.outcome, verdict.publishable) == ("fail", False)
    assert verdict.reasons[0].startswith("no candidate confirmed: trial 1: ")
    assert "below ties" in verdict.reasons[0]


def test_the_p_value_is_the_error_at_which_the_bound_is_zero() -> None:
    for seed in range(6):
        winner, reference = binary(np.random.default_rng(seed), 300, 0.03)
        one = compared(winner, reference, Term(REV, 1.0))
        assert one.confirmed == (one.p_value <= 0.05)
        lost, won = (winner[REV] < reference[REV]).sum(), (winner[REV] > reference[REV]).sum()
        mcnemar = norm.sf((won - lost) / np.sqrt(won + lost))
        assert mcnemar * 0.95 <= one.p_value < max(4 * mcnemar, 0.05)


def test_scores_without_a_known_range_are_tested_with_students_interval() -> None:
    rng = np.random.default_rng(1)
    for shift in (0.0, 0.02, 0.06):
        reference = -rng.exponential(0.2, 400)
        winner = reference + rng.normal(shift, 0.3, 400)
        one = compared({LOG: winner}, {LOG: reference}, Term(LOG, 1.0))
        expected = ttest_rel(winner, reference, alternative="greater").pvalue
        assert one.p_value == pytest.approx(expected, rel=0.05, abs=1e-6) or (expected >= 0.5 and one.p_value >= 0.5)


def test_likelihoods_are_clipped_and_their_bound_holds_with_heavy_tails() -> None:
    reference = -np.random.default_rng(2).random(400) * 0.05
    winner = reference + 0.004
    winner[7] = -40.0
    term = Term(LOG, 1.0, clip=0.1)
    one = compared({LOG: winner}, {LOG: reference}, term)
    assert one.gain == pytest.approx(0.004 * 399 / 400 - (0.1 + reference[7]) / 400)
    assert one.confirmed
    # Three documents in a hundred lose everything and the others gain a little, so the true gain is zero.
    wrong = 0
    for seed in range(8):
        draw = np.random.default_rng([3, seed])
        loses = draw.random(200) < 0.03
        theirs = np.full(200, -0.05)
        ours = np.where(loses, -0.1, theirs + 0.05 * 0.03 / 0.97)
        wrong += compared({LOG: ours}, {LOG: theirs}, term).confirmed
    assert wrong <= 2


def test_tasks_are_weighted() -> None:
    rng = np.random.default_rng(4)
    winner, reference = binary(rng, 400, 0.2)
    flat = (rng.random(50) < 0.5) * 1.0
    one = compared({**winner, COPY: flat}, {**reference, COPY: flat}, Term(REV, 0.25), Term(COPY, 0.75))
    alone = compared(winner, reference, Term(REV, 1.0))
    assert one.gain == pytest.approx(0.25 * alone.gain)
    assert one.documents == 450
    assert one.terms[1].gain == 0


@pytest.mark.proof
def test_false_confirmations_are_within_the_configured_error() -> None:
    rng = np.random.default_rng(5)
    runs, wrong = 250, 0
    for _ in range(runs):
        tables: list[dict[MetricKey, Any]] = [{}, {}]
        for key in (REV, COPY):
            shared = rng.standard_normal(150)
            for table in tables:
                table[key] = (0.77 * shared + 0.63 * rng.standard_normal(150) < 0.8) * 1.0
        wrong += compared(tables[0], tables[1], Term(REV, 0.5), Term(COPY, 0.5)).low > 0
    assert 0.01 < wrong / runs < 0.07


def test_documents_of_a_cluster_widen_the_interval() -> None:
    rng = np.random.default_rng(6)
    by_cluster = rng.normal(0.05, 0.2, 20)
    reference = np.full(400, 0.5)
    winner = np.clip(reference + np.repeat(by_cluster, 20), 0, 1)
    key = MetricKey("rev", "probability")
    names: Sequence[str] = [str(i) for i in np.repeat(np.arange(20), 20)]
    alone = compared({key: winner}, {key: reference}, Term(key, 1.0))
    clustered = compared({key: winner}, {key: reference}, Term(key, 1.0, cluster_by="passage"), clusters={key: names})
    assert clustered.low < alone.low
    assert clustered.terms[0].clusters == 20
    with pytest.raises(InvalidInput, match="cluster"):
        compared({key: winner}, {key: reference}, Term(key, 1.0, cluster_by="passage"))


def test_unpaired_score_tables_are_rejected() -> None:
    with pytest.raises(InvalidInput, match="the same 4 documents"):
        compared({REV: np.ones(4)}, {REV: np.ones(3)}, Term(REV, 1.0))
    with pytest.raises(InvalidInput, match="3 and 4 documents"):
        compared({REV: np.array([1, 1, 1, np.nan])}, {REV: np.ones(4)}, Term(REV, 1.0))


@pytest.mark.parametrize(
    ("searched", "more", "message"),
    [
        (0.8, {}, "no candidate scored above ties"),
        (0.79, {}, "no candidate scored above ties"),
        (float("nan"), {}, "none of 1 candidates has a score"),
        (0.9, {"violation": 0.1}, "every candidate violates the constraints more"),
    ],
)
def test_a_winner_without_a_gain_on_the_search_documents_is_not_tested(
    searched: float, more: Any, message: str
) -> None:
    nothing = reason_not_to_confirm(study_of(toy_objective(toy_settings()), searched, **more))
    assert nothing.as_verdict().reasons[0].startswith(f"no candidate confirmed: {message}")
    assert reason_not_to_confirm(study_of(toy_objective(toy_settings()), 0.9)) is None


@pytest.mark.parametrize("right", [0.3, 0.8, 0.97])
def test_the_chance_that_both_are_right_matches_the_bivariate_normal(right: float) -> None:
    pair = multivariate_normal([0, 0], [[1, 0.6], [0.6, 1]])
    assert both_right(right, 0.6) == pytest.approx(pair.cdf([norm.ppf(right)] * 2), abs=1e-4)


@pytest.mark.story
def test_the_forecast_power_matches_the_test() -> None:
    """The forecast matches simulated winners and two known values.

    With 400 documents and 80 % correct answers, the power is 24 % for a gain of 2 points and 71 % for 5 points.
    """
    rng = np.random.default_rng(7)
    objective = Objective((Term(REV, 1.0),))
    table = {REV: (np.arange(400) < 320) * 1.0}
    power = confirmation_power(objective, [table], {REV: 400}, 0.95)
    chances = {round(one.gain, 2): one.chance for one in power.chances}
    assert chances[0.02] == pytest.approx(0.24, abs=0.05)
    assert chances[0.05] == pytest.approx(0.71, abs=0.06)
    confirmed = 0
    for _ in range(120):
        shared = rng.standard_normal(400) * np.sqrt(0.6)
        drawn = [shared + np.sqrt(0.4) * rng.standard_normal(400) < norm.ppf(q) for q in (0.8 + power.detectable, 0.8)]
        confirmed += compared({REV: drawn[0] * 1.0}, {REV: drawn[1] * 1.0}, Term(REV, 1.0)).confirmed
    assert confirmed / 120 == pytest.approx(0.8, abs=0.1)
    assert "400 held-out documents confirm a true lead of" in power.sentence()
    assert "have a correlation of 0.6" in power.sentence()


def test_the_power_of_scores_without_a_range_is_in_their_own_unit() -> None:
    rng = np.random.default_rng(8)
    power = confirmation_power(Objective((Term(LOG, 1.0),)), [{LOG: -rng.exponential(0.02, 300)}], {LOG: 400}, 0.95)
    assert not power.in_points
    assert power.detectable == pytest.approx((1.645 + 0.842) * np.sqrt(0.8) * 0.02 / 20, rel=0.2)
    saturated = confirmation_power(Objective((Term(REV, 1.0),)), [{REV: np.ones(300)}], {REV: 400}, 0.95)
    assert saturated.detectable > 0

"""Candidates have scores; racing drops hopeless ones, and equally good ones only at the declared error rate."""

from __future__ import annotations

import math
import pickle
from typing import Any

import numpy as np
import pytest
from scipy.stats import norm
from toy_search import WEIGHT

from mergegate.merge_core.errors import InvalidInput
from mergegate.tasks.sweep import MetricKey, Racing, SweepSettings, Term, Trial, cumulative_shares, make_objective
from mergegate.tasks.sweep.objective import Limit, Objective, Race, best_third, halving_rounds, spent_error
from mergegate.tasks.sweep.study import best_of, front, rank

REV, COPY = MetricKey("rev", "exact"), MetricKey("copy", "exact")
LOOKS = cumulative_shares(Racing(first=0.125))


def first(table: dict[MetricKey, Any], share: float) -> dict[MetricKey, Any]:
    return {key: numbers[: int(np.ceil(share * len(numbers)))] for key, numbers in table.items()}


def dropped_at(race: Race, table: dict[MetricKey, Any]) -> int | None:
    return next((i for i, share in enumerate(race.looks) if race.should_drop(first(table, share), i)), None)


def test_looks_double_until_all_documents() -> None:
    assert LOOKS == (0.125, 0.25, 0.5, 1.0)
    assert cumulative_shares(Racing(first=0.3)) == (0.3, 0.6, 1.0)
    assert cumulative_shares(Racing(first=1.0)) == (1.0,)


def test_the_error_is_spent_before_the_last_look_like_obrien_fleming() -> None:
    spent = [spent_error(look, 3, 0.05) for look in range(3)]
    assert sum(spent) == pytest.approx(0.05)
    assert spent[0] == pytest.approx(2 * norm.sf(norm.isf(0.025) * np.sqrt(3)))
    assert spent == sorted(spent)


@pytest.mark.story
def test_an_equal_candidate_is_dropped_no_more_often_than_the_error() -> None:
    rng = np.random.default_rng(0)
    dropped = 0
    for _ in range(2000):
        right = rng.random(400) < 0.8
        tables = [{REV: np.where(rng.random(400) < 0.3, rng.random(400) < 0.8, right) * 1.0} for _ in range(2)]
        dropped += dropped_at(Race(tables[0], {REV: 1.0}, LOOKS), tables[1]) is not None
    # All candidates are truly equal, so the rate is 5 %, give or take the noise of 2,000 draws.
    assert 0.02 < dropped / 2000 < 0.065


def test_a_hopeless_candidate_is_dropped_at_the_first_look() -> None:
    rng = np.random.default_rng(1)
    incumbent = {REV: (rng.random(400) < 0.9) * 1.0}
    race = Race(incumbent, {REV: 1.0}, LOOKS)
    assert dropped_at(race, {REV: (rng.random(400) < 0.3) * 1.0}) == 0
    assert dropped_at(race, {REV: np.ones(400)}) is None
    assert dropped_at(race, incumbent) is None
    assert not race.should_drop({REV: np.zeros(400)}, 3)  # dropping a candidate at the last look would save nothing


def test_tasks_count_by_weight_and_not_by_number_of_documents() -> None:
    rng = np.random.default_rng(2)
    half, other = (rng.random(800) < 0.5) * 1.0, (rng.random(100) < 0.5) * 1.0
    incumbent = {REV: half, COPY: other}
    candidate = {
        REV: np.maximum(half - (rng.random(800) < 0.2), 0),
        COPY: np.minimum(other + (rng.random(100) < 0.6), 1),
    }
    assert dropped_at(Race(incumbent, {REV: 0.5, COPY: 0.5}, LOOKS), candidate) is None
    assert dropped_at(Race(incumbent, {REV: 0.95, COPY: 0.05}, LOOKS), candidate) is not None
    race = Race(incumbent, {REV: 0.5, COPY: 0.5}, LOOKS)
    expected = (candidate[REV] - half).mean() / 2 + (candidate[COPY] - other).mean() / 2
    assert race.difference(candidate) == pytest.approx(expected)


def test_a_clipped_outlier_does_not_drop_a_candidate() -> None:
    key = MetricKey("rev", "log_likelihood")
    rng = np.random.default_rng(3)
    incumbent = {key: -rng.random(200) * 0.05}
    candidate = {key: incumbent[key] + 0.001}
    candidate[key][3] = -50.0
    race = Race(incumbent, {key: 1.0}, LOOKS, clips={key: 0.1})
    assert race.difference(candidate) > 0
    assert dropped_at(race, candidate) is None


def test_the_incumbents_penalty_is_a_lead_for_the_candidate() -> None:
    incumbent = {REV: np.ones(400)}
    candidate = {REV: (np.random.default_rng(4).random(400) > 0.1) * 1.0}
    assert dropped_at(Race(incumbent, {REV: 1.0}, LOOKS), candidate) is not None
    assert dropped_at(Race(incumbent, {REV: 1.0}, LOOKS, lead=0.1), candidate) is None


def test_too_few_documents_never_drop_a_candidate() -> None:
    assert not Race({REV: np.ones(24)}, {REV: 1.0}, LOOKS).should_drop({REV: np.zeros(3)}, 0)


def test_a_race_can_be_pickled_and_its_digest_covers_its_rule() -> None:
    race = Race({REV: np.ones(4)}, {REV: 1.0}, LOOKS)
    assert pickle.loads(pickle.dumps(race)).digest() == race.digest()
    others = [
        Race({REV: np.array([1.0, 1.0, 1.0, 0.0])}, {REV: 1.0}, LOOKS),
        Race({REV: np.ones(4)}, {REV: 1.0}, LOOKS, 0.01),
        Race({REV: np.ones(4)}, {REV: 1.0}, (0.5, 1.0)),
        Race({REV: np.ones(4)}, {REV: 1.0}, LOOKS, lead=0.1),
        Race({REV: np.ones(4)}, {REV: 1.0}, LOOKS, clips={REV: 1.0}),
        Race({}, {}, (0.5, 1.0)),
    ]
    assert len({one.digest() for one in [race, *others]}) == 7


def test_halving_keeps_a_third_of_the_candidates_for_three_times_the_documents() -> None:
    first_round, second_round, last_round = halving_rounds(Racing(rule="halving", first=0.1))
    assert last_round is None
    assert first_round.looks == (pytest.approx(1 / 9), 1.0)
    assert second_round.looks == (pytest.approx(1 / 3), 1.0)
    assert halving_rounds(Racing(rule="halving", first=0.5)) == (None,)
    assert best_third([4, 0, 2, 2, 9, 1]) == (1, 5)
    assert best_third([0]) == (0,)
    assert first_round.should_drop({REV: np.ones(3)}, 0)
    assert not first_round.should_drop({REV: np.ones(27)}, 1)


LOG, TEXT = MetricKey("rev", "log_likelihood"), MetricKey("", "log_likelihood")
NAN = math.nan


def read(*terms: dict[str, Any], **more: Any) -> Objective:
    settings = {"objective": list(terms), "parameters": {"w": WEIGHT}, **more}
    return make_objective(SweepSettings.model_validate(settings), {"rev.yaml": "rev", "copy": "copy"})


def trial(number: int, *scores: float, **more: Any) -> Trial:
    return Trial(number, 0, "sampler", "", {}, scores, **more)


def test_the_score_is_the_weighted_clipped_mean_minus_the_change_penalty() -> None:
    objective = read(
        {"task": "rev.yaml", "weight": 3, "clip": 0.1}, {"task": "copy", "measure": "exact"}, change_penalty=0.5
    )
    table = {LOG: np.array([-0.05, -7.0]), COPY: np.array([1.0, 0.0, 1.0, 1.0])}
    assert objective.scores(table, 0.02) == (pytest.approx(0.75 * (-0.05 - 0.1) / 2 + 0.25 * 0.75 - 0.5 * 0.02),)
    assert objective.metric_keys == (LOG, COPY)
    assert objective.clips == {LOG: 0.1}
    assert math.isnan(objective.scores({LOG: np.array([-1.0, NAN]), COPY: np.ones(1)}, 0.0)[0])
    assert read({"task": None}).metric_keys == (TEXT,)


def test_several_objectives_stay_separate_and_have_a_weighted_sum() -> None:
    objective = read({"task": "rev.yaml", "weight": 3}, {"task": "copy", "measure": "exact"}, multi_objective=True)
    scores = objective.scores({LOG: np.array([-1.0]), COPY: np.array([1.0])})
    assert scores == (-1.0, 1.0)
    assert objective.total(scores) == pytest.approx(-0.5)


def test_a_violation_is_measured_on_the_same_documents() -> None:
    objective = read(
        {"task": "rev.yaml"}, constraints=[{"task": "copy", "max_drop": 10}, {"task": "copy", "guarded_by": "math"}]
    )
    ours = {LOG: np.zeros(4), COPY: np.array([1.0, 0.0, 1.0, 0.0])}
    references = {"": {COPY: np.ones(4)}, "math": {COPY: np.array([1.0, 0.0, 0.0, 0.0])}}
    assert objective.violation(ours, references) == pytest.approx(0.5 - 0.1)
    assert objective.violation({COPY: ours[COPY][:1]}, references) == 0
    assert objective.limits[1] == Limit(COPY, "math", 0.02)


def test_feasible_candidates_rank_first_and_others_by_violation() -> None:
    objective = Objective((Term(LOG, 1.0),))
    scores, violations = [0.1, 0.9, 0.8, NAN, 0.1, 0.5], [0.0, 0.2, 0.1, 0.0, 0.0, 0.0]
    assert rank([(score,) for score in scores], violations, objective) == [1, 3, 2, 4, 1, 0]


def test_the_best_trial_is_complete_and_the_first_of_equals() -> None:
    objective = Objective((Term(LOG, 1.0),))
    trials = [trial(0, 0.5), trial(1, 0.9, dropped=True), trial(2, 0.7), trial(3, 0.7), trial(4, 0.8, violation=0.1)]
    assert best_of(trials, objective) == trials[2]
    assert best_of([trial(0, NAN), trial(1, NAN, problem="NaN")], objective) is None


def test_the_front_has_all_trials_that_are_not_dominated() -> None:
    rng = np.random.default_rng(0)
    trials = [trial(i, *map(float, rng.integers(0, 6, 2))) for i in range(40)]
    optimal = front([*trials, trial(40, 9, 9, dropped=True), trial(41, 9, 9, violation=1), trial(42, NAN, 9)])
    for one in trials:
        better = [o for o in trials if o.scores != one.scores and all(np.array(o.scores) >= np.array(one.scores))]
        assert (one in optimal) == (not better)


@pytest.mark.parametrize(
    ("terms", "more", "message"),
    [
        (({"task": "copy", "measure": "exact", "clip": 1},), {}, "a clip for the measure exact"),
        (({"task": "copy"}, {"task": "copy"}), {}, "each measure of a task at most once"),
        (({"task": "copy", "measure": "metric"},), {}, "no metric"),
        (({"task": "copy", "metric": "acc"},), {}, "only there"),
        (({"task": None, "measure": "exact"},), {}, "held-out text"),
        (({"task": "copy"},), {"multi_objective": True}, "two or more"),
    ],
)
def test_invalid_objectives_are_rejected(terms: Any, more: Any, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        read(*terms, **more)

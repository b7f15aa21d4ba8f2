"""Test the score of a candidate and the choice of the best one."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from spaces import WEIGHT

from mergegate.merge_core.errors import InvalidInput
from mergegate.tasks.sweep.objective import Limit, MetricKey, Objective, Term, make_objective
from mergegate.tasks.sweep.settings import SweepSettings
from mergegate.tasks.sweep.study import Trial, best_of, front, rank

REV, COPY, TEXT = MetricKey("rev", "log_likelihood"), MetricKey("copy", "exact"), MetricKey("", "log_likelihood")
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
    table = {REV: np.array([-0.05, -7.0]), COPY: np.array([1.0, 0.0, 1.0, 1.0])}
    assert objective.scores(table, 0.02) == (pytest.approx(0.75 * (-0.05 - 0.1) / 2 + 0.25 * 0.75 - 0.5 * 0.02),)
    assert objective.metric_keys == (REV, COPY)
    assert objective.clips == {REV: 0.1}
    assert math.isnan(objective.scores({REV: np.array([-1.0, NAN]), COPY: np.ones(1)}, 0.0)[0])
    assert read({"task": None}).metric_keys == (TEXT,)


def test_several_objectives_stay_separate_and_have_a_weighted_sum() -> None:
    objective = read({"task": "rev.yaml", "weight": 3}, {"task": "copy", "measure": "exact"}, multi_objective=True)
    scores = objective.scores({REV: np.array([-1.0]), COPY: np.array([1.0])})
    assert scores == (-1.0, 1.0)
    assert objective.total(scores) == pytest.approx(-0.5)


def test_a_violation_is_measured_on_the_same_documents() -> None:
    objective = read(
        {"task": "rev.yaml"}, constraints=[{"task": "copy", "max_drop": 10}, {"task": "copy", "guarded_by": "math"}]
    )
    ours = {REV: np.zeros(4), COPY: np.array([1.0, 0.0, 1.0, 0.0])}
    references = {"": {COPY: np.ones(4)}, "math": {COPY: np.array([1.0, 0.0, 0.0, 0.0])}}
    assert objective.violation(ours, references) == pytest.approx(0.5 - 0.1)
    assert objective.violation({COPY: ours[COPY][:1]}, references) == 0
    assert objective.limits[1] == Limit(COPY, "math", 0.02)


def test_feasible_candidates_rank_first_and_others_by_violation() -> None:
    objective = Objective((Term(REV, 1.0),))
    scores, violations = [0.1, 0.9, 0.8, NAN, 0.1, 0.5], [0.0, 0.2, 0.1, 0.0, 0.0, 0.0]
    assert rank([(score,) for score in scores], violations, objective) == [1, 3, 2, 4, 1, 0]


def test_the_best_trial_is_complete_and_the_first_of_equals() -> None:
    objective = Objective((Term(REV, 1.0),))
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

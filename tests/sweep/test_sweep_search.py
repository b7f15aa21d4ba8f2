"""The search gives the same trials for any order of results and after kills, and scores each of them once."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from toy_search import COPY, REV, TIES, ToyModels, by_weights, hand_written_ties, run_toy, toy_settings, toy_space

from mergegate.merge_core.errors import DiskUnavailable, InvalidInput, Refused
from mergegate.tasks.sweep import HandWritten, SearchProgress, Trial, TrialRequest, TrialScores, open_ledger, study_key
from mergegate.tasks.sweep.study import request_key

Results = Iterator[tuple[int, TrialScores | Exception]]


class Killed(BaseException):
    """An exception that no handler catches, like a kill."""


class DyingModels(ToyModels):
    """Models that kill the search after `after` results."""

    def __init__(self, after: int, **more: Any) -> None:
        super().__init__(**more)
        self._remaining, self.delivered = after, Counter[str]()

    def __call__(self, requests: Sequence[TrialRequest]) -> Results:
        for result in super().__call__(requests):
            if self._remaining == 0:
                raise Killed
            self._remaining -= 1
            self.delivered[request_key(requests[result[0]])] += 1
            yield result


def trial_texts(trials: Sequence[Trial]) -> list[str]:
    """Return all fields of the trials as text, so that NaN compares equal to NaN."""
    return [repr(trial) for trial in trials]


@pytest.mark.parametrize("sampler", ["cma", pytest.param("tpe", marks=pytest.mark.story)])
def test_twenty_random_kills_change_no_trial_and_score_each_once(sampler: str, tmp_path: Path) -> None:
    settings = toy_settings(sampler=sampler, budget={"trials": 30})
    undisturbed = ToyModels()
    expected = run_toy(undisturbed, tmp_path / "whole", settings)
    rng, delivered, kills = random.Random(1), Counter[str](), 0
    while True:
        models = DyingModels(rng.randrange(len(undisturbed.scored) // 12) if kills < 20 else 1000)
        try:
            study = run_toy(models, tmp_path / "killed", settings)
            break
        except Killed:
            kills += 1
        finally:
            delivered.update(models.delivered)
    assert kills == 20
    assert trial_texts(study.trials) == trial_texts(expected.trials)
    assert study.best == expected.best
    assert study.tables.keys() == expected.tables.keys()
    assert delivered == undisturbed.scored
    assert set(delivered.values()) == {1}
    again = ToyModels()
    run_toy(again, tmp_path / "killed", settings)
    assert not again.scored


class Backwards(ToyModels):
    """Models whose results arrive in reverse order."""

    def __call__(self, requests: Sequence[TrialRequest]) -> Results:
        yield from reversed(list(super().__call__(requests)))


class Crashing(ToyModels):
    """Models whose third request fails three times."""

    crashed = 0

    def __call__(self, requests: Sequence[TrialRequest]) -> Results:
        for number, result in super().__call__(requests):
            if number == 2 and self.crashed < 3:
                self.crashed += 1
                yield number, RuntimeError("worker died")
            else:
                yield number, result


@pytest.mark.parametrize("models", [Backwards, Crashing])
def test_neither_the_order_of_results_nor_a_dead_worker_matters(models: type[ToyModels], tmp_path: Path) -> None:
    texts = [trial_texts(run_toy(kind(), tmp_path / kind.__name__).trials) for kind in (models, ToyModels)]
    assert texts[0] == texts[1]


def test_a_larger_budget_continues_a_smaller_one(tmp_path: Path) -> None:
    run_toy(ToyModels(), tmp_path, toy_settings(budget={"trials": 25}))
    more, large = ToyModels(), toy_settings(budget={"trials": 60})
    study = run_toy(more, tmp_path, large)
    assert trial_texts(study.trials) == trial_texts(run_toy(ToyModels(), tmp_path / "at once", large).trials)
    assert len(more.scored) <= 60 - 20


def test_trials_are_hand_written_recipes_then_sampler_and_random_search(tmp_path: Path) -> None:
    weights = {"math": 0.9, "code": 1.1}
    models = [{"model": name, "parameters": {"weight": weight, "density": 1}} for name, weight in weights.items()]
    by_hand = (hand_written_ties(toy_space(toy_settings())), HandWritten("linear", {**TIES, "models": models}))
    study = run_toy(ToyModels(), tmp_path, toy_settings(budget={"trials": 60}), hand_written=by_hand)
    assert [trial.number for trial in study.trials] == list(range(60))
    assert [trial.label for trial in study.hand_written] == ["ties", "linear"]
    origins = [trial.origin for trial in study.trials]
    assert (origins.count("baseline"), origins.count("sampler")) == (15, 43)
    assert study.reference.label == "linear"
    assert study.best.origin != "hand-written"
    candidates = [trial for trial in study.trials if trial.origin != "hand-written" and not trial.dropped]
    assert study.best.scores[0] == max(trial.scores[0] for trial in candidates)
    assert study.best.scores > study.reference.scores
    assert study.recipes[study.best.number]["models"][0]["parameters"]["weight"] == study.best.point["math"]
    assert by_weights(dict(study.recipes[study.best.number])) > 0.85
    assert study.sizes == {REV: 200, COPY: 200}
    assert study.seconds["merge"] == pytest.approx(0.5 * study.scored_count)
    assert len(study.tables) <= 4


@pytest.mark.parametrize(
    ("baseline", "sampler", "expected"), [(0, "cma", 0), (7, "cma", 7), (None, "random", 0), (99, "cma", 29)]
)
def test_the_share_of_random_search_is_configurable(
    baseline: int | None, sampler: str, expected: int, tmp_path: Path
) -> None:
    study = run_toy(ToyModels(), tmp_path, toy_settings(random_trials=baseline, sampler=sampler, budget={"trials": 30}))
    assert [trial.origin for trial in study.trials].count("baseline") == expected
    assert len(study.trials) == 30


def test_racing_saves_documents_and_ranks_dropped_trials_below_the_incumbent(tmp_path: Path) -> None:
    racing, unraced = ToyModels(), ToyModels()
    study = run_toy(racing, tmp_path / "raced", toy_settings(budget={"trials": 60}))
    run_toy(unraced, tmp_path / "whole", toy_settings(budget={"trials": 60}, racing={"rule": "none"}))
    assert racing.documents_scored < 0.85 * unraced.documents_scored
    assert 0.1 < study.evaluated_share < 0.85
    for trial in (trial for trial in study.trials if trial.dropped):
        before = [o for o in study.trials if o.generation < trial.generation and not o.dropped]
        assert trial.scores[0] < max(o.scores[0] for o in before)
        assert trial.documents < 1


def test_halving_ranks_dropped_trials_below_those_that_continue(tmp_path: Path) -> None:
    settings = toy_settings(budget={"trials": 50}, racing={"rule": "halving", "first": 0.1})
    study = run_toy(ToyModels(), tmp_path, settings)
    for generation in {trial.generation for trial in study.trials} - {-1}:
        own = [trial for trial in study.trials if trial.generation == generation]
        went_on = [trial.scores[0] for trial in own if not trial.dropped]
        assert 1 <= len(went_on) <= math.ceil(math.ceil(len(own) / 3) / 3)
        assert all(trial.scores[0] <= min(went_on) for trial in own if trial.dropped)
    assert study.evaluated_share < 0.4
    assert trial_texts(run_toy(ToyModels(), tmp_path, settings).trials) == trial_texts(study.trials)


def test_equal_recipes_are_scored_once(tmp_path: Path) -> None:
    three = {"type": "category", "choices": [0.5, 1.0, 1.5], "start": 1.0}
    settings = toy_settings(parameters={"math": three, "code": three, "density": {**three, "choices": [1.0]}})
    models = ToyModels()
    study = run_toy(models, tmp_path, settings)
    recipes = {tuple(sorted(trial.point.items())) for trial in study.trials}
    assert len(recipes) < len(study.trials) == 40
    assert len(models.scored) == len(recipes) == study.scored_count
    assert len({(tuple(sorted(trial.point.items())), trial.scores) for trial in study.trials}) == len(recipes)


def test_a_candidate_without_a_score_ranks_last(tmp_path: Path) -> None:
    class Partly(ToyModels):
        def score(self, request: TrialRequest) -> TrialScores:
            if request.recipe["models"][0]["parameters"]["weight"] > 1.05:
                return TrialScores({}, problem="too much")
            return super().score(request)

    study = run_toy(Partly(), tmp_path)
    failed = [trial for trial in study.trials if trial.problem]
    assert failed
    assert all("too much" in trial.problem and math.isnan(trial.scores[0]) for trial in failed)
    assert not study.best.problem
    assert trial_texts(run_toy(Partly(), tmp_path).trials) == trial_texts(study.trials)


def test_a_candidate_that_crashes_every_process_has_no_score(tmp_path: Path) -> None:
    class Fatal(ToyModels):
        def __call__(self, requests: Sequence[TrialRequest]) -> Results:
            for number, result in super().__call__(requests):
                is_fatal = requests[number].recipe["models"][0]["parameters"]["weight"] > 1.3
                yield number, (InvalidInput("scoring", found="the process died") if is_fatal else result)

    study = run_toy(Fatal(), tmp_path)
    assert {trial.problem.partition(":")[0] for trial in study.trials} == {"", "no score in two tries"}
    assert trial_texts(run_toy(Fatal(), tmp_path).trials) == trial_texts(study.trials)


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (RuntimeError("no memory"), "no memory"), (DiskUnavailable("disk", found="full"), "full"),
        (TrialScores({}, problem="no base"), "hand-written recipe ties: no score: no base"),
        (Refused("scoring", found="took longer than 60 s"), "took longer"),
    ],
)  # fmt: skip
def test_a_dead_machine_or_a_hand_written_recipe_without_a_score_ends_the_sweep(
    result: TrialScores | Exception, message: str, tmp_path: Path
) -> None:
    def fail(requests: Sequence[TrialRequest]) -> Results:
        yield from ((number, result) for number in range(len(requests)))

    with pytest.raises(DiskUnavailable if message == "full" else Refused, match=message) as caught:
        run_toy(fail, tmp_path)
    assert caught.value.exit_code == 3


def test_time_and_cost_limits_end_a_search_between_generations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr("mergegate.tasks.sweep.study.time.monotonic", lambda: now[0])
    monkeypatch.setattr("mergegate.tasks.sweep.study.Ledger.__init__.__defaults__", (lambda: now[0],))

    class Slow(ToyModels):
        def score(self, request: TrialRequest) -> TrialScores:
            now[0] += 60
            return super().score(request)

    seen: list[SearchProgress] = []
    settings = toy_settings(budget={"trials": 60, "hours": 0.5})
    study = run_toy(Slow(), tmp_path / "a", settings, on_progress=seen.append)
    assert study.stop_reason == "hours"
    assert 30 <= len(study.trials) < 42
    assert len({trial.generation for trial in study.trials[-1:]}) == 1
    assert seen[-1].seconds_left == 0
    assert 0 < (seen[12].seconds_left or 0) <= 1800
    assert [progress.trials for progress in seen] == sorted(progress.trials for progress in seen)
    now[0] += 1e6  # a week later
    resumed = Slow()
    assert trial_texts(run_toy(resumed, tmp_path / "a", settings).trials) == trial_texts(study.trials)
    assert not resumed.scored
    budget = {"trials": 60, "cost": 2.0, "cost_per_hour": 2.0}
    by_cost = run_toy(Slow(), tmp_path / "b", toy_settings(budget=budget), workers=2)
    assert by_cost.stop_reason == "cost"
    assert by_cost.spent == pytest.approx(2.0, rel=0.4)
    assert trial_texts(by_cost.trials) == trial_texts(study.trials)


def test_the_winner_has_the_smallest_constraint_violation(tmp_path: Path) -> None:
    settings = toy_settings(constraints=[{"task": "copy", "guarded_by": "math", "max_drop": 1}], budget={"trials": 60})
    reference = {COPY: np.ones(200)}
    study = run_toy(ToyModels(), tmp_path, settings, references={"math": reference})
    least = min(trial.violation for trial in study.trials)
    assert least > 0
    assert study.best.violation == min(t.violation for t in study.trials if t.origin != "hand-written")


def test_the_best_of_several_objectives_is_on_the_front(tmp_path: Path) -> None:
    study = run_toy(ToyModels(), tmp_path, toy_settings(multi_objective=True, sampler="nsga2"))
    assert study.best in study.front
    assert not any(trial.dropped for trial in study.trials)
    assert {trial.number for trial in study.front} <= set(study.tables)


def test_another_search_reuses_existing_scores(tmp_path: Path) -> None:
    run_toy(ToyModels(), tmp_path, toy_settings(sampler="random", racing={"rule": "none"}))
    again = ToyModels()
    run_toy(again, tmp_path, toy_settings(sampler="random", confidence=0.99, racing={"rule": "none"}))
    assert not again.scored
    settings = toy_settings()
    with open_ledger("0" * 64, study_key(toy_space(settings), settings), root=tmp_path) as ledger:
        assert len(ledger) == 40

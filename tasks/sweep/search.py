"""Run the search: score the hand-written recipes, then one generation after another.

A killed search starts over: its sampler proposes the same points, and their scores are in the ledger. The result does
not depend on the order in which workers finish, because the sampler receives results in the order of its proposals, and
candidates race against the best trial of earlier generations.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mergegate.merge_core.errors import Refused
from mergegate.tasks.sweep.ledger import Ledger, ScoreAll, request_key, score_once
from mergegate.tasks.sweep.objective import HAND_WRITTEN, MetricKey, Objective, ScoresByMetric
from mergegate.tasks.sweep.race import Race, best_third, cumulative_shares, halving_rounds
from mergegate.tasks.sweep.recipes import SoupRecipe
from mergegate.tasks.sweep.samplers import RandomSearch, TrialResult, generation_size, make_sampler
from mergegate.tasks.sweep.settings import Point, SweepSettings
from mergegate.tasks.sweep.space import Space, recipe_key
from mergegate.tasks.sweep.study import (
    HandWritten,
    SearchEnd,
    SearchProgress,
    Study,
    Trial,
    TrialRequest,
    TrialScores,
    best_of,
    front,
    rank,
)

_BASELINE_RATIO = 3  # default number of sampler trials per trial of random search
_BASELINE_SEED = 1_000_003  # added to the sampler's seed to get that of random search


@dataclass(frozen=True)
class SearchProblem:
    """Search space, settings and objective of a search, and the models with which candidates are compared.

    Args:
        hand_written: Recipes that the winner must beat. The first is the searched recipe with its start values.
        references: Scores, on the documents of the search, of the parents that constraints name. By name of parent.
        soup: Ingredients, in the search of a soup. Default: free parameters are searched.
    """

    space: Space
    settings: SweepSettings
    objective: Objective
    hand_written: tuple[HandWritten, ...]
    references: Mapping[str, ScoresByMetric] = field(default_factory=dict)
    soup: SoupRecipe | None = None

    @property
    def directory(self) -> Path | None:
        """Directory to which relative paths in recipes refer."""
        return self.hand_written[0].directory


def score_hand_written(problem: SearchProblem, score_all: ScoreAll, ledger: Ledger) -> tuple[TrialScores, ...]:
    """Score the hand-written recipes on the documents of the search. :func:`search` starts with this.

    Raises:
        Refused: A hand-written recipe cannot be scored.
    """
    requests = [TrialRequest(recipe.recipe, directory=recipe.directory) for recipe in problem.hand_written]
    results = score_once(requests, score_all, ledger, directory=problem.directory)
    for hand_written, scores in zip(problem.hand_written, results, strict=True):
        if scores.problem:
            raise Refused(
                f"sweep: hand-written recipe {hand_written.label}",
                found=f"no score: {scores.problem}",
                expected="a score that candidates can be compared with",
                remedy="run this recipe alone (mergegate run) to find the cause",
            )
    return results


def search(
    problem: SearchProblem,
    score_all: ScoreAll,
    ledger: Ledger,
    *,
    workers: int = 1,
    on_progress: Callable[[SearchProgress], None] = lambda progress: None,
    on_generation: Callable[[Sequence[Trial]], object] = lambda trials: None,
) -> Study:
    """Search until the budget is used up.

    Args:
        problem: Space, settings and objective of the search.
        score_all: Function that scores candidates and yields results in any order.
        ledger: Store of scores. Candidates that it has are not scored again.
        workers: Number of workers, for the cost of the search. Default: 1.
        on_progress: Callback after each newly scored trial and after each generation. Default: do nothing.
        on_generation: Callback after each generation, with all trials so far. Default: do nothing.

    Raises:
        InvalidInput: The sampler does not support the settings.
        Refused: A hand-written recipe has no score, or every candidate crashes its process.
    """
    return _Search(problem, score_all, ledger, workers, on_progress, on_generation).run()


@dataclass
class _Search:
    problem: SearchProblem
    score_all: ScoreAll
    ledger: Ledger
    workers: int
    on_progress: Callable[[SearchProgress], None]
    on_generation: Callable[[Sequence[Trial]], object]
    references: dict[str, ScoresByMetric] = field(default_factory=dict)
    trials: list[Trial] = field(default_factory=list)
    tables: dict[int, ScoresByMetric] = field(default_factory=dict)
    recipes: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    first_of: dict[str, Trial] = field(default_factory=dict)  # scored trial of each recipe, by recipe key
    sizes: dict[MetricKey, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    new_count: int = 0  # number of trials scored in this run
    finished: int = 0  # number of finished requests of this generation
    used_before: float = 0.0

    def __post_init__(self) -> None:
        self.space, self.settings = self.problem.space, self.problem.settings
        self.objective, self.directory = self.problem.objective, self.problem.directory

    def run(self) -> Study:
        sampler = make_sampler(self.space, self.objective, self.settings)
        baseline = RandomSearch(self.space, self.settings.seed + _BASELINE_SEED, 1)
        self.used_before = self.ledger.used_seconds
        results = score_hand_written(self.problem, self.score_all, self.ledger)
        start_table = results[0].table
        self.references = {**self.problem.references, HAND_WRITTEN: start_table}
        self.sizes = {key: len(start_table[key]) for key in self.objective.metric_keys}
        for number, (hand_written, scores) in enumerate(zip(self.problem.hand_written, results, strict=True)):
            point = self.space.start if number == 0 else {}
            trial = Trial(number, -1, "hand-written", hand_written.label, point, ())
            self._add(trial, TrialRequest(hand_written.recipe), scores)
        self._report_progress(-1)

        start = self.trials[0]
        sampler.begin(TrialResult(self.space.start, start.scores, start.violation))
        stop_reason: SearchEnd | None = None
        generation, budget, proposed, drawn = 0, self.settings.budget.trials, 0, 0
        while len(self.trials) < budget:
            points = sampler.ask()
            baseline_count = min(self._baseline_due(proposed + len(points)) - drawn, budget - len(self.trials))
            sampled = points[: budget - len(self.trials) - baseline_count]
            points_by_origin = [("sampler", point) for point in sampled] + [
                ("baseline", point) for point in baseline.draw(baseline_count)
            ]
            race = self._race()
            requests = [
                TrialRequest(self.space.fill_recipe(point), race=race, directory=self.directory)
                for _, point in points_by_origin
            ]
            if (stop_reason := self._exhausted_limit(requests)) is not None:
                break
            begin = len(self.trials)
            self._run_generation(generation, points_by_origin, requests)
            if len(sampled) == len(points):
                sampler_trials = self.trials[begin : begin + len(points)]
                sampler.tell([TrialResult(trial.point, trial.scores, trial.violation) for trial in sampler_trials])
            proposed, drawn, generation = proposed + len(sampled), drawn + baseline_count, generation + 1
        return Study(
            settings=self.settings,
            objective=self.objective,
            coordinates=self.space.coordinates,
            trials=tuple(self.trials),
            best=best_of(self._searched_trials(), self.objective),
            front=front(self.trials) if self.objective.multi_objective else (),
            sizes=self.sizes,
            tables=self.tables,
            recipes=self.recipes,
            population=generation_size(len(self.space.coordinates), self.settings),
            scored_count=len(self.first_of),
            new_count=self.new_count,
            seconds={**self.seconds, "wall": self.ledger.used_seconds},
            spent=self._spent(),
            stop_reason=stop_reason or "trials",
        )

    def _baseline_due(self, proposed_count: int) -> int:
        """Return how many random search trials are due after ``proposed_count`` trials of the sampler."""
        requested = self.settings.random_trials
        if requested is None:
            limit = self.settings.budget.trials // (_BASELINE_RATIO + 1)
            return 0 if self.settings.sampler == "random" else min(limit, proposed_count // _BASELINE_RATIO)
        searched = self.settings.budget.trials - len(self._hand_written_trials()) - requested
        return min(requested, math.ceil(requested * proposed_count / searched)) if searched > 0 else requested

    def _hand_written_trials(self) -> list[Trial]:
        return [trial for trial in self.trials if trial.origin == "hand-written"]

    def _searched_trials(self) -> list[Trial]:
        return [trial for trial in self.trials if trial.origin != "hand-written"]

    def _race(self) -> Race | None:
        """Return the race against the best trial so far, or None if candidates are not dropped.

        Candidates are not dropped with other rules than ``paired``, with several objectives, or while the best trial
        violates a constraint.
        """
        best = best_of(self.trials, self.objective)
        if self.settings.racing.rule != "paired" or self.objective.multi_objective or best is None or best.violation:
            return None
        rule, penalty = self.settings.racing, self.objective.change_penalty
        lead = penalty * best.change if penalty else 0.0
        incumbent = {key: self.tables[best.number][key] for key in self.objective.weights}
        return Race(incumbent, self.objective.weights, cumulative_shares(rule), rule.error, self.objective.clips, lead)

    def _exhausted_limit(self, requests: Sequence[TrialRequest]) -> SearchEnd | None:
        """Return the limit that is used up, if any.

        A limit does not end a generation with stored results, so that a resumed search ends at the same point.
        """
        first_race = halving_rounds(self.settings.racing)[0] if self.settings.racing.rule == "halving" else None
        possible = [*requests, *(replace(request, race=first_race) for request in requests)]
        if any(self.ledger.find(request_key(request, self.directory)) is not None for request in possible):
            return None
        budget, used = self.settings.budget, self.ledger.used_seconds
        if budget.hours is not None and used >= 3600 * budget.hours:
            return "hours"
        spent = self._spent()
        return "cost" if budget.cost is not None and spent is not None and spent >= budget.cost else None

    def _run_generation(
        self, generation: int, points_by_origin: Sequence[tuple[str, Point]], requests: Sequence[TrialRequest]
    ) -> None:
        keys = [recipe_key(request.recipe) for request in requests]
        new = {key: request for key, request in zip(keys, requests, strict=True) if key not in self.first_of}
        is_halving = self.settings.racing.rule == "halving"
        results: dict[str, TrialScores] = {}
        if is_halving:
            # Each round has a larger share of the documents. Candidates keep the result of their last round.
            continuing = list(new)
            for race in halving_rounds(self.settings.racing):
                round_results = self._score([replace(new[key], race=race) for key in continuing], generation)
                results.update(zip(continuing, round_results, strict=True))
                if race is not None:
                    scores, violations = zip(*map(self._rate, round_results), strict=True) if continuing else ((), ())
                    continuing = [continuing[i] for i in best_third(rank(scores, violations, self.objective))]
        else:
            results = dict(zip(new, self._score(list(new.values()), generation), strict=True))

        begin = len(self.trials)
        for (origin, point), key, request in zip(points_by_origin, keys, requests, strict=True):
            number = len(self.trials)
            trial = Trial(number, generation, origin, "", point, ())
            if key not in self.first_of:
                self._add(trial, request, results[key])
                continue
            first = self.first_of[key]
            self.trials.append(
                replace(first, number=number, generation=generation, origin=origin, label="", point=point, seconds=0.0)
            )
            if first.number in self.tables:
                self.tables[number], self.recipes[number] = self.tables[first.number], self.recipes[first.number]
        # Rank trials that halving dropped below all others of their generation, by the difference to the best of them.
        sound = [trial for trial in self.trials[begin:] if not trial.problem]
        best = best_of(sound, self.objective)
        if is_halving and best is not None and not self.objective.multi_objective:
            lowest = min(trial.scores[0] for trial in sound if not trial.dropped)
            race = Race(self.tables[best.number], self.objective.weights, (1.0,), clips=self.objective.clips)
            for trial in sound:
                if trial.dropped and trial.number in self.tables:
                    score = best.scores[0] + race.difference(self.tables[trial.number])
                    self.trials[trial.number] = replace(trial, scores=(min(score, lowest),))
        for key, first in self.first_of.items():
            if first.number >= begin:
                self.first_of[key] = self.trials[first.number]
        # Keep only the tables of trials that may still be needed, so that memory does not grow with the trials.
        best, candidate = best_of(self.trials, self.objective), best_of(self._searched_trials(), self.objective)
        needed = {trial.number for trial in (*self._hand_written_trials(), best, candidate) if trial is not None}
        if self.objective.multi_objective:
            needed |= {trial.number for trial in front(self.trials)}
        self.tables = {number: table for number, table in self.tables.items() if number in needed}
        self.recipes = {number: recipe for number, recipe in self.recipes.items() if number in needed}
        self._report_progress(generation)
        self.on_generation(tuple(self.trials))

    def _score(self, requests: Sequence[TrialRequest], generation: int) -> list[TrialScores]:
        self.finished = 0

        def count(scores: TrialScores) -> None:
            self.new_count, self.finished = self.new_count + 1, self.finished + 1
            self._report_progress(generation)

        results = score_once(requests, self.score_all, self.ledger, directory=self.directory, on_scored=count)
        self.finished = 0
        return list(results)

    def _add(self, trial: Trial, request: TrialRequest, scores: TrialScores) -> None:
        """Add a trial with its scores, which ``trial`` does not have yet."""
        values, violation = self._rate(scores)
        evaluated, race = 1.0, request.race
        if not scores.problem:
            evaluated = sum(len(scores.table[key]) for key in self.sizes) / max(1, sum(self.sizes.values()))
        if scores.dropped and race is not None and not scores.problem:
            best = best_of([old for old in self.trials if old.generation != trial.generation], self.objective)
            assert best is not None
            penalty = self.objective.change_penalty * scores.change if self.objective.change_penalty else 0.0
            values = (best.scores[0] + race.lead + race.difference(scores.table) - penalty,)
        trial = replace(
            trial,
            scores=values,
            violation=violation,
            documents=evaluated,
            dropped=scores.dropped,
            change=scores.change,
            seconds=sum((scores.seconds or {}).values()),
            problem=scores.problem,
        )
        self.trials.append(trial)
        self.tables[trial.number], self.recipes[trial.number] = scores.table, request.recipe
        self.first_of.setdefault(recipe_key(request.recipe), trial)
        for activity, seconds in (scores.seconds or {}).items():
            self.seconds[activity] = self.seconds.get(activity, 0.0) + seconds

    def _rate(self, scores: TrialScores) -> tuple[tuple[float, ...], float]:
        """Return one score per objective (NaN if there is a problem), and the constraint violation."""
        if scores.problem:
            return (math.nan,) * (len(self.objective.terms) if self.objective.multi_objective else 1), 0.0
        violation = self.objective.violation(scores.table, self.references)
        return self.objective.scores(scores.table, scores.change), violation

    def _spent(self) -> float | None:
        rate = self.settings.budget.cost_per_hour
        return None if rate is None else self.ledger.used_seconds / 3600 * self.workers * rate

    def _report_progress(self, generation: int) -> None:
        best, budget = best_of(self.trials, self.objective), self.settings.budget
        by_hand = best_of(self._hand_written_trials(), self.objective)
        count, used = len(self.trials) + self.finished, self.ledger.used_seconds
        estimates = []
        if self.new_count:
            estimates.append((used - self.used_before) / self.new_count * max(0, budget.trials - count))
        if budget.hours is not None:
            estimates.append(max(0.0, 3600 * budget.hours - used))
        self.on_progress(
            SearchProgress(
                trials=min(count, budget.trials),
                budget=budget.trials,
                generation=generation,
                best=self.objective.total(best.scores) if best else None,
                best_number=best.number if best else None,
                hand_written=self.objective.total(by_hand.scores) if by_hand else None,
                seconds_left=min(estimates, default=None),
                spent=self._spent(),
            )
        )

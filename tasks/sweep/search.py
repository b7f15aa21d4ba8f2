"""Run the search: score the hand-written recipes, then one generation after another, or the ingredients of a soup.

A killed search starts over: its sampler proposes the same points, and their scores are in the ledger. The result does
not depend on the order in which workers finish, because the sampler receives results in the order of its proposals, and
candidates race against the best trial of earlier generations.

The search of a soup, the average of the models that improve it, follows Wortsman et al. 2022
(https://arxiv.org/abs/2203.05482): sort the models by their score, start with the best one, and add each of the others
if the score of the average does not fall. This greedy choice partly follows chance, so the search only proposes
ingredients. Other documents, which no trial has read, decide about each of them (:mod:`confirmation`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mergegate.merge_core.errors import Refused
from mergegate.tasks.sweep.objective import (
    HAND_WRITTEN,
    MetricKey,
    Objective,
    Race,
    ScoresByMetric,
    best_third,
    cumulative_shares,
    halving_rounds,
)
from mergegate.tasks.sweep.samplers import RandomSearch, generation_size, make_sampler
from mergegate.tasks.sweep.settings import Point, SweepSettings
from mergegate.tasks.sweep.space import SoupRecipe, Space, recipe_key
from mergegate.tasks.sweep.study import (
    INGREDIENT,
    SOUP,
    HandWritten,
    IngredientOutcome,
    IngredientResult,
    Ledger,
    ScoreAll,
    SearchEnd,
    SearchProgress,
    SoupResult,
    Study,
    Trial,
    TrialRequest,
    TrialScores,
    best_of,
    front,
    rank,
    request_key,
    score_once,
)

_BASELINE_RATIO = 3  # default number of sampler trials per trial of random search
_BASELINE_SEED = 1_000_003  # added to the sampler's seed to get that of random search


@dataclass(frozen=True)
class SearchProblem:
    """Search space, settings and objective of a search, and the models with which candidates are compared."""

    space: Space
    settings: SweepSettings
    objective: Objective
    hand_written: tuple[HandWritten, ...]  # recipes that the winner must beat, first that with the start values
    # Scores, on the documents of the search, of the parents that constraints name. By name of parent.
    references: Mapping[str, ScoresByMetric] = field(default_factory=dict)
    soup: SoupRecipe | None = None  # ingredients; None if free parameters are searched

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
    results = score_once(requests, score_all, ledger)
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

    For a soup of ``n`` models, score the models alone and at most ``n - 1`` soups.

    Args:
        problem: Space, settings and objective of the search.
        score_all: Function that scores candidates and yields results in any order.
        ledger: Store of scores. Candidates that it has are not scored again.
        workers: Number of workers, for the cost of the search. Default: 1.
        on_progress: Callback after each newly scored trial and after each generation. Default: do nothing.
        on_generation: Callback after each generation, with all trials so far. Default: do nothing.

    Raises:
        InvalidInput: The sampler does not support the settings.
        Refused: A hand-written recipe or every ingredient of a soup has no score, or every candidate crashes its
            process.
    """
    kind = _ParameterSearch if problem.soup is None else _SoupSearch
    return kind(problem, score_all, ledger, workers, on_progress, on_generation).run()


@dataclass
class _Search:
    """Trials of a running search."""

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

    def __post_init__(self) -> None:
        self.settings, self.objective = self.problem.settings, self.problem.objective
        self.limit = self.settings.budget.trials
        self.used_before = self.ledger.used_seconds

    def run(self) -> Study:
        raise NotImplementedError

    def hand_written(self) -> list[Trial]:
        return [trial for trial in self.trials if trial.origin == "hand-written"]

    def add_hand_written(self) -> None:
        """Score the hand-written recipes, and add their trials."""
        results = score_hand_written(self.problem, self.score_all, self.ledger)
        start_table = results[0].table
        self.references = {**self.problem.references, HAND_WRITTEN: start_table}
        self.sizes = {key: len(start_table[key]) for key in self.objective.metric_keys}
        for number, (hand_written, scores) in enumerate(zip(self.problem.hand_written, results, strict=True)):
            point = self.problem.space.start if number == 0 else {}
            trial = Trial(number, -1, "hand-written", hand_written.label, point, ())
            self.add(trial, TrialRequest(hand_written.recipe), scores)

    def score(self, requests: Sequence[TrialRequest], generation: int) -> tuple[TrialScores, ...]:
        def count(scores: TrialScores) -> None:
            self.new_count, self.finished = self.new_count + 1, self.finished + 1
            self.report_progress(generation)

        results = score_once(requests, self.score_all, self.ledger, on_scored=count)
        self.finished = 0
        return results

    def add(self, trial: Trial, request: TrialRequest, scores: TrialScores) -> None:
        """Add a trial with its scores, which ``trial`` does not have yet."""
        values, violation = self.rate(scores)
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
            seconds=sum(scores.seconds.values()),
            problem=scores.problem,
        )
        self.trials.append(trial)
        self.tables[trial.number], self.recipes[trial.number] = scores.table, request.recipe
        self.first_of.setdefault(recipe_key(request.recipe), trial)
        for activity, seconds in scores.seconds.items():
            self.seconds[activity] = self.seconds.get(activity, 0.0) + seconds

    def rate(self, scores: TrialScores) -> tuple[tuple[float, ...], float]:
        """Return one score per objective (NaN if there is a problem), and the constraint violation."""
        if scores.problem:
            return (math.nan,) * (len(self.objective.terms) if self.objective.multi_objective else 1), 0.0
        violation = self.objective.violation(scores.table, self.references)
        return self.objective.scores(scores.table, scores.change), violation

    def keep_tables(self, numbers: set[int]) -> None:
        """Forget the tables of all other trials, so that memory does not grow with the trials."""
        self.tables = {number: table for number, table in self.tables.items() if number in numbers}
        self.recipes = {number: recipe for number, recipe in self.recipes.items() if number in numbers}

    def cost(self) -> float | None:
        rate = self.settings.budget.cost_per_hour
        return None if rate is None else self.ledger.used_seconds / 3600 * self.workers * rate

    def report_progress(self, generation: int) -> None:
        best, by_hand = best_of(self.trials, self.objective), best_of(self.hand_written(), self.objective)
        count, used, hours = len(self.trials) + self.finished, self.ledger.used_seconds, self.settings.budget.hours
        estimates = []
        if self.new_count:
            estimates.append((used - self.used_before) / self.new_count * max(0, self.limit - count))
        if hours is not None:
            estimates.append(max(0.0, 3600 * hours - used))
        self.on_progress(
            SearchProgress(
                trials=min(count, self.limit),
                budget=self.limit,
                generation=generation,
                best=self.objective.total(best.scores) if best else None,
                best_number=best.number if best else None,
                hand_written=self.objective.total(by_hand.scores) if by_hand else None,
                seconds_left=min(estimates, default=None),
                spent=self.cost(),
            )
        )

    def study(self, best: Trial | None, stop_reason: SearchEnd, population: int) -> Study:
        return Study(
            settings=self.settings,
            objective=self.objective,
            coordinates=self.problem.space.coordinates,
            trials=tuple(self.trials),
            best=best,
            front=front(self.trials) if self.objective.multi_objective else (),
            sizes=self.sizes,
            tables=self.tables,
            recipes=self.recipes,
            population=population,
            scored_count=len(self.first_of),
            new_count=self.new_count,
            seconds={**self.seconds, "wall": self.ledger.used_seconds},
            spent=self.cost(),
            stop_reason=stop_reason,
        )


class _ParameterSearch(_Search):
    """Search over free parameters: generations of a sampler, and some trials of random search to compare with."""

    def run(self) -> Study:
        space, budget = self.problem.space, self.limit
        sampler = make_sampler(space, self.objective, self.settings)
        baseline = RandomSearch(space, self.settings.seed + _BASELINE_SEED, 1)
        self.add_hand_written()
        self.report_progress(-1)
        sampler.begin(self.trials[0])
        stop_reason: SearchEnd | None = None
        generation, proposed, drawn = 0, 0, 0
        while len(self.trials) < budget:
            points = sampler.ask()
            baseline_count = min(self._baseline_due(proposed + len(points)) - drawn, budget - len(self.trials))
            sampled = points[: budget - len(self.trials) - baseline_count]
            points_by_origin = [("sampler", point) for point in sampled] + [
                ("baseline", point) for point in baseline.draw(baseline_count)
            ]
            race = self._race()
            requests = [
                TrialRequest(space.fill_recipe(point), race=race, directory=self.problem.directory)
                for _, point in points_by_origin
            ]
            if (stop_reason := self._exhausted_limit(requests)) is not None:
                break
            begin = len(self.trials)
            self._run_generation(generation, points_by_origin, requests)
            if len(sampled) == len(points):
                sampler.tell(self.trials[begin : begin + len(points)])
            proposed, drawn, generation = proposed + len(sampled), drawn + baseline_count, generation + 1
        best = best_of(self._searched(), self.objective)
        return self.study(best, stop_reason or "trials", generation_size(len(space.coordinates), self.settings))

    def _searched(self) -> list[Trial]:
        return [trial for trial in self.trials if trial.origin != "hand-written"]

    def _baseline_due(self, proposed_count: int) -> int:
        """Return how many random search trials are due after ``proposed_count`` trials of the sampler."""
        requested = self.settings.random_trials
        if requested is None:
            limit = self.limit // (_BASELINE_RATIO + 1)
            return 0 if self.settings.sampler == "random" else min(limit, proposed_count // _BASELINE_RATIO)
        searched = self.limit - len(self.hand_written()) - requested
        return min(requested, math.ceil(requested * proposed_count / searched)) if searched > 0 else requested

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
        if any(self.ledger.find(request_key(request)) is not None for request in possible):
            return None
        budget, spent = self.settings.budget, self.cost()
        if budget.hours is not None and self.ledger.used_seconds >= 3600 * budget.hours:
            return "hours"
        return "cost" if budget.cost is not None and spent is not None and spent >= budget.cost else None

    def _run_generation(
        self, generation: int, points_by_origin: Sequence[tuple[str, Point]], requests: Sequence[TrialRequest]
    ) -> None:
        keys = [recipe_key(request.recipe) for request in requests]
        new = {key: request for key, request in zip(keys, requests, strict=True) if key not in self.first_of}
        is_halving = self.settings.racing.rule == "halving"
        results: dict[str, TrialScores] = {}
        # Each round of halving has a larger share of the documents. Candidates keep the result of their last round.
        continuing = list(new)
        for race in halving_rounds(self.settings.racing) if is_halving else ():
            round_results = self.score([replace(new[key], race=race) for key in continuing], generation)
            results.update(zip(continuing, round_results, strict=True))
            if race is not None:
                scores, violations = zip(*map(self.rate, round_results), strict=True) if continuing else ((), ())
                continuing = [continuing[i] for i in best_third(rank(scores, violations, self.objective))]
        if not is_halving:
            results.update(zip(new, self.score(list(new.values()), generation), strict=True))

        begin = len(self.trials)
        for (origin, point), key, request in zip(points_by_origin, keys, requests, strict=True):
            number = len(self.trials)
            if key not in self.first_of:
                self.add(Trial(number, generation, origin, "", point, ()), request, results[key])
                continue
            first = self.first_of[key]
            self.trials.append(
                replace(first, number=number, generation=generation, origin=origin, label="", point=point, seconds=0.0)
            )
            if first.number in self.tables:
                self.tables[number], self.recipes[number] = self.tables[first.number], self.recipes[first.number]
        if is_halving and not self.objective.multi_objective:
            self._rank_dropped_last(begin)
        for key, first in self.first_of.items():
            if first.number >= begin:
                self.first_of[key] = self.trials[first.number]
        best, candidate = best_of(self.trials, self.objective), best_of(self._searched(), self.objective)
        needed = {trial.number for trial in (*self.hand_written(), best, candidate) if trial is not None}
        if self.objective.multi_objective:
            needed |= {trial.number for trial in front(self.trials)}
        self.keep_tables(needed)
        self.report_progress(generation)
        self.on_generation(tuple(self.trials))

    def _rank_dropped_last(self, begin: int) -> None:
        """Rank trials that halving dropped below all others of their generation, by the difference to its best."""
        sound = [trial for trial in self.trials[begin:] if not trial.problem]
        if (best := best_of(sound, self.objective)) is None:
            return
        lowest = min(trial.scores[0] for trial in sound if not trial.dropped)
        race = Race(self.tables[best.number], self.objective.weights, (1.0,), clips=self.objective.clips)
        for trial in sound:
            if trial.dropped and trial.number in self.tables:
                score = best.scores[0] + race.difference(self.tables[trial.number])
                self.trials[trial.number] = replace(trial, scores=(min(score, lowest),))


class _SoupSearch(_Search):
    """Search of the ingredients of a soup, which are indices of models in its recipe."""

    def run(self) -> Study:
        assert self.problem.soup is not None
        self.recipe = self.problem.soup
        count = len(self.recipe.names)
        self.limit = len(self.problem.hand_written) + 2 * count - 1
        self.add_hand_written()
        alone = self._try_soups([{index} for index in range(count)], INGREDIENT)
        ranked = sorted(alone, key=lambda number: (-_score_of(self.trials[number]), number))
        if not (best := self.trials[ranked[0]]).is_complete:
            raise Refused(
                "sweep: the ingredients of the soup",
                found=f"no score for any of {count} models: {best.problem}",
                expected="at least one model with a score",
                remedy="evaluate one of the models alone (mergegate run) to find the cause",
            )
        index_of = {number: index for index, number in enumerate(alone)}
        if self.settings.soup == "uniform":
            ingredients = [self._ingredient(number, index_of, "kept") for number in ranked]
            chain = [ranked[0], *self._try_soups([set(range(count))], SOUP)]
        else:
            ingredients, chain = self._choose_greedily(ranked, index_of)
        self.on_generation(tuple(self.trials))
        largest = self.trials[chain[-1]]
        self.keep_tables({trial.number for trial in self.hand_written()} | set(chain))
        winner = largest if len(chain) > 1 and largest.is_complete else None
        soup = SoupResult(
            rule=self.settings.soup or "greedy",
            margin=self.settings.margin / 100,
            confidence=self.settings.confidence,
            ingredients=tuple(ingredients),
        )
        return replace(self.study(winner, "trials", 0), soup=soup, soup_chain=tuple(chain))

    def _ingredient(
        self, number: int, index_of: Mapping[int, int], outcome: IngredientOutcome, gain: float | None = None
    ) -> IngredientResult:
        """Return the result of the ingredient with the trial ``number`` before the confirmation."""
        trial = self.trials[number]
        return IngredientResult(
            ingredient=self.recipe.labels[index_of[number]],
            outcome=outcome,
            alone=trial.scores[0] if trial.is_complete else None,
            searched=gain,
            problem=trial.problem,
        )

    def _choose_greedily(
        self, numbers: Sequence[int], index_of: Mapping[int, int]
    ) -> tuple[list[IngredientResult], list[int]]:
        """Return the result for each model, best first, and the numbers of the trials of the growing soup.

        ``numbers`` are the trials of the models alone, best first.
        """
        ingredients = [self._ingredient(numbers[0], index_of, "first")]
        soup, chain = {index_of[numbers[0]]}, [numbers[0]]
        for number in numbers[1:]:
            gain = None
            if self.trials[number].is_complete:
                (candidate,) = self._try_soups([soup | {index_of[number]}], SOUP)
                if self.trials[candidate].is_complete:
                    gain = _score_of(self.trials[candidate]) - _score_of(self.trials[chain[-1]])
            outcome: IngredientOutcome = "not added" if self.trials[number].is_complete else "no score"
            if gain is not None and gain >= 0:
                outcome = "not tested"
                soup.add(index_of[number])
                chain.append(candidate)
            ingredients.append(self._ingredient(number, index_of, outcome, gain))
        return ingredients, chain

    def _try_soups(self, sets: Sequence[set[int]], origin: str) -> list[int]:
        """Score the soups of sets of ingredients that have no trial yet, and return the number of each soup's trial."""
        keys = [recipe_key(self.recipe.soup_of(chosen)) for chosen in sets]
        new = {key: chosen for key, chosen in zip(keys, sets, strict=True) if key not in self.first_of}
        directory = self.problem.directory
        requests = [TrialRequest(self.recipe.soup_of(chosen), directory=directory) for chosen in new.values()]
        results = self.score(requests, 0)
        for request, chosen, scores in zip(requests, new.values(), results, strict=True):
            is_alone = origin == INGREDIENT
            label = self.recipe.labels[min(chosen)] if is_alone else ""
            self.add(Trial(len(self.trials), 0 if is_alone else 1, origin, label, {}, ()), request, scores)
        self.report_progress(0)
        return [self.first_of[key].number for key in keys]


def _score_of(trial: Trial) -> float:
    """Return the score of a trial, or minus infinity if it has none."""
    return trial.scores[0] if trial.is_complete else -math.inf

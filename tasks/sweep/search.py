"""Run the search: score the hand-written recipes, then one generation after another.

Only scored trials are stored. A seeded sampler that receives the same results in the same order proposes the same
points. A killed search therefore starts over, finds its trials in the ledger, and arrives at the same state. The order
in which workers finish decides nothing: results reach the sampler in the order of its proposals, and candidates race
against the best trial of earlier generations.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mergegate.merge_core.errors import Refused
from mergegate.tasks.sweep.batch import ScoreAll, score_once
from mergegate.tasks.sweep.ledger import Ledger, request_key
from mergegate.tasks.sweep.objective import HAND_WRITTEN, Objective, best_of, front, rank
from mergegate.tasks.sweep.race import Race, doubling_shares, going_on, heat, heats
from mergegate.tasks.sweep.samplers import TrialResult, generation_size, make_baseline, make_sampler
from mergegate.tasks.sweep.settings import SweepSettings
from mergegate.tasks.sweep.space import Space, recipe_key
from mergegate.tasks.sweep.study import HandWritten, SearchEnd, SearchProgress, Study
from mergegate.tasks.sweep.trials import MetricKey, Point, Sheet, Trial, TrialRequest, TrialScores

_BASELINE = 3  # default number of sampler trials per trial of random search


def score_hand_written(
    recipes: Sequence[HandWritten], score_all: ScoreAll, ledger: Ledger, directory: Path | None = None
) -> tuple[TrialScores, ...]:
    """Score the hand-written recipes on the documents of the search. :func:`search` starts with this.

    Raises:
        Refused: A hand-written recipe cannot be scored, so candidates have nothing to be compared with.
    """
    requests = [TrialRequest(hand_written.recipe, directory=hand_written.directory) for hand_written in recipes]
    scored = score_once(requests, score_all, ledger, directory=directory)
    for hand_written, scores in zip(recipes, scored, strict=True):
        if scores.problem:
            raise Refused(
                f"sweep: hand-written recipe {hand_written.label}",
                found=f"no score: {scores.problem}",
                expected="a score that candidates can be compared with",
                remedy="merge it by itself (mergegate run) and see",
            )
    return scored


def hand_written_recipes(
    space: Space, label: str, directory: Path | None = None, more: Sequence[HandWritten] = ()
) -> tuple[HandWritten, ...]:
    """Return the searched recipe with its start values, followed by ``more``."""
    return (HandWritten(label, space.recipe_of(space.start), directory), *more)


def search(
    space: Space,
    settings: SweepSettings,
    score_all: ScoreAll,
    ledger: Ledger,
    *,
    objective: Objective,
    hand_written: Sequence[HandWritten],
    references: Mapping[str, Sheet] | None = None,
    workers: int = 1,
    on_progress: Callable[[SearchProgress], None] = lambda progress: None,
    on_generation: Callable[[Sequence[Trial]], object] = lambda trials: None,
) -> Study:
    """Search until the budget is used up.

    Args:
        score_all: Scores candidates and yields the results in any order.
        hand_written: Recipes from :func:`hand_written_recipes`. The first is the start of the search.
        references: Scores of the parents that constraints compare with, on the documents of the search, by name.
        workers: Number of workers that are paid for.
        on_progress: Callback after each newly scored trial and after each generation.
        on_generation: Callback after each generation, with all trials so far.

    Raises:
        InvalidInput: The sampler does not support the settings.
        Refused: A hand-written recipe has no score, or every candidate crashes its process.
    """
    directory = hand_written[0].directory
    return _Search(space, settings, score_all, ledger, objective, directory, workers, on_progress, on_generation).run(
        hand_written, dict(references or {})
    )


@dataclass
class _Search:
    space: Space
    settings: SweepSettings
    score_all: ScoreAll
    ledger: Ledger
    objective: Objective
    directory: Path | None
    workers: int
    on_progress: Callable[[SearchProgress], None]
    on_generation: Callable[[Sequence[Trial]], object]
    references: dict[str, Sheet] = field(default_factory=dict)
    trials: list[Trial] = field(default_factory=list)
    sheets: dict[int, Sheet] = field(default_factory=dict)
    recipes: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    first_of: dict[str, Trial] = field(default_factory=dict)  # scored trial of each recipe, by recipe key
    sizes: dict[MetricKey, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    new: int = 0  # number of trials scored in this run
    found: int = 0  # number of finished requests of this generation
    began: float = 0.0

    def run(self, hand_written: Sequence[HandWritten], references: dict[str, Sheet]) -> Study:
        sampler = make_sampler(self.space, self.objective, self.settings)
        baseline = make_baseline(self.space, self.settings)
        self.began = self.ledger.used
        self._hand_written(hand_written, references)
        start = self.trials[0]
        sampler.begin(TrialResult(self.space.start, start.scores, start.violation))
        stopped: SearchEnd = "trials"
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
                TrialRequest(self.space.recipe_of(point), race=race, directory=self.directory)
                for _, point in points_by_origin
            ]
            if (end := self._is_over(requests)) is not None:
                stopped = end
                break
            self._generation(generation, points_by_origin, requests)
            if len(sampled) == len(points):
                sampler_trials = self.trials[len(self.trials) - len(points_by_origin) :][: len(points)]
                sampler.tell([TrialResult(trial.point, trial.scores, trial.violation) for trial in sampler_trials])
            proposed, drawn, generation = proposed + len(sampled), drawn + baseline_count, generation + 1
        return self._study(stopped)

    def _hand_written(self, recipes: Sequence[HandWritten], references: dict[str, Sheet]) -> None:
        scored = score_hand_written(recipes, self.score_all, self.ledger, self.directory)
        start = scored[0].sheet
        self.references = {**references, HAND_WRITTEN: start}
        self.sizes = {key: len(start[key]) for key in self.objective.asked}
        for number, (hand_written, scores) in enumerate(zip(recipes, scored, strict=True)):
            point = self.space.start if number == 0 else {}
            self._add(
                self._trial(number, -1, "hand-written", hand_written.label, point, scores), hand_written.recipe, scores
            )
            self.sheets[number], self.recipes[number] = scores.sheet, hand_written.recipe
        self._tell_progress(-1)

    def _baseline_due(self, proposed: int) -> int:
        """Return how many random search trials are due after ``proposed`` trials of the sampler."""
        requested = self.settings.random_trials
        if requested is None:
            limit = self.settings.budget.trials // (_BASELINE + 1)
            return 0 if self.settings.sampler == "random" else min(limit, proposed // _BASELINE)
        searched = self.settings.budget.trials - len(self._hand_written_trials()) - requested
        return min(requested, math.ceil(requested * proposed / searched)) if searched > 0 else requested

    def _hand_written_trials(self) -> list[Trial]:
        return [trial for trial in self.trials if trial.origin == "hand-written"]

    def _race(self) -> Race | None:
        """Return the race against the best trial so far, or None if no race applies.

        No race applies under another rule, with several objectives, or while the best trial violates a constraint.
        """
        best = best_of(self.trials, self.objective)
        if self.settings.racing.rule != "paired" or self.objective.several or best is None or best.violation:
            return None
        rule, penalty = self.settings.racing, self.objective.change_penalty
        lead = penalty * best.change if penalty else 0.0
        incumbent = {key: self.sheets[best.number][key] for key in self.objective.weights}
        looks = doubling_shares(rule.first)
        return Race(incumbent, self.objective.weights, looks, rule.error, self.objective.clips, lead)

    def _is_over(self, requests: Sequence[TrialRequest]) -> SearchEnd | None:
        """Return the limit that is used up, if any.

        A generation with stored results is always finished, so a resumed search ends at the same point.
        """
        heat_keys = [request_key(replace(request, race=self._first_heat()), self.directory) for request in requests]
        keys = [request_key(request, self.directory) for request in requests]
        if any(self.ledger.find(key) is not None for key in (*keys, *heat_keys)):
            return None
        budget, used = self.settings.budget, self.ledger.used
        if budget.hours is not None and used >= 3600 * budget.hours:
            return "hours"
        spent = self._spent()
        return "cost" if budget.cost is not None and spent is not None and spent >= budget.cost else None

    def _first_heat(self) -> Race | None:
        share = heats(self.settings.racing)[0] if self.settings.racing.rule == "halving" else 1.0
        return heat(share) if share < 1 else None

    def _generation(
        self, generation: int, points_by_origin: Sequence[tuple[str, Point]], requests: Sequence[TrialRequest]
    ) -> None:
        keys = [recipe_key(request.recipe) for request in requests]
        new = {key: request for key, request in zip(keys, requests, strict=True) if key not in self.first_of}
        if self.settings.racing.rule == "halving":
            scored = self._score_by_halving(list(new.values()), generation)
        else:
            scored = list(self._score(list(new.values()), generation))
        results = dict(zip(new, scored, strict=True))
        begin = len(self.trials)
        for (origin, point), key, request in zip(points_by_origin, keys, requests, strict=True):
            number = len(self.trials)
            if key in self.first_of:
                first = self.first_of[key]
                self.trials.append(
                    replace(
                        first, number=number, generation=generation, origin=origin, label="", point=point, seconds=0.0
                    )
                )
                if first.number in self.sheets:
                    self.sheets[number], self.recipes[number] = self.sheets[first.number], self.recipes[first.number]
                continue
            scores = results[key]
            trial = self._trial(number, generation, origin, "", point, scores, request.race)
            self._add(trial, request.recipe, scores)
            self.sheets[number], self.recipes[number] = scores.sheet, request.recipe
        if self.settings.racing.rule == "halving":
            self._rank_halved(begin)
        for key, first in self.first_of.items():
            if first.number >= begin:
                self.first_of[key] = self.trials[first.number]
        self._forget()
        self._tell_progress(generation)
        self.on_generation(tuple(self.trials))

    def _score(self, requests: Sequence[TrialRequest], generation: int) -> tuple[TrialScores, ...]:
        self.found = 0

        def note(scores: TrialScores) -> None:
            self.new, self.found = self.new + 1, self.found + 1
            self._tell_progress(generation)

        results = score_once(requests, self.score_all, self.ledger, directory=self.directory, on_scored=note)
        self.found = 0
        return results

    def _score_by_halving(self, requests: Sequence[TrialRequest], generation: int) -> list[TrialScores]:
        """Score candidates in rounds with growing shares of the documents.

        A candidate that does not continue keeps the result of its last round.
        """
        results: dict[int, TrialScores] = {}
        continuing = list(range(len(requests)))
        for share in heats(self.settings.racing):
            race = heat(share) if share < 1 else None
            scored = self._score([replace(requests[i], race=race) for i in continuing], generation)
            results.update(zip(continuing, scored, strict=True))
            if share < 1:
                scores = [self._scores(result) for result in scored]
                violations = [self._violation(result) for result in scored]
                continuing = [continuing[i] for i in going_on(rank(scores, violations, self.objective))]
        return [results[i] for i in range(len(requests))]

    def _rank_halved(self, begin: int) -> None:
        """Rank dropped trials below all others of their generation, by the difference to the best of them."""
        generation = [trial for trial in self.trials[begin:] if not trial.problem]
        best = best_of(generation, self.objective)
        if best is None or self.objective.several:
            return
        lowest = min(trial.scores[0] for trial in generation if not trial.dropped)
        against = Race(self.sheets[best.number], self.objective.weights, (1.0,), clips=self.objective.clips)
        for trial in generation:
            if trial.dropped and trial.number in self.sheets:
                score = best.scores[0] + against.difference(self.sheets[trial.number])
                self.trials[trial.number] = replace(trial, scores=(min(score, lowest),))

    def _trial(
        self,
        number: int,
        generation: int,
        origin: str,
        label: str,
        point: Point,
        scores: TrialScores,
        race: Race | None = None,
    ) -> Trial:
        share, values, violation = 1.0, self._scores(scores), self._violation(scores)
        if not scores.problem:
            share = sum(len(scores.sheet[key]) for key in self.sizes) / max(1, sum(self.sizes.values()))
        if scores.dropped and race is not None and not scores.problem:
            best = best_of(self.trials[: self._before(generation)], self.objective)
            assert best is not None
            penalty = self.objective.change_penalty * scores.change if self.objective.change_penalty else 0.0
            values = (best.scores[0] + race.lead + race.difference(scores.sheet) - penalty,)
        return Trial(
            number=number,
            generation=generation,
            origin=origin,
            label=label,
            point=point,
            scores=values,
            violation=violation,
            documents=share,
            dropped=scores.dropped,
            change=scores.change,
            seconds=sum((scores.seconds or {}).values()),
            problem=scores.problem,
        )

    def _before(self, generation: int) -> int:
        return next((i for i, trial in enumerate(self.trials) if trial.generation == generation), len(self.trials))

    def _scores(self, scores: TrialScores) -> tuple[float, ...]:
        if scores.problem:
            return (math.nan,) * (len(self.objective.terms) if self.objective.several else 1)
        return self.objective.scores(scores.sheet, scores.change)

    def _violation(self, scores: TrialScores) -> float:
        return 0.0 if scores.problem else self.objective.violation(scores.sheet, self.references)

    def _add(self, trial: Trial, recipe: Mapping[str, Any], scores: TrialScores) -> None:
        self.trials.append(trial)
        self.first_of.setdefault(recipe_key(recipe), trial)
        for part, seconds in (scores.seconds or {}).items():
            self.seconds[part] = self.seconds.get(part, 0.0) + seconds

    def _forget(self) -> None:
        """Drop the sheets that are no longer needed, so that memory does not grow with the number of trials.

        Sheets of hand-written recipes and of trials that may still be the best are kept.
        """
        best, candidate = best_of(self.trials, self.objective), best_of(self._searched(), self.objective)
        needed = {trial.number for trial in (*self._hand_written_trials(), best, candidate) if trial is not None}
        if self.objective.several:
            needed |= {trial.number for trial in front(self.trials)}
        self.sheets = {number: sheet for number, sheet in self.sheets.items() if number in needed}
        self.recipes = {number: recipe for number, recipe in self.recipes.items() if number in needed}

    def _searched(self) -> list[Trial]:
        return [trial for trial in self.trials if trial.origin != "hand-written"]

    def _spent(self) -> float | None:
        rate = self.settings.budget.cost_per_hour
        return None if rate is None else self.ledger.used / 3600 * self.workers * rate

    def _tell_progress(self, generation: int) -> None:
        best, budget = best_of(self.trials, self.objective), self.settings.budget
        by_hand = best_of(self._hand_written_trials(), self.objective)
        done = len(self.trials) + self.found
        estimates = [] if not self.new else [(self.ledger.used - self.began) / self.new * max(0, budget.trials - done)]
        if budget.hours is not None:
            estimates.append(max(0.0, 3600 * budget.hours - self.ledger.used))
        self.on_progress(
            SearchProgress(
                scored=min(done, budget.trials),
                budget=budget.trials,
                generation=generation,
                best=self.objective.total(best.scores) if best else None,
                best_number=best.number if best else None,
                hand_written=self.objective.total(by_hand.scores) if by_hand else None,
                seconds_left=min(estimates, default=None),
                spent=self._spent(),
            )
        )

    def _study(self, stopped: SearchEnd) -> Study:
        return Study(
            settings=self.settings,
            objective=self.objective,
            coordinates=self.space.coordinates,
            trials=tuple(self.trials),
            best=best_of(self._searched(), self.objective),
            front=front(self.trials) if self.objective.several else (),
            sizes=self.sizes,
            sheets=self.sheets,
            recipes=self.recipes,
            population=generation_size(len(self.space.coordinates), self.settings),
            scored=len(self.first_of),
            new=self.new,
            seconds={**self.seconds, "wall": self.ledger.used},
            spent=self._spent(),
            stopped=stopped,
        )

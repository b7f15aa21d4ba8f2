"""The search: hand-written recipes first, then generation after generation, each scored, put on record and told.

Nothing of the search is stored but scored trials. Told the same in the same order, a seeded sampler asks for the same;
so a killed search begins anew, finds its trials in the ledger, and is where it was. Whatever could depend on who was
faster does not decide anything: a generation is told in the order in which it was asked, and what its candidates race
against is the best of the generations before.
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

_BASELINE = 3  # one trial of random search beside so many of the sampler, where a profile does not say


def score_hand_written(
    recipes: Sequence[HandWritten], score_all: ScoreAll, ledger: Ledger, directory: Path | None = None
) -> tuple[TrialScores, ...]:
    """What the hand-written recipes get on the documents of the search; :func:`search` begins with it.

    Raises:
        Refused: One of them cannot be scored: there is nothing to compare with.
    """
    requests = [TrialRequest(one.recipe, directory=one.directory) for one in recipes]
    scored = score_once(requests, score_all, ledger, directory=directory)
    for one, scores in zip(recipes, scored, strict=True):
        if scores.problem:
            raise Refused(
                f"sweep: hand-written recipe {one.label}",
                found=f"no score: {scores.problem}",
                expected="a score that candidates can be compared with",
                remedy="merge it by itself (mergegate run) and see",
            )
    return scored


def hand_written_recipes(
    space: Space, label: str, directory: Path | None = None, more: Sequence[HandWritten] = ()
) -> tuple[HandWritten, ...]:
    """The recipe that is searched with its start values, then the others."""
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
    """Search until the budget is used.

    Args:
        score_all: Scores candidates, in any order.
        hand_written: As of :func:`hand_written_recipes`; the first is the start.
        references: Parents that constraints compare with, by name, on the documents of the search.
        workers: That money is counted for.
        on_progress: Called with each trial that was scored, and after each generation.
        on_generation: Called with all trials so far.

    Raises:
        InvalidInput: The sampler cannot do what is asked.
        Refused: A hand-written recipe has no score, or processes die whatever they score.
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
    first_of: dict[str, Trial] = field(default_factory=dict)  # of each recipe the trial that was scored
    sizes: dict[MetricKey, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    new: int = 0  # scored in this run
    found: int = 0  # requests of this generation that are done
    began: float = 0.0

    def run(self, hand_written: Sequence[HandWritten], references: dict[str, Sheet]) -> Study:
        sampler = make_sampler(self.space, self.objective, self.settings)
        baseline = make_baseline(self.space, self.settings)
        self.began = self.ledger.used
        self._hand_written(hand_written, references)
        start = self.trials[0]
        sampler.begin(TrialResult(self.space.start, start.scores, start.violation))
        stopped: SearchEnd = "trials"
        generation, budget, asked, drawn = 0, self.settings.budget.trials, 0, 0
        while len(self.trials) < budget:
            points = sampler.ask()
            beside = min(self._beside(asked + len(points)) - drawn, budget - len(self.trials))
            kept = points[: budget - len(self.trials) - beside]
            own = [("sampler", point) for point in kept] + [("baseline", point) for point in baseline.draw(beside)]
            race = self._race()
            requests = [
                TrialRequest(self.space.recipe_of(point), race=race, directory=self.directory) for _, point in own
            ]
            if (over := self._is_over(requests)) is not None:
                stopped = over
                break
            self._generation(generation, own, requests)
            if len(kept) == len(points):
                told = self.trials[len(self.trials) - len(own) :][: len(points)]
                sampler.tell([TrialResult(one.point, one.scores, one.violation) for one in told])
            asked, drawn, generation = asked + len(kept), drawn + beside, generation + 1
        return self._study(stopped)

    def _hand_written(self, recipes: Sequence[HandWritten], references: dict[str, Sheet]) -> None:
        scored = score_hand_written(recipes, self.score_all, self.ledger, self.directory)
        start = scored[0].sheet
        self.references = {**references, HAND_WRITTEN: start}
        self.sizes = {asked: len(start[asked]) for asked in self.objective.asked}
        for number, (one, scores) in enumerate(zip(recipes, scored, strict=True)):
            point = self.space.start if number == 0 else {}
            self._add(self._trial(number, -1, "hand-written", one.label, point, scores), one.recipe, scores)
            self.sheets[number], self.recipes[number] = scores.sheet, one.recipe
        self._tell_progress(-1)

    def _beside(self, asked: int) -> int:
        """Trials of random search that there are beside so many of the sampler."""
        wanted = self.settings.baseline
        if wanted is None:
            most = self.settings.budget.trials // (_BASELINE + 1)
            return 0 if self.settings.sampler == "random" else min(most, asked // _BASELINE)
        searched = self.settings.budget.trials - len(self._by_people()) - wanted
        return min(wanted, math.ceil(wanted * asked / searched)) if searched > 0 else wanted

    def _by_people(self) -> list[Trial]:
        return [trial for trial in self.trials if trial.origin == "hand-written"]

    def _race(self) -> Race | None:
        """What the next generation is held against: the best so far, if it keeps all constraints."""
        best = best_of(self.trials, self.objective)
        if self.settings.racing.rule != "paired" or self.objective.several or best is None or best.violation:
            return None
        rule, penalty = self.settings.racing, self.objective.change_penalty
        lead = penalty * best.change if penalty else 0.0
        asked = {one: self.sheets[best.number][one] for one in self.objective.weights}
        looks = doubling_shares(rule.first)
        return Race(asked, self.objective.weights, looks, rule.error, self.objective.clips, lead)

    def _is_over(self, requests: Sequence[TrialRequest]) -> SearchEnd | None:
        """Whether time or money is used up; what was begun is ended, so a resumed search ends there too."""
        heat_keys = [request_key(replace(one, race=self._first_heat()), self.directory) for one in requests]
        keys = [request_key(one, self.directory) for one in requests]
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

    def _generation(self, generation: int, own: Sequence[tuple[str, Point]], requests: Sequence[TrialRequest]) -> None:
        keys = [recipe_key(request.recipe) for request in requests]
        new = {key: request for key, request in zip(keys, requests, strict=True) if key not in self.first_of}
        if self.settings.racing.rule == "halving":
            scored = self._halved(list(new.values()), generation)
        else:
            scored = list(self._score(list(new.values()), generation))
        results = dict(zip(new, scored, strict=True))
        begin = len(self.trials)
        for (origin, point), key, request in zip(own, keys, requests, strict=True):
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

        found = score_once(requests, self.score_all, self.ledger, directory=self.directory, on_scored=note)
        self.found = 0
        return found

    def _halved(self, requests: Sequence[TrialRequest], generation: int) -> list[TrialScores]:
        """Rounds of growing shares of the documents; who does not go on keeps what the last round said."""
        results: dict[int, TrialScores] = {}
        going = list(range(len(requests)))
        for share in heats(self.settings.racing):
            race = heat(share) if share < 1 else None
            scored = self._score([replace(requests[i], race=race) for i in going], generation)
            results.update(zip(going, scored, strict=True))
            if share < 1:
                scores = [self._scores(one) for one in scored]
                missed = [self._violation(one) for one in scored]
                going = [going[i] for i in going_on(rank(scores, missed, self.objective))]
        return [results[i] for i in range(len(requests))]

    def _rank_halved(self, begin: int) -> None:
        """Who was left behind is ranked below all that went on: by the difference to the best of them."""
        generation = [trial for trial in self.trials[begin:] if not trial.problem]
        best = best_of(generation, self.objective)
        if best is None or self.objective.several:
            return
        least = min(trial.scores[0] for trial in generation if not trial.dropped)
        against = Race(self.sheets[best.number], self.objective.weights, (1.0,), clips=self.objective.clips)
        for trial in generation:
            if trial.dropped and trial.number in self.sheets:
                score = best.scores[0] + against.difference(self.sheets[trial.number])
                self.trials[trial.number] = replace(trial, scores=(min(score, least),))

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
        share, values, missed = 1.0, self._scores(scores), self._violation(scores)
        if not scores.problem:
            share = sum(len(scores.sheet[asked]) for asked in self.sizes) / max(1, sum(self.sizes.values()))
        if scores.dropped and race is not None and not scores.problem:
            best = best_of(self.trials[: self._before(generation)], self.objective)
            assert best is not None
            own = self.objective.change_penalty * scores.change if self.objective.change_penalty else 0.0
            values = (best.scores[0] + race.lead + race.difference(scores.sheet) - own,)
        return Trial(
            number=number,
            generation=generation,
            origin=origin,
            label=label,
            point=point,
            scores=values,
            violation=missed,
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
        """Sheets are kept of people's recipes and of what may still be the best: memory does not grow with trials."""
        best, candidate = best_of(self.trials, self.objective), best_of(self._searched(), self.objective)
        kept = {one.number for one in (*self._by_people(), best, candidate) if one is not None}
        if self.objective.several:
            kept |= {one.number for one in front(self.trials)}
        self.sheets = {number: sheet for number, sheet in self.sheets.items() if number in kept}
        self.recipes = {number: recipe for number, recipe in self.recipes.items() if number in kept}

    def _searched(self) -> list[Trial]:
        return [trial for trial in self.trials if trial.origin != "hand-written"]

    def _spent(self) -> float | None:
        rate = self.settings.budget.per_hour
        return None if rate is None else self.ledger.used / 3600 * self.workers * rate

    def _tell_progress(self, generation: int) -> None:
        best, budget = best_of(self.trials, self.objective), self.settings.budget
        by_hand = best_of(self._by_people(), self.objective)
        done = len(self.trials) + self.found
        left = [] if not self.new else [(self.ledger.used - self.began) / self.new * max(0, budget.trials - done)]
        if budget.hours is not None:
            left.append(max(0.0, 3600 * budget.hours - self.ledger.used))
        self.on_progress(
            SearchProgress(
                scored=min(done, budget.trials),
                budget=budget.trials,
                generation=generation,
                best=self.objective.total(best.scores) if best else None,
                best_number=best.number if best else None,
                hand_written=self.objective.total(by_hand.scores) if by_hand else None,
                seconds_left=min(left, default=None),
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

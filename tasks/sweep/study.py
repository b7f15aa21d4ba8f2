"""Define the trials of a search and its result, the study, and rank trials.

Feasible candidates rank before infeasible ones, infeasible ones rank by the size of their violation (Deb 2000, Comput.
Methods Appl. Mech. Eng. 186:311), and candidates without a score come last. With several objectives the result is a
Pareto front, and its candidate with the best weighted sum is confirmed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from mergegate.tasks.sweep.objective import MetricKey, Objective, ScoresByMetric
from mergegate.tasks.sweep.race import Race
from mergegate.tasks.sweep.settings import Point, SoupRule, SweepSettings
from mergegate.tasks.sweep.space import Coordinate

SearchedSet = Literal["search", "confirmation"]
SearchEnd = Literal["trials", "hours", "cost"]


@dataclass(frozen=True)
class TrialRequest:
    """Request to score a candidate. Picklable.

    Args:
        recipe: Recipe of the candidate as parsed YAML, without placeholders.
        document_set: Set of documents for the scores.
        race: Rule that may drop the candidate early. Default: it is scored on all documents.
        directory: Directory to which relative paths in the recipe refer. Default: there are none.
    """

    recipe: Mapping[str, Any]
    document_set: SearchedSet = "search"
    race: Race | None = None
    directory: Path | None = None


@dataclass(frozen=True)
class TrialScores:
    """Scores of one candidate.

    Args:
        table: One number per document, by metric. For a dropped candidate, only the first documents.
        dropped: Whether the race dropped the candidate before all documents were evaluated.
        change: Relative size of the change from the base, ``|merge - base| / |base|`` over all tensors. NaN if it was
            not measured.
        seconds: Wall time by activity, such as ``merge``, ``load`` and ``score``.
        problem: Why there is no score (the merge was refused or contains NaN). Empty if there is a score.
    """

    table: ScoresByMetric
    dropped: bool = False
    change: float = float("nan")
    seconds: Mapping[str, float] | None = None
    problem: str = ""


@dataclass(frozen=True)
class Trial:
    """Candidate of a search, with its parameters and scores.

    Args:
        number: Index from 0, in the order of proposal.
        generation: Generation in which the candidate was proposed, or -1 for a hand-written recipe.
        origin: ``hand-written``, ``sampler`` or ``baseline`` (random search). In the search of a soup, ``ingredient``
            or ``soup``.
        label: Name of a hand-written recipe, or of an ingredient. Empty for other trials.
        point: Values by name of coordinate.
        scores: One number per objective; more is better. A dropped trial has the incumbent's score plus the observed
            mean difference. If there is a ``problem``, scores are NaN.
        violation: Sum of all constraint violations, in the unit of the scores, or 0 if the candidate is feasible.
        documents: Share of the search documents that were evaluated, in (0, 1].
        dropped: See ``TrialScores``.
        change: See ``TrialScores``.
        seconds: Total wall time.
        problem: See ``TrialScores``.
    """

    number: int
    generation: int
    origin: str
    label: str
    point: Point
    scores: tuple[float, ...]
    violation: float = 0.0
    documents: float = 1.0
    dropped: bool = False
    change: float = float("nan")
    seconds: float = 0.0
    problem: str = ""

    @property
    def is_complete(self) -> bool:
        """Whether the trial has a score on all documents."""
        return not (self.dropped or self.problem) and bool(self.scores) and not any(map(math.isnan, self.scores))


@dataclass(frozen=True)
class HandWritten:
    """Recipe written by a user, which the winner must beat."""

    label: str
    recipe: Mapping[str, Any]
    directory: Path | None = None


@dataclass(frozen=True)
class SoupStep:
    """One ingredient of a soup, and what the search found about it.

    Args:
        ingredient: Short name of the model.
        trial: Number of the trial of the ingredient alone.
        gain: Change of the score on the search documents when the ingredient joined the soup. None for the first
            ingredient, and for ingredients that did not join because one of the two recipes has no score.
        chosen: Whether the ingredient joined the soup.
    """

    ingredient: str
    trial: int
    gain: float | None
    chosen: bool


@dataclass(frozen=True)
class SoupSearch:
    """Course of the search of a soup.

    Args:
        rule: Rule that chose the ingredients.
        steps: Ingredients, best first.
        chain: Numbers of the trials of nested soups: the best model, then the soup after each model that joined. With
            the rule ``uniform``, only the best model and the average of all models.
    """

    rule: SoupRule
    steps: tuple[SoupStep, ...]
    chain: tuple[int, ...]


@dataclass(frozen=True)
class SearchProgress:
    """Progress of a running search.

    Args:
        trials: Number of trials so far.
        budget: Largest number of trials.
        generation: Number of the running generation, or -1 for the hand-written recipes.
        best: Best score so far. None until a trial has a score.
        best_number: Number of the trial with this score.
        hand_written: Best score of a hand-written recipe. None until such a recipe has a score.
        seconds_left: Estimated remaining seconds. None until a trial has been scored in this run.
        spent: Money spent so far. None without ``cost_per_hour``.
    """

    trials: int
    budget: int
    generation: int
    best: float | None = None
    best_number: int | None = None
    hand_written: float | None = None
    seconds_left: float | None = None
    spent: float | None = None


@dataclass(frozen=True)
class Study:
    """Result of a search that has ended.

    Args:
        settings: Settings of the sweep.
        objective: Objective of the search.
        coordinates: Coordinates of the search space, in order.
        trials: All trials, sorted by number.
        best: Best trial without hand-written recipes. None if no such trial has a score.
        front: Trials on the Pareto front. Empty if there is only one objective.
        sizes: Number of search documents by metric.
        tables: Score tables of the hand-written recipes and of the best candidates, by trial number.
        recipes: Recipes of the trials in ``tables``, by trial number.
        population: Number of candidates in each generation of the sampler.
        scored_count: Number of different recipes that were scored. Trials with the same recipe share its scores.
        new_count: Number of trials that were scored in this run.
        seconds: Seconds by activity. ``wall`` is the elapsed time of the search, others are totals over all trials.
        spent: Money that was spent. None without ``cost_per_hour``.
        stop_reason: Limit of the budget that ended the search.
        soup: Course of the search of a soup. None if free parameters were searched.
    """

    settings: SweepSettings
    objective: Objective
    coordinates: tuple[Coordinate, ...]
    trials: tuple[Trial, ...]
    best: Trial | None
    front: tuple[Trial, ...]
    sizes: Mapping[MetricKey, int]
    tables: Mapping[int, ScoresByMetric]
    recipes: Mapping[int, Mapping[str, Any]]
    population: int
    scored_count: int
    new_count: int
    seconds: Mapping[str, float]
    spent: float | None
    stop_reason: SearchEnd
    soup: SoupSearch | None = None

    def summary(self) -> str:
        """Return ``60 trials, best -0.0049 (hand-written -0.0072) · 63 % of the documents evaluated``."""
        best = f"best {self.objective.total(self.best.scores):.4g}" if self.best else "no candidate has a score"
        by_hand = f"{self.objective.total(self.reference.scores):.4g}"
        source = "" if self.new_count else ", all cached"
        effort = (
            "" if self.evaluated_share == 1 else f" · {100 * self.evaluated_share:.0f} % of the documents evaluated"
        )
        if self.soup:
            chosen = f"{sum(step.chosen for step in self.soup.steps)} of {len(self.soup.steps)} models"
            return f"{self.soup.rule} soup of {chosen}, {len(self.trials)} trials{source}, {best}"
        return f"{len(self.trials)} trials{source}, {best} (hand-written {by_hand}){effort}"

    @property
    def hand_written(self) -> tuple[Trial, ...]:
        """Trials of hand-written recipes. The first is the searched recipe with its start values."""
        return tuple(trial for trial in self.trials if trial.origin == "hand-written")

    @property
    def reference(self) -> Trial:
        """Trial of the hand-written recipe with the best score on the documents of the search."""
        return best_of(self.hand_written, self.objective) or self.hand_written[0]

    @property
    def evaluated_share(self) -> float:
        """Share of the search documents that were evaluated, averaged over all candidates."""
        shares = [trial.documents for trial in self.trials if trial.origin != "hand-written" and not trial.problem]
        return sum(shares) / len(shares) if shares else 1.0


def rank(scores: Sequence[Sequence[float]], violations: Sequence[float], objective: Objective) -> list[int]:
    """Return each candidate's rank by Deb's rule (see the module), from 0 for the best. Ties share a rank."""
    keys = [_key(values, violation, objective) for values, violation in zip(scores, violations, strict=True)]
    ranks = {key: position for position, key in enumerate(sorted(set(keys)))}
    return [ranks[key] for key in keys]


def best_of(trials: Sequence[Trial], objective: Objective) -> Trial | None:
    """Return the best trial by Deb's rule, or None if no trial has a score.

    Only trials that were evaluated on all documents count. The first of several equal trials wins.
    """
    complete = [trial for trial in trials if trial.is_complete]
    return min(complete, key=lambda trial: (_key(trial.scores, trial.violation, objective), trial.number), default=None)


def front(trials: Sequence[Trial]) -> tuple[Trial, ...]:
    """Return the feasible trials on the Pareto front, sorted by number.

    For a trial on the front, no other feasible trial is at least as good in every objective and better in one.
    """
    feasible = [trial for trial in trials if trial.is_complete and trial.violation == 0]
    optimal = [
        trial
        for trial in feasible
        if not any(
            rival.scores != trial.scores and all(a >= b for a, b in zip(rival.scores, trial.scores, strict=True))
            for rival in feasible
        )
    ]
    return tuple(sorted(optimal, key=lambda trial: trial.number))


def _key(scores: Sequence[float], violation: float, objective: Objective) -> tuple[int, float]:
    total = objective.total(scores) if scores else math.nan
    if math.isnan(total) or math.isnan(violation):
        return (2, 0.0)
    return (1, violation) if violation > 0 else (0, -total)

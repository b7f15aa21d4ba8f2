"""Define a finished search and the progress of a running one, as shown in the report and the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from mergegate.tasks.sweep.objective import Objective, best_of
from mergegate.tasks.sweep.settings import SweepSettings
from mergegate.tasks.sweep.space import Coordinate
from mergegate.tasks.sweep.trials import MetricKey, Sheet, Trial

SearchEnd = Literal["trials", "hours", "cost"]


@dataclass(frozen=True)
class HandWritten:
    """Recipe written by a user, which the winner must beat."""

    label: str
    recipe: Mapping[str, Any]
    directory: Path | None = None


@dataclass(frozen=True)
class SearchProgress:
    """Progress of a running search.

    Args:
        scored: Number of trials so far.
        budget: Total number of trials.
        best: Best score so far. It is None until a trial has a score.
        hand_written: Score of the best hand-written recipe. It is None until such a recipe has a score.
        seconds_left: Estimated remaining time in seconds, based on the speed of this run. It is None until there is an
            estimate.
        spent: Money spent so far. It is None if no rate is configured.
    """

    scored: int
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
        coordinates: Coordinates of the search space, in their order in the space.
        trials: All trials, sorted by number.
        best: Candidate with the best score, not counting hand-written recipes. It is None if no candidate has a score.
        front: Trials on the Pareto front. It is empty if there is only one objective.
        sizes: Number of search documents for each pair of task and measure.
        sheets: Scores of the hand-written recipes and of the best candidates, by trial number.
        recipes: Recipes of the same trials as in ``sheets``, by trial number.
        population: Number of candidates in each generation of the sampler.
        scored: Number of trials that were scored, in this run or an earlier run. All other trials duplicate one of
            these.
        new: Number of trials that were scored in this run.
        seconds: Duration in seconds by activity. ``merge``, ``load`` and ``score`` are totals over all trials, and
            ``wall`` is the elapsed time of the search.
        spent: Money that was spent. It is None if no rate is configured.
        stopped: Reason why the search ended, such as the limit of the budget that was reached.
    """

    settings: SweepSettings
    objective: Objective
    coordinates: tuple[Coordinate, ...]
    trials: tuple[Trial, ...]
    best: Trial | None
    front: tuple[Trial, ...]
    sizes: Mapping[MetricKey, int]
    sheets: Mapping[int, Sheet]
    recipes: Mapping[int, Mapping[str, Any]]
    population: int
    scored: int
    new: int
    seconds: Mapping[str, float]
    spent: float | None
    stopped: SearchEnd

    def summary(self) -> str:
        """Return ``60 trials, best -0.0049 (hand-written -0.0072) · 63 % of the documents asked``."""
        best = f"best {self.objective.total(self.best.scores):.4g}" if self.best else "none has a score"
        by_hand = f"{self.objective.total(self.reference.scores):.4g}"
        source = "" if self.new else ", all known"
        share = f" · {100 * self.asked:.0f} % of the documents asked" if self.asked < 1 else ""
        return f"{len(self.trials)} trials{source}, {best} (hand-written {by_hand}){share}"

    @property
    def hand_written(self) -> tuple[Trial, ...]:
        """Hand-written trials. The first is the searched recipe with its start values."""
        return tuple(trial for trial in self.trials if trial.origin == "hand-written")

    @property
    def reference(self) -> Trial:
        """Best hand-written recipe on the documents of the search."""
        return best_of(self.hand_written, self.objective) or self.hand_written[0]

    @property
    def asked(self) -> float:
        """Share of the search documents that was evaluated, averaged over all candidates of the search."""
        shares = [trial.documents for trial in self.trials if trial.origin != "hand-written" and not trial.problem]
        return sum(shares) / len(shares) if shares else 1.0

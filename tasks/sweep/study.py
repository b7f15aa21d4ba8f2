"""A search that is over, and where one stands: what the report and the terminal show of it."""

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
    """A recipe that a person wrote, and that the winner must beat."""

    label: str
    recipe: Mapping[str, Any]
    directory: Path | None = None


@dataclass(frozen=True)
class SearchProgress:
    """Where a search stands.

    Args:
        scored: Trials so far.
        budget: Trials altogether.
        best: Score of the best so far; None: there is none yet.
        hand_written: Score of the best hand-written recipe.
        seconds_left: At the pace of this run; None: nothing is known of it.
        spent: Money so far; None: it is not counted.
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
    """A search that is over.

    Args:
        coordinates: Of the space, in its order.
        trials: All, by number.
        best: The best candidate that was searched for, hand-written ones apart; None: none has a score.
        front: Of several objectives; of one, empty.
        sizes: Documents of the search set of each (task, measure).
        sheets: By number: of hand-written recipes and of the best.
        recipes: By number: of the same.
        population: Candidates of a generation of the sampler.
        scored: Trials that were scored, now or before; all others are equal to one of them.
        new: Those that were scored in this run.
        seconds: Over all trials: ``merge``, ``load``, ``score``; and ``wall``, of the search itself.
        spent: Money; None: it is not counted.
        stopped: What ended it.
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
        """``60 trials, best -0.0049 (hand-written -0.0072) · 63 % of the documents asked``."""
        best = f"best {self.objective.total(self.best.scores):.4g}" if self.best else "none has a score"
        by_hand = f"{self.objective.total(self.reference.scores):.4g}"
        known = "" if self.new else ", all known"
        asked = f" · {100 * self.asked:.0f} % of the documents asked" if self.asked < 1 else ""
        return f"{len(self.trials)} trials{known}, {best} (hand-written {by_hand}){asked}"

    @property
    def hand_written(self) -> tuple[Trial, ...]:
        """The recipes that people wrote; the first is the one with the holes at their start values."""
        return tuple(trial for trial in self.trials if trial.origin == "hand-written")

    @property
    def reference(self) -> Trial:
        """The best hand-written recipe, on the documents of the search."""
        return best_of(self.hand_written, self.objective) or self.hand_written[0]

    @property
    def asked(self) -> float:
        """Share of the documents that was asked, over all candidates that were searched for."""
        shares = [trial.documents for trial in self.trials if trial.origin != "hand-written" and not trial.problem]
        return sum(shares) / len(shares) if shares else 1.0

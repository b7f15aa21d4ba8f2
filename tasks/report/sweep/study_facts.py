"""Compute facts about a sweep's trials: which of them count, the best so far, the table of recipes and the optimism.

All functions are pure functions of ``SweepContent``. They neither draw nor format anything.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from mergegate.tasks.report.sweep.content import SweepContent
from mergegate.tasks.sweep import INGREDIENT, Trial

RecipeRole = Literal["hand-written", "reference", "winner", "baseline"]
TrialState = Literal["asked", "dropped", "infeasible", "failed"]
HAND_WRITTEN, SAMPLER, BASELINE = "hand-written", "sampler", "baseline"


@dataclass(frozen=True)
class RecipeRow:
    """A recipe in the table, with its scores on the search documents and on held-out documents.

    No trial of the search has seen the held-out documents. NaN means that a score is unknown.
    """

    label: str
    detail: str  # 'trial 41', 'best of 15, trial 9'
    trial: int
    role: RecipeRole
    search: float
    held_out: float

    @property
    def optimism(self) -> float:
        """Excess of the score on the search documents over the score on held-out documents."""
        return self.search - self.held_out


@dataclass(frozen=True)
class SearchHistory:
    """Candidates of one origin in order, with the best score after each of them. NaN before the first score."""

    trials: tuple[Trial, ...]
    best: tuple[float, ...]


def state_of(trial: Trial) -> TrialState:
    """Return the state of a trial. Only trials in state ``asked``, scored on all documents, can win."""
    if trial.problem or not trial.scores or not all(math.isfinite(score) for score in trial.scores):
        return "failed"
    if trial.violation > 0:
        return "infeasible"
    return "dropped" if trial.dropped else "asked"


def score_in(trial: Trial, objective: int) -> float:
    """Return the score of a trial in one objective, or NaN if it failed."""
    return trial.scores[objective] if len(trial.scores) > objective else math.nan


def by_origin(trials: Sequence[Trial], origin: str) -> tuple[Trial, ...]:
    return tuple(trial for trial in trials if trial.origin == origin)


def search_history(trials: Sequence[Trial], objective: int) -> SearchHistory:
    """Return the trials with the best score after each of them."""
    best, current = [], math.nan
    for trial in trials:
        score = score_in(trial, objective)
        if state_of(trial) == "asked" and not score <= current:
            current = score
        best.append(current)
    return SearchHistory(tuple(trials), tuple(best))


def trial_numbered(content: SweepContent, number: int | None) -> Trial | None:
    return next((trial for trial in content.trials if trial.number == number), None)


def recipe_rows(content: SweepContent, objective: int) -> tuple[RecipeRow, ...]:
    """Return rows for the hand-written recipes in order, the best trial of the random baseline, and the winner.

    For a soup, the best ingredient follows the hand-written recipes. The soup can itself be a hand-written recipe.
    """
    held_out = {item.trial: item.scores[objective] for item in content.held_out if len(item.scores) > objective}

    def row(trial: Trial, label: str, detail: str, role: RecipeRole) -> RecipeRow:
        scores = score_in(trial, objective), held_out.get(trial.number, math.nan)
        return RecipeRow(label, detail, trial.number, role, *scores)

    rows = []
    for trial in by_origin(content.trials, HAND_WRITTEN):
        if content.soup and trial.number == content.winner:
            continue
        role: RecipeRole = "reference" if trial.number == content.reference else "hand-written"
        rows.append(row(trial, trial.label or "hand-written", "", role))
    scored = [trial for trial in by_origin(content.trials, INGREDIENT) if state_of(trial) == "asked"]
    if scored:
        best = max(scored, key=lambda trial: score_in(trial, objective))
        role = "reference" if best.number == content.reference else "hand-written"
        rows.append(row(best, best.label, "best ingredient", role))
    baseline = by_origin(content.trials, BASELINE)
    scored = [trial for trial in baseline if state_of(trial) == "asked"]
    random = max(scored, key=lambda trial: score_in(trial, objective), default=None)
    if random is not None and random.number != content.winner:
        rows.append(row(random, "random search", f"best of {len(baseline)}, trial {random.number}", "baseline"))
    winner = trial_numbered(content, content.winner)
    if winner is not None and (content.soup or winner.origin != HAND_WRITTEN):
        origin = ", of the random baseline" if winner.origin == BASELINE else ""
        rows.append(row(winner, "winner", f"trial {winner.number}{origin}", "winner"))
    return tuple(rows)


def documents_used(trials: Sequence[Trial]) -> float:
    """Return the share of the search documents that candidates were scored on, on average. NaN without candidates.

    Hand-written recipes are not counted, because they are always scored on all documents. Failed trials are not counted
    either.
    """
    shares = [trial.documents for trial in trials if trial.origin != HAND_WRITTEN and state_of(trial) != "failed"]
    return sum(shares) / len(shares) if shares else math.nan


def decimals_for(content: SweepContent, objective: int) -> int:
    """Return the number of decimals that distinguishes this sweep's recipes, in the unit of the objective. At least 1.

    With a confirmation, the numbers show two digits of the gain, or of half its interval if that is larger, and enough
    decimals that neither the gain nor an end of its interval is rounded to zero. Without one, they show two digits of
    the best score, or of its distance to the next score if that is smaller.
    """
    shown, test = content.objectives[objective], content.confirmation
    max_decimals = 3 if shown.factor == 100 else 6
    if test is not None and test.objective == objective:
        size = max(abs(test.gain), (test.high - test.low) / 2)
        nonzero = [shown.factor * end for end in (test.low, test.high, test.gain) if end != 0]
    else:
        scores = sorted({row.search for row in recipe_rows(content, objective) if math.isfinite(row.search)})
        size = min([abs(scores[-1]), *(scores[-1] - next_best for next_best in scores[-2:-1])]) if scores else 1.0
        nonzero = []
    size *= shown.factor
    digits = 1 - math.floor(math.log10(size)) if math.isfinite(size) and size > 0 else 1
    decimals = max(1, min(max_decimals - 1 if shown.factor == 100 else max_decimals, digits))
    while decimals < max_decimals and any(float(f"{end:.{decimals}f}") == 0 for end in nonzero):
        decimals += 1
    return decimals

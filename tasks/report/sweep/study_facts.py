"""What a person wants to know of a sweep's trials: which count, the best so far, the table of recipes, the optimism.

Pure functions of ``SweepContent``; nothing here is drawn or worded.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from mergegate.tasks.report.sweep.content import SweepContent
from mergegate.tasks.sweep import Trial

TrialState = Literal["asked", "dropped", "infeasible", "failed"]
HAND_WRITTEN, SAMPLER, BASELINE = "hand-written", "sampler", "baseline"


@dataclass(frozen=True)
class RecipeRow:
    """One recipe of the table: what it scored where it was searched, and on documents that no trial saw. NaN: not
    known."""

    label: str
    detail: str  # 'trial 41', 'the best of 15, trial 9'
    trial: int
    role: Literal["hand-written", "reference", "winner", "baseline"]
    search: float
    held_out: float

    @property
    def optimism(self) -> float:
        """By how much the search documents flatter it."""
        return self.search - self.held_out


@dataclass(frozen=True)
class SearchHistory:
    """The candidates of one origin in their order: their scores, and the best until then (NaN before the first)."""

    trials: tuple[Trial, ...]
    best: tuple[float, ...]


@dataclass(frozen=True)
class SelectionBias:
    """The winner's lead over the reference, as scores are: on the search documents, and on those no trial saw."""

    search: float
    held_out: float


def state_of(trial: Trial) -> TrialState:
    """What became of a trial. Only one that was ``asked`` everything, within the constraints, can win."""
    if trial.problem or not trial.scores or not all(math.isfinite(score) for score in trial.scores):
        return "failed"
    if trial.violation > 0:
        return "infeasible"
    return "dropped" if trial.dropped else "asked"


def score_in(trial: Trial, objective: int) -> float:
    """NaN of a failed one."""
    return trial.scores[objective] if len(trial.scores) > objective else math.nan


def by_origin(trials: Sequence[Trial], origin: str) -> tuple[Trial, ...]:
    return tuple(trial for trial in trials if trial.origin == origin)


def best_asked(trials: Sequence[Trial], objective: int) -> Trial | None:
    """The best that was asked everything; the first of equals."""
    able = [trial for trial in trials if state_of(trial) == "asked"]
    return max(able, key=lambda trial: score_in(trial, objective), default=None)


def course_of(trials: Sequence[Trial], objective: int) -> SearchHistory:
    best, known = [], math.nan
    for trial in trials:
        score = score_in(trial, objective)
        if state_of(trial) == "asked" and not score <= known:
            known = score
        best.append(known)
    return SearchHistory(tuple(trials), tuple(best))


def trial_numbered(content: SweepContent, number: int | None) -> Trial | None:
    return next((trial for trial in content.trials if trial.number == number), None)


def trials_of_front(content: SweepContent) -> tuple[Trial, ...]:
    """The trials of the front, the best in the first objective first."""
    known = [trial for trial in content.trials if trial.number in content.front and state_of(trial) != "failed"]
    return tuple(sorted(known, key=lambda trial: (-score_in(trial, 0), trial.number)))


def recipe_rows(content: SweepContent, objective: int) -> tuple[RecipeRow, ...]:
    """Hand-written recipes in their order, the best of the random baseline, and the winner last."""
    unseen = {one.trial: one.scores[objective] for one in content.held_out if len(one.scores) > objective}
    rows = []
    for trial in by_origin(content.trials, HAND_WRITTEN):
        is_reference = trial.number == content.reference
        label = trial.label or "hand-written"
        rows.append(_row(trial, label, "", "reference" if is_reference else "hand-written", unseen, objective))
    baseline = by_origin(content.trials, BASELINE)
    best = best_asked(baseline, objective)
    if best is not None and best.number != content.winner:
        detail = f"the best of {len(baseline)}, trial {best.number}"
        rows.append(_row(best, "random search", detail, "baseline", unseen, objective))
    winner = trial_numbered(content, content.winner)
    if winner is not None and winner.origin != HAND_WRITTEN:
        origin = ", of the random baseline" if winner.origin == BASELINE else ""
        rows.append(_row(winner, "winner", f"trial {winner.number}{origin}", "winner", unseen, objective))
    return tuple(rows)


def _row(
    trial: Trial,
    label: str,
    detail: str,
    role: Literal["hand-written", "reference", "winner", "baseline"],
    unseen: dict[int, float],
    objective: int,
) -> RecipeRow:
    return RecipeRow(label, detail, trial.number, role, score_in(trial, objective), unseen.get(trial.number, math.nan))


def optimism_of(content: SweepContent, objective: int) -> SelectionBias | None:
    """None where winner or reference is not known on both sets, or they are one."""
    rows = {row.role: row for row in recipe_rows(content, objective)}
    winner, reference = rows.get("winner"), rows.get("reference")
    if winner is None or reference is None:
        return None
    found = SelectionBias(winner.search - reference.search, winner.held_out - reference.held_out)
    return found if math.isfinite(found.search) and math.isfinite(found.held_out) else None


def documents_used(trials: Sequence[Trial]) -> float:
    """Share of the search documents that candidates were asked, of all that all candidates would have been; NaN
    without candidates. Hand-written recipes are always asked everything, and are not counted; nor are failed ones."""
    raced = [one.documents for one in trials if one.origin != HAND_WRITTEN and state_of(one) != "failed"]
    return sum(raced) / len(raced) if raced else math.nan


def decimals_for(content: SweepContent, objective: int) -> int:
    """How many decimals tell this sweep's recipes apart, in the objective's unit: two digits of the gain or of half its
    interval, whichever is larger, and as many as leave the interval's ends on their side of zero; at least 1.

    Where nothing was confirmed, two digits of the best score or of its distance to the next, whichever is smaller.
    """
    shown, test = content.objectives[objective], content.confirmation
    most = 3 if shown.factor == 100 else 6
    if test is not None and test.objective == objective:
        size = max(abs(test.gain), (test.high - test.low) / 2)
        kept = [shown.factor * end for end in (test.low, test.high, test.gain) if end != 0]
    else:
        scores = sorted({row.search for row in recipe_rows(content, objective) if math.isfinite(row.search)})
        size = min([abs(scores[-1]), *(scores[-1] - next_best for next_best in scores[-2:-1])]) if scores else 1.0
        kept = []
    size *= shown.factor
    digits = 1 - math.floor(math.log10(size)) if math.isfinite(size) and size > 0 else 1
    decimals = max(1, min(most - 1 if shown.factor == 100 else most, digits))
    while decimals < most and any(float(f"{end:.{decimals}f}") == 0 for end in kept):
        decimals += 1
    return decimals

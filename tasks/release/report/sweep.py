"""Define the content of a sweep's page as one frozen value, and compute facts about its trials.

Scores are stored as the search uses them: more is better, log-likelihoods are in nats, accuracies are shares. Each
objective defines the factor and the unit for display. All functions are pure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field

from mergegate.tasks.release.report.wording import MINUS, NONE, number, plain
from mergegate.tasks.sweep import (
    INGREDIENT,
    TEXT,
    Budget,
    Confirmation,
    ConfirmationPower,
    Coordinate,
    NothingToConfirm,
    Racing,
    SoupResult,
    Study,
    Term,
    Trial,
)

RecipeRole = Literal["hand-written", "reference", "winner", "baseline"]
TrialState = Literal["asked", "dropped", "infeasible", "failed"]
HAND_WRITTEN, SAMPLER, BASELINE = "hand-written", "sampler", "baseline"
_SAMPLERS = {"cma": "CMA-ES", "random": "random search", "tpe": "TPE", "gp": "a Gaussian process", "nsga2": "NSGA-II"}
_TITLES = {
    "exact": "exact match",
    "probability": "probability of the correct answer",
    "log_likelihood": "log-likelihood of the answers",
    "entropy": "negative entropy of the answers",
    "metric": "metric",
}
_UNITS = {
    "exact": ("points", 100.0),
    "probability": ("points", 100.0),
    "log_likelihood": ("nats per token", 1.0),
    "entropy": ("nats", 1.0),
}


class ReportedObjective(BaseModel):
    """Quantity that the search maximizes. Each trial has one score for it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    title: str  # 'log-likelihood of the answers'
    terms: tuple[str, ...] = ()  # terms of the weighted mean: 'copy', 'reverse, twice'
    unit: str = ""  # unit of the displayed numbers: 'nats per token', 'points'
    factor: float = 1.0  # factor from a score to that unit: 100 from shares to points


class SweepContent(BaseModel):
    """All content of a sweep's page."""

    # A trial without a score has NaN, which JSON does not support.
    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")

    name: str
    method: str  # subject of the search: 'ties of 2 over base'
    finished: bool = True  # Whether the search is complete. False if it was stopped and can be resumed.
    # Reason why the search ended before its budget, or why there was no candidate to confirm, as a sentence. Empty if
    # neither happened.
    ending: str = ""
    # Numbers and categories that the search varies. Each trial's ``point`` holds their values.
    parameters: tuple[Coordinate, ...]
    importances: Mapping[str, float] = {}  # Importance of each parameter by name. They add up to 1.
    no_importances: str = ""  # reason why there are no importances; empty if there are
    objectives: tuple[ReportedObjective, ...] = Field(min_length=1)
    constraints: tuple[str, ...] = ()  # a sentence each
    trials: tuple[Trial, ...]
    winner: int | None = None  # number of the best trial; None if no candidate has a score
    # Number of the best hand-written trial, which the winner is tested against. For a soup, it can also be the best
    # ingredient.
    reference: int | None = None
    # Result for each ingredient of a soup; None if free parameters were searched.
    soup: SoupResult | None = Field(default=None, exclude_if=lambda soup: soup is None)
    # For several objectives, numbers of the trials that no other trial beats in all objectives.
    front: tuple[int, ...] = ()
    # Scores by trial number on the confirmation documents, which no trial of the search has seen.
    held_out: Mapping[int, tuple[float, ...]] = {}
    # Paired test of the winner against the reference; None if the search did not reach it.
    confirmation: Confirmation | None = None
    power: ConfirmationPower | None = None  # gain that the confirmation can detect, estimated before the sweep
    # Number of documents by set (``search``, ``confirmation``, ``gate``) and task.
    sizes: Mapping[str, Mapping[str, int]] = {}
    racing: Racing | None = None  # rule that drops hopeless candidates; None if all were scored on all documents
    budget: Budget
    spent_hours: float = 0.0  # wall time over all starts of the search
    spent_cost: float | None = None  # worker hours at the profile's rate; None if it sets no rate
    recipe: str = ""  # recipe of the winner, as YAML
    sampler: str = "cma"
    seed: int = 0
    population: int | None = None
    runner: str = "local"  # description of the runner: 'local, 2 workers'
    seconds: Mapping[str, float] = {}  # wall time of all trials together, for each part: merge, load, score
    reproduce: tuple[str, ...] = ()  # shell commands that reproduce the sweep
    versions: tuple[str, ...] = ()  # names and versions of the libraries

    def trial(self, number: int | None) -> Trial | None:
        return next((trial for trial in self.trials if trial.number == number), None)

    @property
    def sampler_name(self) -> str:
        return _SAMPLERS.get(self.sampler, self.sampler)

    @property
    def winner_word(self) -> str:
        """Word for the best trial: a search that was stopped has only a best trial so far."""
        return "winner" if self.finished else "best so far"


def sweep_content(study: Study, confirmation: Confirmation | NothingToConfirm, **facts: Any) -> SweepContent:
    """Return the content of a sweep's page.

    Args:
        study: The finished search.
        confirmation: Test of its winner, or the reason why there is none.
        facts: Fields of ``SweepContent`` that the search does not record, such as the name of the profile.
    """
    settings, ending, recipe = study.settings, [], ""
    tested = confirmation if isinstance(confirmation, Confirmation) else None
    if study.stop_reason != "trials":
        budget = "time" if study.stop_reason == "hours" else "cost"
        ending.append(
            f"The {budget} budget ended the search after {len(study.trials)} of {settings.budget.trials} trials."
        )
    if isinstance(confirmation, NothingToConfirm):
        ending.append(f"{confirmation.why[:1].upper()}{confirmation.why[1:]}.")
    if tested and tested.confirmed and tested.winner in study.recipes:
        winner = dict(study.recipes[tested.winner])
        recipe = yaml.safe_dump(winner, sort_keys=False, default_flow_style=None, width=100)
    terms, several = study.objective.terms, study.objective.multi_objective
    return SweepContent(
        ending=" ".join(ending),
        parameters=study.coordinates,
        # All terms form one objective in their common unit, or each term is an objective.
        objectives=tuple(_objective((term,)) for term in terms) if several else (_objective(terms),),
        constraints=_constraints(study),
        trials=study.trials,
        winner=tested.winner if tested else study.best.number if study.best else None,
        reference=tested.reference if tested else study.reference.number,
        soup=confirmation.soup,
        front=tuple(trial.number for trial in study.front),
        held_out=_held_out(study, tested) if tested else {},
        confirmation=tested,
        racing=None if several or study.soup or settings.racing.rule == "none" else settings.racing,
        budget=settings.budget.model_copy(update={"trials": len(study.trials)}) if study.soup else settings.budget,
        spent_hours=study.seconds.get("wall", 0.0) / 3600,
        spent_cost=study.spent,
        recipe=recipe,
        sampler=settings.sampler,
        seed=settings.seed,
        population=study.population if settings.sampler in ("cma", "nsga2") else None,
        seconds={part: study.seconds[part] for part in ("merge", "load", "score") if part in study.seconds},
        **facts,
    )


def _objective(terms: tuple[Term, ...]) -> ReportedObjective:
    titles = {_title(term) for term in terms}
    unit, factor = _UNITS.get(terms[0].key.measure, ("", 1.0))
    if len({_UNITS.get(term.key.measure) for term in terms}) > 1:
        unit, factor = "", 1.0
    if len(titles) == 1 and len(terms) == 1:
        suffix = f" of {terms[0].key.task}" if terms[0].key.task != TEXT else ""
        return ReportedObjective(title=f"{_title(terms[0])}{suffix}", unit=unit, factor=factor)
    texts = []
    for term in terms:
        details = [_title(term)] if len(titles) > 1 and term.key.task != TEXT else []
        details += [f"weight {term.weight:.2g}"] if len({item.weight for item in terms}) > 1 else []
        name = term.key.task or "the held-out text"
        texts.append(f"{name} ({', '.join(details)})" if details else name)
    title = titles.pop() if len(titles) == 1 else "weighted mean"
    return ReportedObjective(title=title, terms=tuple(texts), unit=unit, factor=factor)


def _title(term: Term) -> str:
    if term.key.task == TEXT:
        return "log-likelihood of the held-out text"
    return term.key.metric or _TITLES[term.key.measure]


def _constraints(study: Study) -> tuple[str, ...]:
    sentences = []
    for limit in study.objective.limits:
        unit, factor = _UNITS.get(limit.key.measure, ("", 1.0))
        allowed = f"{factor * limit.max_drop:g} {unit}".strip()
        title = limit.key.metric or _TITLES[limit.key.measure]
        sentences.append(
            f"Constraint: on {limit.key.task or 'the held-out text'}, the drop from "
            f"{limit.reference or 'the hand-written recipe'} may be at most {allowed} ({title})."
        )
    return tuple(sentences)


def _held_out(study: Study, test: Confirmation) -> dict[int, tuple[float, ...]]:
    """Return the held-out scores of the winner and the reference.

    They include the penalty that the search subtracted for the size of a change, so that they can be compared with the
    search scores.
    """
    if study.objective.multi_objective:
        winner = tuple(term.winner for term in test.terms)
        return {test.reference: tuple(term.reference for term in test.terms), test.winner: winner}
    scores = {trial.number: trial.scores for trial in study.trials if trial.number in (test.winner, test.reference)}
    return {
        test.reference: (test.held_out_reference - (test.searched_reference - scores[test.reference][0]),),
        test.winner: (test.held_out - (test.searched - scores[test.winner][0]),),
    }


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


def state_of(trial: Trial) -> TrialState:
    """Return the state of a trial. Only trials in state ``asked``, scored on all documents, can win."""
    if trial.problem or not trial.scores or not all(math.isfinite(score) for score in trial.scores):
        return "failed"
    if trial.violation > 0:
        return "infeasible"
    return "dropped" if trial.dropped else "asked"


def scored_trials(content: SweepContent) -> list[Trial]:
    return [trial for trial in content.trials if state_of(trial) != "failed"]


def score_in(trial: Trial, objective: int) -> float:
    """Return the score of a trial in one objective, or NaN if it failed."""
    return trial.scores[objective] if len(trial.scores) > objective else math.nan


def by_origin(trials: Sequence[Trial], origin: str) -> tuple[Trial, ...]:
    return tuple(trial for trial in trials if trial.origin == origin)


def best_so_far(trials: Sequence[Trial], objective: int) -> tuple[float, ...]:
    """Return the best score after each of the trials. NaN before the first score."""
    best, current = [], math.nan
    for trial in trials:
        score = score_in(trial, objective)
        if state_of(trial) == "asked" and not score <= current:
            current = score
        best.append(current)
    return tuple(best)


def recipe_rows(content: SweepContent, objective: int) -> tuple[RecipeRow, ...]:
    """Return rows for the hand-written recipes in order, the best trial of the random baseline, and the winner.

    For a soup, the best ingredient follows the hand-written recipes. The soup can itself be a hand-written recipe.
    """
    rows = []

    def add(trial: Trial, label: str, detail: str, role: RecipeRole) -> None:
        held_out = (*content.held_out.get(trial.number, ()), *(math.nan,) * (objective + 1))[objective]
        rows.append(RecipeRow(label, detail, trial.number, role, score_in(trial, objective), held_out))

    def best(origin: str) -> Trial | None:
        scored = [trial for trial in by_origin(content.trials, origin) if state_of(trial) == "asked"]
        return max(scored, key=lambda trial: score_in(trial, objective), default=None)

    for trial in by_origin(content.trials, HAND_WRITTEN):
        if not (content.soup and trial.number == content.winner):
            role: RecipeRole = "reference" if trial.number == content.reference else "hand-written"
            add(trial, trial.label or "hand-written", "", role)
    if (ingredient := best(INGREDIENT)) is not None:
        role = "reference" if ingredient.number == content.reference else "hand-written"
        add(ingredient, ingredient.label, "best ingredient", role)
    if (random := best(BASELINE)) is not None and random.number != content.winner:
        count = len(by_origin(content.trials, BASELINE))
        add(random, "random search", f"best of {count}, trial {random.number}", "baseline")
    winner = content.trial(content.winner)
    if winner is not None and (content.soup or winner.origin != HAND_WRITTEN):
        origin = ", of the random baseline" if winner.origin == BASELINE else ""
        add(winner, "winner", f"trial {winner.number}{origin}", "winner")
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
    factor, test = content.objectives[objective].factor, content.confirmation
    max_decimals = 3 if factor == 100 else 6
    if test is not None and objective == 0:
        size = max(abs(test.gain), (test.high - test.low) / 2)
        nonzero = [factor * end for end in (test.low, test.high, test.gain) if end != 0]
    else:
        scores = sorted({row.search for row in recipe_rows(content, objective) if math.isfinite(row.search)})
        size = min([abs(scores[-1]), *(scores[-1] - next_best for next_best in scores[-2:-1])]) if scores else 1.0
        nonzero = []
    size *= factor
    digits = 1 - math.floor(math.log10(size)) if math.isfinite(size) and size > 0 else 1
    decimals = max(1, min(max_decimals - 1 if factor == 100 else max_decimals, digits))
    while decimals < max_decimals and any(float(f"{end:.{decimals}f}") == 0 for end in nonzero):
        decimals += 1
    return decimals


def score_text(content: SweepContent, objective: int, score: float) -> str:
    """Return a score as text, in the unit in which the report shows its objective, without the name of the unit.

    The text has enough decimals to distinguish the recipes of this sweep. A score that is NaN or infinite becomes a
    placeholder. ``objective`` is an index, and ``score`` is in the unit of the search.
    """
    if not math.isfinite(score):
        return NONE
    return number(content.objectives[objective].factor * score, decimals_for(content, objective))


def value_text(value: bool | float | str | None) -> str:
    """Return a parameter's value with three digits, or a category as written."""
    if value is None:
        return NONE
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        return str(value).lower()  # as written in YAML
    if isinstance(value, int):
        return str(value).replace("-", MINUS)
    return plain(float(f"{value:.3g}"))

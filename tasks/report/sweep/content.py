"""Define the content of a sweep's page as one frozen value, for the page, the plots and the terminal.

Scores are stored as the search uses them: more is better, log-likelihoods are in nats, accuracies are shares. Each
objective defines the factor and the unit for display.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from mergegate.tasks.sweep import SoupResult, Trial

ParameterValue = bool | float | int | str  # types of a parameter's value


class _Part(BaseModel):
    # A trial without a score has NaN, which JSON does not support.
    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")


class ReportedParameter(_Part):
    """A number or category that the search varies. Each trial's ``point`` holds its value."""

    name: str
    type: Literal["float", "log", "integer", "category"] = "float"
    low: float = 0.0  # lower end of the range; unused for a category
    high: float = 1.0
    among: tuple[ParameterValue, ...] = ()  # choices of a category
    start: ParameterValue | None = None  # hand-written value; None if the recipe has none
    importance: float | None = None  # share in [0, 1]; None if it was not computed


class ReportedObjective(_Part):
    """Quantity that the search maximizes. Each trial has one score for it."""

    title: str  # 'log-likelihood of the answers'
    terms: tuple[str, ...] = ()  # terms of the weighted mean: 'copy', 'reverse, twice'
    unit: str = ""  # unit of the displayed numbers: 'nats per token', 'points'
    factor: float = 1.0  # factor from a score to that unit: 100 from shares to points


class ReportedSet(_Part):
    """Number of one task's documents for search, confirmation and gate."""

    task: str
    search: int = Field(ge=0)
    confirmation: int = Field(ge=0)
    gate: int | None = Field(default=None, ge=0)  # None if not counted yet


class HeldOut(_Part):
    """Scores of one trial on the confirmation documents, which no trial of the search has seen."""

    trial: int
    scores: tuple[float, ...]  # one score per objective


class ReportedConfirmation(_Part):
    """The single paired test of the winner against the best hand-written recipe, on the confirmation documents."""

    confirmed: bool
    gain: float  # mean paired difference, in the unit of the scores
    low: float  # lower end of the interval of the gain
    high: float
    p: float = Field(ge=0, le=1)  # one-sided; 1e-6 means at most 1e-6
    confidence: float = Field(gt=0, lt=1)
    documents: int = Field(ge=0)
    objective: int = 0  # objective whose unit is used; several objectives are tested by their weighted sum
    note: str = ""  # reason why a gain was not confirmed, as a sentence; else empty


class ReportedRacing(_Part):
    """Rule that drops hopeless candidates before they are scored on all documents."""

    rule: Literal["paired", "halving", "none"]
    error: float | None = None  # chance of dropping a candidate that is not worse; None if not stated
    looks: tuple[float, ...] = ()  # interim looks, as shares of the documents


class ReportedBudget(_Part):
    """Budget of the search, and the part that was spent."""

    trials: int
    hours: float | None = None
    cost: float | None = None
    spent_hours: float = 0.0  # wall time over all starts of the search
    spent_cost: float | None = None  # worker hours at the profile's rate; None if it sets no rate


class SweepContent(_Part):
    """All content of a sweep's page.

    Args:
        name: Name of the profile.
        method: Subject of the search: 'ties of 2 over base'.
        finished: Whether the search is complete. False if it was stopped and can be resumed.
        ending: Reason why the search ended before its budget, or why there was no candidate to confirm, as a sentence.
            Empty if neither happened.
        winner: Number of the best trial; None if no candidate has a score.
        reference: Number of the best hand-written trial, which the winner is tested against. For a soup, it can also be
            the best ingredient.
        soup: Result for each ingredient of a soup; None if free parameters were searched.
        front: For several objectives, numbers of the trials that no other trial beats in all objectives.
        confirmation: Result of the confirmation; None if the search did not reach it.
        no_importances: Reason why there are no importances; empty if there are.
        power: Gain that the confirmation can detect, estimated before the sweep, as a sentence.
        recipe: Recipe of the winner, as YAML.
        seconds_by_part: Wall time of all trials together, for each part: merge, load, score.
    """

    name: str
    method: str
    finished: bool = True
    ending: str = ""
    parameters: tuple[ReportedParameter, ...]
    objectives: tuple[ReportedObjective, ...] = Field(min_length=1)
    constraints: tuple[str, ...] = ()  # a sentence each
    trials: tuple[Trial, ...]
    winner: int | None = None
    reference: int | None = None
    soup: SoupResult | None = Field(default=None, exclude_if=lambda soup: soup is None)
    front: tuple[int, ...] = ()
    held_out: tuple[HeldOut, ...] = ()
    confirmation: ReportedConfirmation | None = None
    power: str = ""
    sets: tuple[ReportedSet, ...] = ()
    racing: ReportedRacing = ReportedRacing(rule="none")
    budget: ReportedBudget
    no_importances: str = ""
    recipe: str = ""
    sampler: str = "cma"
    seed: int = 0
    population: int | None = None
    runner: str = "local"  # 'local, 2 workers'
    seconds_by_part: tuple[tuple[str, float], ...] = ()
    reproduce: tuple[str, ...] = ()  # shell commands
    versions: tuple[str, ...] = ()  # 'cmaes 0.13.1'

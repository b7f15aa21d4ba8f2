"""What the page of a sweep says: one frozen value, put together by the flow, read by page, plots and terminal.

Scores stand here as the search knows them (more is better, log-likelihoods in nats, accuracies as shares). Each
objective says by which factor it is shown and in which unit.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from mergegate.tasks.sweep import Trial

ParameterValue = bool | float | int | str  # what a parameter can be


class _Part(BaseModel):
    # A trial without a score has NaN, which JSON has not.
    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")


class ReportedParameter(_Part):
    """One free number (or category) of the search, as it stands in each trial's ``point``."""

    name: str
    type: Literal["float", "log", "integer", "category"] = "float"
    low: float = 0.0  # ends of the range; of no meaning for a category
    high: float = 1.0
    among: tuple[ParameterValue, ...] = ()  # choices of a category
    start: ParameterValue | None = None  # the hand-written value; None where the recipe had none
    importance: float | None = None  # share in [0, 1]; None where it was not computed


class ReportedObjective(_Part):
    """What was searched for: one number of each trial."""

    title: str  # 'log-likelihood of the answers'
    terms: tuple[str, ...] = ()  # 'copy', 'reverse, twice': what it is the weighted mean of
    unit: str = ""  # of the numbers that are shown: 'nats a token', 'points'
    factor: float = 1.0  # from a score to that unit: 100 from shares to points


class ReportedSet(_Part):
    """How the documents of one task were divided."""

    task: str
    search: int = Field(ge=0)
    confirmation: int = Field(ge=0)
    gate: int | None = Field(default=None, ge=0)  # None: not counted yet


class HeldOut(_Part):
    """What a trial scored on the documents of the confirmation, which no trial of the search has seen."""

    trial: int
    scores: tuple[float, ...]  # by objective


class ReportedConfirmation(_Part):
    """The one paired test of the winner against the best hand-written recipe, on those documents."""

    confirmed: bool
    gain: float  # mean paired difference, as scores are
    low: float  # its interval
    high: float
    p: float = Field(ge=0, le=1)  # one-sided; 1e-6 stands for that and less
    confidence: float = Field(gt=0, lt=1)
    documents: int = Field(ge=0)
    objective: int = 0  # in whose unit it is told; of several it is about their weighted sum
    note: str = ""  # why it was not confirmed although it gained: a sentence; else empty


class ReportedRacing(_Part):
    """How hopeless candidates were dropped."""

    rule: Literal["paired", "halving", "none"]
    error: float | None = None  # chance to drop a candidate that is not worse; None: not stated
    looks: tuple[float, ...] = ()  # shares of the documents


class ReportedBudget(_Part):
    """What the search was given, and what it took."""

    trials: int
    hours: float | None = None
    cost: float | None = None
    spent_hours: float = 0.0  # wall time, over all starts
    spent_cost: float | None = None  # worker hours at the profile's rate; None without a rate


class SweepContent(_Part):
    """Everything that stands on the page of a sweep.

    Args:
        name: Of the profile.
        method: What is searched: 'ties of 2 over base'.
        finished: Whether the search came to its end; False of one that was stopped and can go on.
        ending: Why it ended before its budget, or why nothing was there to confirm: a sentence; else empty.
        winner: Number of the best trial; None where no candidate has a score.
        reference: Number of the best hand-written trial, against which the winner is tested.
        front: Of several objectives: numbers of the trials that no other one beats in all.
        confirmation: None where the search did not come to one.
        no_importances: Why there are none; empty where there are.
        power: What gain the confirmation would find, said before the sweep: a sentence.
        recipe: The winner's, as YAML.
        seconds_by_part: Wall time of all trials together: merge, load, score.
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

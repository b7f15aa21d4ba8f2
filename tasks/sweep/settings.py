"""Define the settings under ``sweep`` in a profile: free parameters, objective, documents and budget.

::

    recipe: recipes/ties-searched.yaml        # uses '$weight' and '$density' as values
    sweep:
      parameters:
        weight: {low: 0.2, high: 1.8, start: 1.0}
        density: {low: 0.05, high: 1.0, start: 0.5, layers: 4}
      objective: [{task: tasks/tickets.yaml, measure: log_likelihood}]
      documents: {search: 200, confirmation: 400}
      budget: {trials: 60}
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

# Number that a document yields for a model. More is better for all measures.
Measure = Literal["exact", "probability", "log_likelihood", "entropy", "metric"]
SamplerName = Literal["cma", "random", "tpe", "gp", "nsga2"]
Value = bool | float | int | str


class _Settings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class FreeParameter(_Settings):
    """A free parameter, used in the recipe as ``$name``, and its possible values."""

    renamed_keys: ClassVar[Mapping[str, str]] = {"among": "choices"}

    type: Literal["float", "log", "integer", "category"] = "float"
    low: float | None = None
    high: float | None = None
    choices: tuple[Value, ...] = Field(
        default=(), description="Possible values of a category (models, methods, numbers)."
    )
    start: Value = Field(description="The hand-written value: where the search begins, and what it must beat.")
    layers: int | None = Field(
        default=None, ge=1, description="One value for each of so many groups of layers; absent: one for all."
    )
    filters: tuple[str, ...] = Field(
        default=(), description="One value for each of these parts of tensors' names, and one for all others."
    )


class ObjectiveTerm(_Settings):
    """One term of the objective: the mean of a measure over the documents of a task."""

    task: str | None = Field(default=None, description="As under evaluate.tasks; absent: the perplexity documents.")
    measure: Measure = Field(
        default="log_likelihood",
        description="exact: the greedy answer is the reference's; probability of the right answer; log_likelihood of "
        "the right answer, nats a token; entropy: minus that of what the model expects, which needs no right answer; "
        "metric: the task's own, by lm-eval, answers written out.",
    )
    metric: str | None = Field(default=None, description="measure: metric: which ('exact_match,strict-match').")
    weight: float = Field(default=1.0, gt=0, le=1000)
    clip: float | None = Field(
        default=None, gt=0, description="log_likelihood: nothing below minus this counts, nats a token."
    )
    cluster_by: str | None = Field(default=None, description="Field of the documents that belong together.")


class Constraint(_Settings):
    """A task on which a candidate must not fall too far while the objective improves."""

    task: str
    measure: Measure = "exact"
    metric: str | None = None
    guarded_by: str | None = Field(default=None, description="A parent by name; absent: the hand-written recipe.")
    max_drop: float = Field(default=2.0, ge=0, description="Points (of log-likelihoods: hundredths of a nat).")


class SetSizes(_Settings):
    """Number of documents of each task that are reserved for the search and for the confirmation.

    The gate uses all other documents. Identical documents and documents of one cluster are always in the same set.
    """

    search: int = Field(default=200, ge=10)
    confirmation: int = Field(default=400, ge=20)
    seed: int = Field(default=0, ge=0, description="Another one, another division.")


class Budget(_Settings):
    """Limits of a search. The search ends at the first limit that it reaches."""

    renamed_keys: ClassVar[Mapping[str, str]] = {"per_hour": "cost_per_hour"}

    trials: int = Field(default=60, ge=1)
    hours: float | None = Field(default=None, gt=0, description="Of wall time, since it was first started.")
    cost: float | None = Field(default=None, gt=0, description="Money: worker hours times cost_per_hour.")
    cost_per_hour: float | None = Field(default=None, gt=0, description="What one worker costs an hour.")

    @model_validator(mode="after")
    def _money_has_a_rate(self) -> Self:
        if self.cost is not None and self.cost_per_hour is None:
            raise ValueError("cost needs cost_per_hour")
        return self


class Racing(_Settings):
    """Rule that drops hopeless candidates before they are evaluated on all documents."""

    rule: Literal["paired", "halving", "none"] = Field(
        default="paired",
        description="paired: at doubling looks, shown to be worse than the best so far; halving: the worse two thirds "
        "of each generation go on no further, without a stated error; none: every candidate is asked everything.",
    )
    error: float = Field(default=0.05, gt=0, lt=0.5, description="Chance to drop a candidate that is not worse.")
    first: float = Field(default=0.125, gt=0, le=1, description="Share of the documents at the first look.")


class SweepSettings(_Settings):
    """A search over the free parameters of a recipe."""

    renamed_keys: ClassVar[Mapping[str, str]] = {
        "hand_written": "baselines",
        "several": "multi_objective",
        "baseline": "random_trials",
        "view": "optuna_storage",
    }

    parameters: dict[str, FreeParameter] = Field(min_length=1)
    sum_to_one: tuple[tuple[str, ...], ...] = Field(default=(), description="Groups of parameters that sum to one.")
    baselines: tuple[str, ...] = Field(
        default=(), description="Further recipes that the winner must beat: files, beside the one that is searched."
    )
    objective: tuple[ObjectiveTerm, ...] = Field(min_length=1)
    multi_objective: bool = Field(
        default=False, description="Terms are objectives of their own, and the result is a front."
    )
    change_penalty: float = Field(
        default=0.0, ge=0, description="Subtracted, times the relative size of the change from the base."
    )
    constraints: tuple[Constraint, ...] = ()
    sampler: SamplerName = "cma"
    seed: int = Field(default=0, ge=0, lt=2**32)
    population: int | None = Field(default=None, ge=2, description="Candidates of a generation; absent: by dimension.")
    sigma: float = Field(default=0.2, gt=0, le=1, description="cma: first step, as a share of each range.")
    random_trials: int | None = Field(
        default=None, ge=0, description="Trials of random search beside; absent: a quarter."
    )
    documents: SetSizes = SetSizes()
    confidence: float = Field(
        default=0.975, gt=0.5, lt=1, description="One-sided, of the one confirmation: 0.975 is 0.95 two-sided."
    )
    budget: Budget = Budget()
    racing: Racing = Racing()
    optuna_storage: str | None = Field(
        default=None,
        description="Where the study is written for Optuna's dashboard: a file, or the address of a database; absent: "
        "nowhere, unless the dashboard is asked for.",
    )

    @property
    def asked_tasks(self) -> tuple[str, ...]:
        """Tasks of the objective and the constraints as written in the profile, without duplicates."""
        named = [*(term.task for term in self.objective), *(constraint.task for constraint in self.constraints)]
        return tuple(dict.fromkeys(task for task in named if task is not None))

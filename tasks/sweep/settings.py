"""Define the ``sweep`` section of a profile: free parameters, objective, documents and budget.

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
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

# Kind of number that each document gives a model. More is better for all measures.
Measure = Literal["exact", "probability", "log_likelihood", "entropy", "metric"]
SamplerName = Literal["cma", "random", "tpe", "gp", "nsga2"]
SoupRule = Literal["greedy", "uniform"]
Value = bool | float | int | str
Point = Mapping[str, Value]  # value by name of coordinate


class _Settings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class FreeParameter(_Settings):
    """A free parameter, used in the recipe as ``$name``, and its possible values."""

    type: Literal["float", "log", "integer", "category"] = Field(default="float", description="Kind of its values.")
    low: float | None = Field(default=None, description="Smallest value.")
    high: float | None = Field(default=None, description="Largest value.")
    choices: tuple[Value, ...] = Field(default=(), description="Choices of a category: models, methods or numbers.")
    start: Value = Field(description="Hand-written value. The search begins at it, and the winner must beat it.")
    layers: int | None = Field(
        default=None,
        ge=1,
        description="Number of groups of layers, each with its own value. Default: one value for all.",
    )
    filters: tuple[str, ...] = Field(
        default=(), description="Parts of tensor names. Each has its own value, and all other tensors share one."
    )


class ObjectiveTerm(_Settings):
    """One term of the objective: the mean of a measure over the documents of a task."""

    task: str | None = Field(
        default=None, description="Task, as under evaluate.tasks. Default: the perplexity documents."
    )
    measure: Measure = Field(
        default="log_likelihood",
        description="exact: 1 if the greedy answer is right. probability: probability of the right answer. "
        "log_likelihood: of the right answer, in nats per token. entropy: minus the entropy of the predictions, which "
        "needs no right answer. metric: the task's own metric, computed by lm-eval from generated answers.",
    )
    metric: str | None = Field(
        default=None, description="lm-eval's metric, for measure: metric ('exact_match,strict-match')."
    )
    weight: float = Field(default=1.0, gt=0, le=1000, description="Factor of this term in the sum.")
    clip: float | None = Field(
        default=None, gt=0, description="Log-likelihoods below minus this value are raised to it, in nats per token."
    )
    cluster_by: str | None = Field(default=None, description="Document field that identifies clusters.")


class Constraint(_Settings):
    """A task on which a candidate must not fall too far while the objective improves."""

    task: str = Field(description="Task of evaluate.tasks, or another file or name.")
    measure: Measure = Field(default="exact", description="As in the objective.")
    metric: str | None = Field(default=None, description="As in the objective.")
    guarded_by: str | None = Field(default=None, description="Name of a parent. Default: the hand-written recipe.")
    max_drop: float = Field(
        default=2.0, ge=0, description="Largest allowed drop in points (for log-likelihoods: hundredths of a nat)."
    )


class SetSizes(_Settings):
    """Number of documents of each task that are reserved for the search and for the confirmation.

    The gate uses all other documents. Identical documents and documents of one cluster are always in the same set.
    """

    search: int = Field(default=200, ge=10, description="Documents that score the trials, per task.")
    confirmation: int = Field(default=400, ge=20, description="Documents that confirm the winner, per task.")
    seed: int = Field(default=0, ge=0, description="Seed of the split into sets.")


class Budget(_Settings):
    """Limits of a search. The search ends at the first limit that it reaches."""

    trials: int = Field(default=60, ge=1, description="Number of recipes to try.")
    hours: float | None = Field(default=None, gt=0, description="Wall time in hours, over all runs of the search.")
    cost: float | None = Field(default=None, gt=0, description="Money to spend: worker hours times cost_per_hour.")
    cost_per_hour: float | None = Field(default=None, gt=0, description="Cost of one worker per hour.")

    @model_validator(mode="after")
    def _require_rate(self) -> Self:
        if self.cost is not None and self.cost_per_hour is None:
            raise ValueError("'cost' requires 'cost_per_hour'")
        return self


class Racing(_Settings):
    """Rule that drops hopeless candidates before they are evaluated on all documents."""

    rule: Literal["paired", "halving", "none"] = Field(
        default="paired",
        description="paired: drop a candidate that is shown to be worse than the best so far, at looks that double. "
        "halving: drop the worse two thirds of each generation, without a stated error. none: evaluate every candidate "
        "on all documents.",
    )
    error: float = Field(default=0.05, gt=0, lt=0.5, description="Chance to drop a candidate that is not worse.")
    first: float = Field(default=0.125, gt=0, le=1, description="Share of the documents at the first look.")


# Settings that a soup supports. All others are about free parameters, which a soup does not have.
_SOUP_SETTINGS = ("soup", "margin", "baselines", "objective", "documents", "confidence")


class SweepSettings(_Settings):
    """A search over the free parameters of a recipe, or over the models of a soup."""

    parameters: dict[str, FreeParameter] = Field(
        default={}, description="Free parameters of the recipe. At least one, unless the search is for a soup."
    )
    soup: SoupRule | None = Field(
        default=None,
        exclude_if=lambda rule: rule is None,
        description="Search a soup, the average of models of the recipe, instead of free parameters. greedy: add one "
        "model after another, best first, if the score does not fall, and keep those whose contribution is confirmed. "
        "uniform: average all models, and confirm that this is better than the best of them. Default: no soup.",
    )
    margin: float = Field(
        default=0.0,
        ge=0,
        exclude_if=lambda margin: margin == 0,
        description="Largest drop, in points (for log-likelihoods: hundredths of a nat), that an ingredient of a "
        "greedy soup may cause. The contribution of each ingredient must be shown to be above minus this value. "
        "Default: 0, so each ingredient must be shown to help.",
    )
    sum_to_one: tuple[tuple[str, ...], ...] = Field(
        default=(), description="Groups of parameters whose values sum to one."
    )
    baselines: tuple[str, ...] = Field(default=(), description="Files of further recipes that the winner must beat.")
    objective: tuple[ObjectiveTerm, ...] = Field(min_length=1)
    multi_objective: bool = Field(
        default=False, description="Search each term as an objective of its own, for a Pareto front."
    )
    change_penalty: float = Field(
        default=0.0, ge=0, description="Penalty, times the relative size of the change from the base."
    )
    constraints: tuple[Constraint, ...] = ()
    sampler: SamplerName = Field(default="cma", description="Algorithm that proposes the next recipe.")
    seed: int = Field(default=0, ge=0, lt=2**32, description="Seed of the algorithm.")
    population: int | None = Field(
        default=None, ge=2, description="Candidates per generation. Default: depends on the dimension."
    )
    sigma: float = Field(default=0.2, gt=0, le=1, description="First step of cma, as a share of each range.")
    random_trials: int | None = Field(default=None, ge=0, description="Trials of random search. Default: a quarter.")
    documents: SetSizes = SetSizes()
    confidence: float = Field(
        default=0.975, gt=0.5, lt=1, description="One-sided confidence of the confirmation: 0.975 is 0.95 two-sided."
    )
    budget: Budget = Budget()
    racing: Racing = Racing()
    optuna_storage: str | None = Field(
        default=None,
        description="File or database address to which the study is written for Optuna's dashboard. Default: none, "
        "unless the dashboard is started.",
    )

    @model_validator(mode="after")
    def _require_parameters_or_soup(self) -> Self:
        if self.soup is None and not self.parameters:
            raise ValueError("nothing to search: list free parameters under 'parameters', or write 'soup: greedy'")
        fields = type(self).model_fields
        search_only = [name for name in fields if name not in _SOUP_SETTINGS]
        changed = (name for name in search_only if getattr(self, name) != fields[name].default)
        if self.soup and (name := next(changed, None)):
            raise ValueError(
                f"'{name}' cannot be combined with 'soup', which has no free parameters: remove one of them"
            )
        if self.margin and self.soup != "greedy":
            raise ValueError("'margin' requires 'soup: greedy': write it, or remove 'margin'")
        return self

    @property
    def task_names(self) -> tuple[str, ...]:
        """Tasks of the objective and the constraints by their names in the profile, without duplicates."""
        names = [*(term.task for term in self.objective), *(constraint.task for constraint in self.constraints)]
        return tuple(dict.fromkeys(task for task in names if task is not None))

"""Profile settings of the gate: one guard per task, the rule that combines them, and the required confidence."""

from __future__ import annotations

import math
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from mergegate.tasks.evaluation import MeanOver, PromptSettings

MARGIN_ABOVE_MAX_DROP = 1.0  # Points.
CATASTROPHE = 11.0  # Largest drop of any task in a suite, in points, unless its guard sets a limit; see docs/gates.md.

# Population that a verdict generalizes to. New questions: a group has strata of fixed weights, and each question
# represents others of its subject. New subjects: the subjects of a group are a sample, and the loss of one subject is
# one observation.
Population = Literal["new questions", "new subjects"]

# Values of ``guarded_by`` other than the name of a parent; see ``tasks.gate.references``.
BEST_PARENT = "best parent"
CHAMPION = "champion"
ANCHOR = "anchor"
RELEASES = (CHAMPION, ANCHOR)

# Parents that 'best parent' and the perplexity check choose from if a profile names none.
FINE_TUNES, ALL_PARENTS = "fine-tunes", "all"


class Guard(PromptSettings):
    """Regression guard: on ``task`` the merge may be at most ``max_drop`` points worse than ``guarded_by``."""

    task: str = Field(description="An lm-eval task by name, or a YAML file relative to the profile.")
    name: str | None = Field(
        default=None,
        pattern=r"^[A-Za-z0-9][A-Za-z0-9_.:-]*$",
        max_length=100,
        description="What the task is called here, where a profile asks it in two ways; absent: as lm-eval calls it.",
    )
    guarded_by: str = Field(
        description="What it is compared with: a parent by name, 'best parent', 'champion' (what is published now), or "
        "'anchor' (the release that the profile names)."
    )
    max_drop: float = Field(default=2.0, ge=0, le=100, description="Points; more, and not noise, fails.")
    margin: float | None = Field(
        default=None, gt=0, le=100, description="Points that the upper bound may reach; default: max_drop + 1."
    )
    weight: float = Field(default=1.0, gt=0, le=1000, description="Of the task in the mean of a suite.")
    limit: float | None = Field(
        default=None,
        gt=0,
        le=100,
        description="rule: suite: points that this task alone must not have fallen; default: 11, or margin if more.",
    )
    score_range: tuple[float, float] = Field(
        default=(0.0, 1.0), description="Least and greatest score there can be: [0, 100] for ROUGE, [1, 10] for marks."
    )
    population: Population = Field(
        default="new questions",
        description="What the documents stand for: new questions on the same subjects, or new subjects as well.",
    )
    metric: str | dict[str, str] | None = Field(
        default=None,
        description="lm-eval's 'acc,none'; of a group also by task, or pattern of tasks, below it; absent: each task's "
        "own (see default_metric).",
    )
    cluster_by: str | None = Field(
        default=None,
        min_length=1,
        description="Documents that belong together: 'task' (the subjects of a group), or a field of the document.",
    )

    mean_over: MeanOver | None = Field(
        default=None,
        description="documents: of a group whose own score counts each task alike, the mean over its documents all the "
        "same.",
    )

    @field_validator("score_range")
    @classmethod
    def _check_score_range(cls, score_range: tuple[float, float]) -> tuple[float, float]:
        low, high = score_range
        if not (math.isfinite(low) and math.isfinite(high) and low < high):
            raise ValueError(f"[{low:g}, {high:g}] is no range: the least score first, then a greater one")
        return score_range

    @model_validator(mode="after")
    def _check_margins(self) -> Self:
        if self.margin is not None and self.margin < self.max_drop:
            raise ValueError(f"margin ({self.margin:g}) must be at least max_drop ({self.max_drop:g})")
        if self.limit is not None and self.limit < self.upper_limit:
            raise ValueError(f"limit ({self.limit:g}) must be at least the margin ({self.upper_limit:g})")
        return self

    def content_key(self) -> object:
        # Prompt settings are part of the key of the scores, and the rest of these fields does not affect a verdict.
        excluded = {*PromptSettings.model_fields, "name", "mean_over"}
        return {name: getattr(self, name) for name in type(self).model_fields if name not in excluded}

    @property
    def clustered_by(self) -> str | None:
        """Independent unit: 'task', a field of the document, or None if each document is independent.

        New subjects are new leaves of a group, unless a field declares the subject of a document.
        """
        return self.cluster_by or ("task" if self.population == "new subjects" else None)

    @property
    def upper_limit(self) -> float:
        """Non-inferiority margin in points: the drop that must be ruled out to pass."""
        return self.margin if self.margin is not None else self.max_drop + MARGIN_ABOVE_MAX_DROP

    @property
    def catastrophe(self) -> float:
        """Drop in points that must be ruled out for this task alone if the suite is judged as a whole."""
        return self.limit if self.limit is not None else max(CATASTROPHE, self.upper_limit)


class GateRule(BaseModel):
    """Required confidence of a verdict, and the consequence if the evidence does not reach it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    rule: Literal["suite", "each"] = Field(
        default="suite",
        description="suite: the mean drop over all tasks is within its margin, and no task has fallen beyond its "
        "limit. each: every task is within its own margin.",
    )
    reference: str | tuple[str, ...] = Field(
        default=FINE_TUNES,
        description="Which parents 'best parent' chooses from: fine-tunes (what was merged; the base only where it has "
        "a weight of its own), all, or names.",
    )
    anchor: str | None = Field(
        default=None,
        min_length=1,
        description="A release that every guard against the champion is also compared with, so that small losses do "
        "not add up over the nights: 'first', or a version by name.",
    )
    discordance: float = Field(
        default=0.10,
        gt=0,
        le=1,
        description="A guess, for what `check` says of the night before it: the share of documents on which merge and "
        "reference will disagree; .05 to .20 between a merge and its parent.",
    )
    confidence: float = Field(default=0.95, gt=0.5, lt=1, description="One-sided, each way, over all looks together.")
    extend: bool = Field(
        default=True, description="Evaluate more documents where a guard is undecided and the task has some left."
    )
    on_inconclusive: Literal["block", "warn", "pass"] = Field(
        default="block", description="What to do when the documents do not suffice to decide."
    )

    def for_attempt(self, number: int, of: int) -> GateRule:
        """Return the rule for one of several attempts, which run in turn until one passes.

        Any attempt could pass by chance, so they share the error that the run may make. The first attempt, which is
        usually the only one, gets half of it, and the others share the other half equally. By Bonferroni's inequality a
        run publishes a merge at its margin no more often than a single attempt would.

        Args:
            number: Number of the attempt, from 1.
            of: Number of attempts that the run may make.
        """
        share = 1.0 if of == 1 else 0.5 if number == 1 else 0.5 / (of - 1)
        return self.model_copy(update={"confidence": 1 - (1 - self.confidence) * share})

"""What a profile says about judging: one guard a task, what they come to together, and how sure a verdict must be."""

from __future__ import annotations

import math
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from mergegate.tasks.evaluation import MeanOver, PromptSettings

MARGIN_ABOVE_MAX_DROP = 1.0  # points
CATASTROPHE = 11.0  # points that no task of a suite may fall, unless its guard says otherwise; see docs/gates.md

# Whom a verdict speaks for. The same subjects: a group is strata of fixed weights, and each question stands for others
# of its subject. New subjects: the subjects of a group are a sample, and what one of them loses is one observation.
Population = Literal["new questions", "new subjects"]

# What ``guarded_by`` may say besides the name of a parent; see ``tasks.gate.references``.
BEST_PARENT = "best parent"
CHAMPION = "champion"
ANCHOR = "anchor"
RELEASES = (CHAMPION, ANCHOR)

# Which parents 'best parent' and perplexity choose from, where a profile names none.
FINE_TUNES, ALL_PARENTS = "fine-tunes", "all"


class Guard(PromptSettings):
    """One regression guard: on ``task`` the merge must not be worse than ``guarded_by`` by more than ``max_drop``."""

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
    def _is_a_range(cls, score_range: tuple[float, float]) -> tuple[float, float]:
        low, high = score_range
        if not (math.isfinite(low) and math.isfinite(high) and low < high):
            raise ValueError(f"[{low:g}, {high:g}] is no range: the least score first, then a greater one")
        return score_range

    @model_validator(mode="after")
    def _margin_is_wider(self) -> Self:
        if self.margin is not None and self.margin < self.max_drop:
            raise ValueError(f"margin ({self.margin:g}) must be at least max_drop ({self.max_drop:g})")
        if self.limit is not None and self.limit < self.upper_limit:
            raise ValueError(f"limit ({self.limit:g}) must be at least the margin ({self.upper_limit:g})")
        return self

    def content_key(self) -> object:
        # How a task is asked is in the key of its scores, and what was seen to before has no part in a verdict.
        apart = {*PromptSettings.model_fields, "name", "mean_over"}
        return {name: getattr(self, name) for name in type(self).model_fields if name not in apart}

    @property
    def clustered_by(self) -> str | None:
        """What the independent units are: 'task', a field of the document; None where each document is one.

        New subjects are new leaves of a group, unless a field says what the subject of a document is.
        """
        return self.cluster_by or ("task" if self.population == "new subjects" else None)

    @property
    def upper_limit(self) -> float:
        """Non-inferiority margin in points: the drop that must be ruled out to pass."""
        return self.margin if self.margin is not None else self.max_drop + MARGIN_ABOVE_MAX_DROP

    @property
    def catastrophe(self) -> float:
        """The drop in points that must be ruled out for this task alone where a suite is judged as a whole."""
        return self.limit if self.limit is not None else max(CATASTROPHE, self.upper_limit)


class GateRule(BaseModel):
    """How sure a verdict must be, and what follows where it cannot be."""

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
        """The rule of one of several attempts that are made in turn until one passes.

        Each could pass by chance, so they share the error that the run may make: half of it is the first one's, who is
        mostly the only one; the others have equal parts of the other half. By Bonferroni's inequality a run publishes
        a merge at its margin no more often than one attempt would.

        Args:
            number: From 1.
            of: Attempts that the run may make.
        """
        share = 1.0 if of == 1 else 0.5 if number == 1 else 0.5 / (of - 1)
        return self.model_copy(update={"confidence": 1 - (1 - self.confidence) * share})

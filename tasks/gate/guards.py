"""What a profile says about judging: one guard a task, and how sure a verdict must be."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

MARGIN_ABOVE_MAX_DROP = 1.0  # points

# What ``guarded_by`` may say besides the name of a parent; see ``tasks.gate.references``.
BEST_PARENT = "best parent"
CHAMPION = "champion"


class Guard(BaseModel):
    """One regression guard: on ``task`` the merge must not be worse than ``guarded_by`` by more than ``max_drop``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    task: str = Field(description="An lm-eval task by name, or a YAML file relative to the profile.")
    guarded_by: str = Field(
        description="What it is compared with: a parent by name, 'best parent', or 'champion' (what is published now)."
    )
    max_drop: float = Field(default=2.0, ge=0, le=100, description="Points; more, and not noise, fails.")
    margin: float | None = Field(
        default=None, gt=0, le=100, description="Points that the upper bound may reach; default: max_drop + 1."
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

    @model_validator(mode="after")
    def _margin_is_wider(self) -> Self:
        if self.margin is not None and self.margin < self.max_drop:
            raise ValueError(f"margin ({self.margin:g}) must be at least max_drop ({self.max_drop:g})")
        return self

    @property
    def upper_limit(self) -> float:
        """Non-inferiority margin in points: the drop that must be ruled out to pass."""
        return self.margin if self.margin is not None else self.max_drop + MARGIN_ABOVE_MAX_DROP


class GateRule(BaseModel):
    """How sure a verdict must be, and what follows where it cannot be."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    confidence: float = Field(default=0.95, gt=0.5, lt=1, description="One-sided, each way, over all looks together.")
    extend: bool = Field(
        default=True, description="Evaluate more documents where a guard is undecided and the task has some left."
    )
    on_inconclusive: Literal["block", "warn", "pass"] = Field(
        default="block", description="What to do when the documents do not suffice to decide."
    )

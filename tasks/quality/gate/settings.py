"""Define the ``evaluate`` section of a profile: one guard per task, the rule that combines them, and the confidence."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    WithJsonSchema,
    field_validator,
    model_validator,
)
from pydantic.json_schema import SkipJsonSchema

from mergegate.merge_core.errors import suggest
from mergegate.tasks.quality.evaluation import (
    AnyBuiltInTask,
    EvaluationSettings,
    MeanOver,
    PromptSettings,
    built_in_schemas,
    check_thinking,
    resolve_prompt_settings,
)

MARGIN_ABOVE_MAX_DROP = 1.0  # Points.
# Largest drop of any task in a suite, in points, unless its guard sets a limit.
CATASTROPHE = 11.0

# Drop of a group's task with 100 documents, in points, that must be ruled out before the group passes early.
COLLAPSE = 40.0

# Population that a verdict covers. New questions: subjects are strata with fixed weights, and each question represents
# others of its subject. New subjects: subjects are a sample, and the loss on one subject is a single observation.
Population = Literal["new questions", "new subjects"]

# Values of ``guarded_by`` other than the name of a parent; see ``gate.references``.
BEST_PARENT = "best parent"
CHAMPION = "champion"
ANCHOR = "anchor"
LAST_CHECKPOINT = "last checkpoint"  # of a training run, replaced with its name before the gate
RELEASES = (CHAMPION, ANCHOR)

# Settings of ``reference`` other than names of parents.
FINE_TUNES, ALL_PARENTS = "fine-tunes", "all"


class Guard(PromptSettings):
    """Regression guard: on ``task`` the merge may be at most ``max_drop`` points worse than ``guarded_by``."""

    task: Annotated[str, WithJsonSchema({"anyOf": [{"type": "string"}, *built_in_schemas()]})] = Field(
        description="Name of an lm-eval task, a YAML file relative to the profile, or a built-in task, such as {kind: "
        "retrieval, data: queries.jsonl, metric: ndcg@10}."
    )
    # Settings of a built-in task, of which ``task`` is the name. Set from a mapping under ``task``.
    built_in: SkipJsonSchema[AnyBuiltInTask | None] = Field(default=None, exclude_if=lambda task: task is None)
    name: str | None = Field(
        default=None,
        pattern=r"^[A-Za-z0-9][A-Za-z0-9_.:-]*$",
        max_length=100,
        description="Name of the task in this profile, if it is evaluated with two prompts. Default: lm-eval's name.",
    )
    guarded_by: str = Field(
        description="Model that the merge is compared with: the name of a parent, 'best parent', 'champion' (the "
        "current release), 'anchor' (the release that the profile names), or 'last checkpoint' (of the training run in "
        "the recipe)."
    )
    max_drop: float = Field(
        default=2.0, ge=0, le=100, description="Largest allowed drop in points. A larger drop fails if it is not noise."
    )
    margin: float | None = Field(
        default=None,
        gt=0,
        le=100,
        description="Largest upper bound that still passes, in points. Default: max_drop + 1.",
    )
    weight: float = Field(default=1.0, gt=0, le=1000, description="Weight of the task in the mean of a suite.")
    limit: float | None = Field(
        default=None,
        gt=0,
        le=100,
        description="With rule: suite, largest drop of this task alone, in points. Default: 11, or a larger margin.",
    )
    leaf_limit: float | None = Field(
        default=COLLAPSE,
        gt=0,
        le=100,
        description="For a group: drop of a task with 100 documents, in points, that must be ruled out before the "
        "group passes early; less for larger tasks. Until then, mergegate evaluates more documents. null: no limit.",
    )
    max_error_ratio: float | None = Field(
        default=2.0,
        ge=1,
        description="Largest allowed ratio of the merge's error rate to the reference's, if the reference answers "
        "fewer than 10 % of the documents wrong and max_drop is below 10. A larger ratio fails if it is not noise. "
        "null: no limit.",
    )
    advisory: bool = Field(
        default=False,
        description="Report the verdict without counting it: the guard never blocks, and its task is evaluated up to "
        "the first look only.",
    )
    score_range: tuple[float, float] = Field(
        default=(0.0, 1.0), description="Lowest and highest possible score: [0, 100] for ROUGE, [1, 10] for marks."
    )
    documents: Annotated[int, Field(ge=1)] | Literal["all"] | None = Field(
        default=None,
        description="Size of the first random sample of this task, or all for a single look at every document. "
        "Default: evaluate.documents.",
    )
    population: Population = Field(
        default="new questions",
        description="Population of the verdict: new questions on the same subjects, or also new subjects.",
    )
    metric: str | dict[str, str] | None = Field(
        default=None,
        description="lm-eval's label, such as 'acc,none'. For a group also a mapping from its tasks, or patterns of "
        "tasks, to labels. Default: the metric of each task.",
    )
    cluster_by: str | None = Field(
        default=None,
        min_length=1,
        description="Source of the clusters of documents: 'task' (subjects of a group), or a field of the document.",
    )

    mean_over: MeanOver | None = Field(
        default=None,
        description="documents: score a group by the mean over its documents, even if its own score gives each task "
        "the same weight.",
    )

    @model_validator(mode="before")
    @classmethod
    def _name_built_in(cls, settings: Any) -> Any:
        """Move the settings of a built-in task to ``built_in``, and name the task after its data."""
        if not isinstance(settings, Mapping) or not isinstance(settings.get("task"), Mapping):
            return settings
        try:
            task = TypeAdapter(AnyBuiltInTask).validate_python(settings["task"])
        except ValidationError:  # pydantic finds the faults again in the field, and reports them with all others
            return {**settings, "task": "built-in", "built_in": settings["task"]}
        rest = {key: value for key, value in settings.items() if key != "name"}
        return {"metric": f"{task.judged_by},none", **rest, "task": settings.get("name", task.name), "built_in": task}

    @model_validator(mode="after")
    def _check_built_in(self) -> Self:
        if self.built_in is None:
            return self
        if names := [name for name in (*PromptSettings.model_fields, "mean_over") if getattr(self, name) is not None]:
            raise ValueError(f"{names[0]} has no effect on a built-in task: remove it")
        if self.metric != f"{self.built_in.judged_by},none":
            raise ValueError("set the metric of a built-in task under 'task'")
        return self

    @field_validator("score_range")
    @classmethod
    def _check_score_range(cls, score_range: tuple[float, float]) -> tuple[float, float]:
        low, high = score_range
        if not (math.isfinite(low) and math.isfinite(high) and low < high):
            raise ValueError(f"[{low:g}, {high:g}] is not a range: the lowest score must come first")
        return score_range

    @model_validator(mode="after")
    def _check_margins(self) -> Self:
        if self.margin is not None and self.margin < self.max_drop:
            raise ValueError(f"margin ({self.margin:g}) must be at least max_drop ({self.max_drop:g})")
        if self.limit is not None and self.limit < self.upper_limit:
            raise ValueError(f"limit ({self.limit:g}) must be at least the margin ({self.upper_limit:g})")
        return self

    def content_key(self) -> object:
        # Prompt settings and documents are part of the keys of the scores. The names do not affect a verdict.
        excluded = {*PromptSettings.model_fields, "name", "mean_over", "documents", "built_in"}
        return {name: getattr(self, name) for name in type(self).model_fields if name not in excluded}

    @property
    def clustered_by(self) -> str | None:
        """Clusters of documents: 'task', a field of the document, or None if each document is independent.

        Without ``cluster_by``, the subjects of ``population: new subjects`` are the tasks of a group.
        """
        return self.cluster_by or ("task" if self.population == "new subjects" else None)

    @property
    def upper_limit(self) -> float:
        """Non-inferiority margin in points: the drop that must be ruled out to pass."""
        return self.margin if self.margin is not None else self.max_drop + MARGIN_ABOVE_MAX_DROP

    @property
    def catastrophe(self) -> float:
        """Drop in points that must be ruled out for this task with ``rule: suite``."""
        return self.limit if self.limit is not None else max(CATASTROPHE, self.upper_limit)


class GateRule(BaseModel):
    """Required confidence of a verdict, and the consequence if the evidence does not reach it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    rule: Literal["suite", "each"] = Field(
        default="suite",
        description="suite: the mean drop over all tasks must be within its margin, and no task may drop by more than "
        "its limit. each: every task must be within its own margin.",
    )
    reference: str | tuple[str, ...] = Field(
        default=FINE_TUNES,
        description="Parents that 'best parent' chooses from: fine-tunes (merged models; the base only if it has a "
        "weight of its own; of a training run, only the last checkpoint), all, or names.",
    )
    anchor: str | None = Field(
        default=None,
        min_length=1,
        description="Release that every guard against the champion is also compared with, so that small losses do not "
        "add up over many releases: 'first', or a version.",
    )
    discordance: float = Field(
        default=0.10,
        gt=0,
        le=1,
        description="Assumed share of documents on which merge and reference disagree, for the forecast of `check`. "
        "Typical for a merge and its parent: .05 to .20.",
    )
    confidence: float = Field(default=0.95, gt=0.5, lt=1, description="One-sided confidence over all looks together.")
    extend: bool = Field(default=True, description="Evaluate more documents of a task while its guard is inconclusive.")
    max_answer_tokens: int | None = Field(
        default=None,
        ge=1,
        description="Largest token budget of a generated answer. If the verdict depends on answers that were cut off, "
        "they are generated again with twice the budget, up to this limit. Default: 8 times the budget of the task.",
    )
    max_length_ratio: float = Field(
        default=2.0,
        ge=1,
        description="Largest ratio of the mean length of the merge's complete answers to that of the reference's. A "
        "ratio shown to be larger fails. Default: 2.",
    )
    on_inconclusive: Literal["block", "warn", "pass"] = Field(
        default="block", description="Consequence if the documents do not suffice to decide."
    )

    def for_attempt(self, number: int, attempts: int) -> GateRule:
        """Return the rule for one of several attempts of a run, which try one recipe after another until one passes.

        Each attempt could pass by chance, so the attempts share the allowed error of the run: the first one, usually
        the only one, gets half of it, and the others share the other half equally. By Bonferroni's inequality, a run
        publishes a merge at its margin no more often than a single attempt with the full error would.

        Args:
            number: Number of the attempt, from 1.
            attempts: Number of attempts that the run may make.
        """
        share = 1.0 if attempts == 1 else 0.5 if number == 1 else 0.5 / (attempts - 1)
        return self.model_copy(update={"confidence": 1 - (1 - self.confidence) * share})


class EvaluateSettings(EvaluationSettings, GateRule):
    """Tasks, prompts, scoring and gate rule of a profile, under ``evaluate``."""

    tasks: tuple[Guard, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _check_allow_code(self) -> Self:
        tasks = [guard.task for guard in self.tasks if guard.built_in is None]
        if name := next((guard.task for guard in self.tasks if guard.built_in and guard.task in self.allow_code), None):
            raise ValueError(f"{name!r} is allowed to run code, but a built-in task runs none: remove it")
        if name := next((name for name in self.allow_code if name not in tasks), None):
            advice = f"; {near}" if (near := suggest(name, tasks)) else ""
            raise ValueError(f"{name!r} is allowed to run code but not evaluated{advice}")
        return self

    @model_validator(mode="after")
    def _check_independence(self) -> Self:
        """Require that no two tasks in the mean of a suite have the same documents: their drops are not independent."""
        names: dict[str, str] = {}  # by the settings of a built-in task without its metric
        for guard in self.tasks if self.rule == "suite" else ():
            if guard.built_in is None or guard.advisory:
                continue
            first = names.setdefault(guard.built_in.model_dump_json(exclude={"metric"}), guard.task)
            if first != guard.task:
                raise ValueError(
                    f"{first} and {guard.task} have the same documents, but the mean over all tasks treats them as "
                    f"independent: set advisory: true for {guard.task}, or rule: each"
                )
        return self

    @model_validator(mode="after")
    def _check_anchor(self) -> Self:
        guards = {guard.guarded_by for guard in self.tasks}
        if self.anchor is not None and not {CHAMPION, ANCHOR} & guards:
            raise ValueError("'anchor' requires a guard with guarded_by: champion")
        if self.anchor is None and ANCHOR in guards:
            raise ValueError("guarded_by: anchor requires 'anchor: first' or a version")
        return self

    @model_validator(mode="after")
    def _check_multiturn(self) -> Self:
        for guard in self.tasks:
            if (
                guard.fewshot_as_multiturn is not None
                and not resolve_prompt_settings(guard.own_prompt_settings, self).is_chat
            ):
                raise ValueError(f"{guard.task}: fewshot_as_multiturn requires a chat template")
        return self

    @model_validator(mode="after")
    def _check_thinking(self) -> Self:
        for guard in self.tasks:
            check_thinking(guard.name or guard.task, guard.own_prompt_settings, self)
        chats = [resolve_prompt_settings(guard.own_prompt_settings, self).is_chat for guard in self.tasks]
        for name in ("enable_thinking", "chat_template_args"):
            if getattr(self, name) is not None and not any(chats):
                raise ValueError(f"{name} requires a chat template: set chat_template: true")
        return self

    @property
    def prompts_by_task(self) -> dict[str, str]:
        """Description of the prompt settings and the sample of each guard that has its own, by task."""
        described = {}
        for guard in self.tasks:
            parts = [guard.own_prompt_settings.describe()] if guard.own_prompt_settings else []
            parts += [f"documents {guard.documents}"] if guard.documents else []
            if parts:
                described[guard.name or guard.task] = ", ".join(parts)
        return described

    @property
    def gate_rule(self) -> GateRule:
        """Rule of the gate: the settings that :class:`GateRule` defines."""
        return GateRule.model_validate({name: getattr(self, name) for name in GateRule.model_fields})

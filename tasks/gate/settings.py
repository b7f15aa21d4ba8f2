"""Define the ``evaluate`` section of a profile, and pin the tasks that it names."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Self

from pydantic import Field, model_validator

from mergegate.merge_core.errors import InvalidInput
from mergegate.merge_core.files import HashMemo
from mergegate.tasks.evaluation import (
    EvalTask,
    EvaluationSettings,
    pin_sound_tasks,
    require_evaluated,
    resolve_prompt_settings,
)
from mergegate.tasks.gate.guards import ANCHOR, CHAMPION, GateRule, Guard


class EvaluateSettings(EvaluationSettings, GateRule):
    """Tasks, prompts, scoring and gate rule of a profile, under ``evaluate``."""

    tasks: tuple[Guard, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _check_allow_code(self) -> Self:
        require_evaluated(self.allow_code, [guard.task for guard in self.tasks])
        return self

    @model_validator(mode="after")
    def _check_anchor(self) -> Self:
        guards = {guard.guarded_by for guard in self.tasks}
        if self.anchor is not None and not {CHAMPION, ANCHOR} & guards:
            raise ValueError("anchor is for guards against the champion, and there is none")
        if self.anchor is None and ANCHOR in guards:
            raise ValueError("guarded_by: anchor needs 'anchor: first', or a version")
        return self

    @model_validator(mode="after")
    def _check_multiturn(self) -> Self:
        for guard in self.tasks:
            if (
                guard.fewshot_as_multiturn is not None
                and not resolve_prompt_settings(guard.own_prompt_settings, self).is_chat
            ):
                raise ValueError(f"{guard.task}: fewshot_as_multiturn is for a chat template, and there is none")
        return self

    @property
    def prompts_by_task(self) -> dict[str, str]:
        """One-line description of each task's own prompt settings, by task; tasks without any are left out."""
        return {
            guard.name or guard.task: guard.own_prompt_settings.describe()
            for guard in self.tasks
            if guard.own_prompt_settings
        }

    @property
    def gate_rule(self) -> GateRule:
        """Settings that determine the verdict."""
        return GateRule.model_validate({name: getattr(self, name) for name in GateRule.model_fields})


def pin_tasks(
    guards: Sequence[Guard],
    root: Path,
    hashes: HashMemo,
    data: Path | None = None,
    code_of: Collection[str] = (),
) -> tuple[tuple[Guard, ...], tuple[EvalTask, ...]]:
    """Pin the tasks of all guards, and return the guards under the names of those tasks with each task once.

    Args:
        data: Directory with datasets, relative to ``root``. None means the Hub.
        code_of: Tasks whose generated code may be run.

    Raises:
        InvalidInput: As ``pin_sound_tasks``; if two definitions share a name; or if two guards of a task prompt
            differently under one name, or disagree on which of its documents form a cluster.
    """
    pinned = pin_sound_tasks((guard.task for guard in guards), root, hashes, data, code_of)
    guard_tasks = [_apply_guard(pinned[guard.task], guard) for guard in guards]
    tasks: dict[str, EvalTask] = {}
    for guard, task in zip(guards, guard_tasks, strict=True):
        first = tasks.setdefault(task.name, task)
        if first.digest != task.digest:
            raise InvalidInput(
                f"evaluate.tasks: {guard.task}",
                found=f"calls itself {task.name!r}, as does another task of this profile",
                expected="a name of its own under 'task'",
            )
        if first.prompt_settings != task.prompt_settings:
            ways = (
                each.prompt_settings.describe() if each.prompt_settings else "as the profile says of all"
                for each in (first, task)
            )
            raise InvalidInput(
                f"evaluate.tasks: {guard.task}",
                found=f"asked in two ways as {task.name!r}: {' and '.join(ways)}",
                expected="one way of asking under each name",
                remedy=f"name: {task.name}-2 in one of them",
            )
    for guard, guard_task in zip(guards, guard_tasks, strict=True):
        if guard.cluster_by in (None, "task"):  # The task of a document is always available.
            continue
        task = tasks[guard_task.name]
        if task.cluster_field not in (None, guard.cluster_by):
            raise InvalidInput(
                f"evaluate.tasks: {guard.task}: cluster_by",
                found=f"{guard.cluster_by!r}, and {task.cluster_field!r} in another guard of the task",
                expected="one field for all guards of a task",
            )
        tasks[task.name] = task.model_copy(update={"cluster_field": guard.cluster_by})
    renamed = tuple(
        guard.model_copy(update={"task": task.name, "name": None})
        for guard, task in zip(guards, guard_tasks, strict=True)
    )
    return renamed, tuple(tasks.values())


def _apply_guard(task: EvalTask, guard: Guard) -> EvalTask:
    """Return ``task`` under the guard's name and with the guard's prompt settings."""
    if guard.name not in (None, task.name):
        task = task.model_copy(update={"name": guard.name, "original_name": task.name})
    return task.model_copy(update={"prompt_settings": guard.own_prompt_settings}) if guard.own_prompt_settings else task

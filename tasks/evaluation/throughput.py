"""Estimate the time that a document of a task takes: measured on scored models, or guessed from the task's definition.

The estimates determine the order in which tasks run, so that tasks that decide soonest run first, and the forecast of a
scheduled run. They affect no score and no verdict. For the order they are rounded to powers of two, so that other load
on the machine does not change it from run to run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from mergegate.tasks.evaluation.lm_eval_index import shipped_leaves
from mergegate.tasks.evaluation.stage import Scores
from mergegate.tasks.evaluation.task_definition import EvalTask, read_definition
from mergegate.tasks.store import Artifact

_CHOICES = 4.0  # default number of choices of a document
_MOST_WRITTEN = 256  # lm-eval's default limit on generated tokens
GENERATED = 30.0  # cost of a generated answer relative to a choice, from GSM8K and MMLU on one CPU


class DocumentCost(NamedTuple):
    """Average cost of one document of a task for a model.

    Args:
        readings: Number of times that its prompt is read, each time with a different answer.
        written: Number of tokens that the model generates.
    """

    readings: float
    written: float


def estimate_document_cost(task: EvalTask) -> DocumentCost:
    """Estimate the cost of a document of a task from its definition.

    The definition of a shipped task is in lm-eval. Defaults replace the number of choices or the length of an answer if
    the definition does not state it.
    """
    configs: Sequence[Mapping[str, Any]]
    if task.definition is None:
        configs = [leaf.config for leaf in shipped_leaves(task.name)]
    else:
        configs = [leaf.config for leaf in read_definition(task.definition).leaves]
    each = [_config_cost(config) for config in configs] or [DocumentCost(_CHOICES, 0)]
    return DocumentCost(*(sum(part) / len(each) for part in zip(*each, strict=True)))


def document_seconds(
    tasks: Sequence[EvalTask], scores_by_task: Mapping[str, Sequence[Artifact[Scores]]]
) -> dict[str, float]:
    """Return the cost of a document of each task, by task.

    The unit is seconds if all tasks were measured, else documents of a choice task. Measurements and guesses are never
    mixed, so that a run that is killed before everything is measured resumes in the same order. The smallest of several
    measurements counts, because the first one includes the time to load a model.

    Args:
        tasks: Tasks to estimate.
        scores_by_task: Scores of any models, by task.
    """
    measured = {task.name: measured_seconds(scores_by_task.get(task.name, ())) for task in tasks}
    if all(measured.values()):
        return {name: 2.0 ** round(math.log2(seconds)) for name, seconds in measured.items() if seconds}
    return {task.name: _guessed(task) for task in tasks}


def measured_seconds(measurements: Sequence[Artifact[Scores]]) -> float | None:
    """Return the seconds per document, the smallest of several measurements; None if there are none."""
    seconds = [
        scores.value.seconds / len(scores.value.part)
        for scores in measurements
        if scores.value.seconds and scores.value.part
    ]
    return min(seconds, default=None)


def _config_cost(config: Mapping[str, Any]) -> DocumentCost:
    kind = config.get("output_type", "generate_until")
    if kind == "multiple_choice":
        choices = config.get("doc_to_choice")
        return DocumentCost(len(choices) if isinstance(choices, list) else _CHOICES, 0)
    if kind == "generate_until":
        generation_kwargs = config.get("generation_kwargs")
        limit = (
            generation_kwargs.get("max_gen_toks", _MOST_WRITTEN)
            if isinstance(generation_kwargs, Mapping)
            else _MOST_WRITTEN
        )
        return DocumentCost(1, (limit if isinstance(limit, int) else _MOST_WRITTEN) / 2)  # most answers are shorter
    return DocumentCost(1, 0)


def _guessed(task: EvalTask) -> float:
    """Guess the relative cost of a document from its kind: a choice or a generated answer.

    A shipped task counts as a choice task, as most of them are.
    """
    if task.definition is None:
        return 1.0
    leaves = read_definition(task.definition).leaves
    generates = [str(leaf.config.get("output_type", "generate_until")) == "generate_until" for leaf in leaves]
    return sum(GENERATED if flag else 1.0 for flag in generates) / len(generates)

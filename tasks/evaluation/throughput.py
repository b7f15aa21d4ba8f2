"""Estimate the time per document of a task, measured on scored models or guessed from the task's definition.

The estimates determine the order in which tasks run, so that tasks that decide soonest run first, and the forecast of
a scheduled run. They affect no score and no verdict. For the order, they are rounded to powers of two, so that other
load on the machine does not change it from run to run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from mergegate.tasks.evaluation.lm_eval_index import shipped_leaves
from mergegate.tasks.evaluation.stage import Scores
from mergegate.tasks.evaluation.task_definition import EvalTask, read_definition
from mergegate.tasks.evaluation.task_setup import BUDGET_NAMES
from mergegate.tasks.store import Artifact

_CHOICES = 4.0  # default number of choices of a document
_MAX_ANSWER_TOKENS = 256  # lm-eval's default limit on generated tokens
GENERATED = 30.0  # cost of a generated answer relative to a choice, from GSM8K and MMLU on one CPU


class DocumentCost(NamedTuple):
    """Average cost of one document of a task for a model."""

    readings: float  # number of times that the model reads the prompt, each time with a different answer
    written: float  # number of tokens that the model generates


def estimate_document_cost(task: EvalTask) -> DocumentCost:
    """Estimate the cost of a document from its task's definition and prompt settings, with defaults for the rest."""
    leaves = read_definition(task.definition).leaves if task.definition else shipped_leaves(task.in_lm_eval)
    own_settings = (task.prompt_settings.gen_kwargs if task.prompt_settings else None) or {}
    costs = []
    for config in (leaf.config for leaf in leaves):
        kind = config.get("output_type", "generate_until")
        choices, settings = config.get("doc_to_choice"), config.get("generation_kwargs")
        if kind == "multiple_choice":
            costs.append(DocumentCost(len(choices) if isinstance(choices, list) else _CHOICES, 0))
        elif kind == "generate_until":
            # The settings of the guard take precedence over those of the task.
            sources = (own_settings, settings if isinstance(settings, Mapping) else {})
            values = [source.get(name) for source in sources for name in BUDGET_NAMES]
            limits = [value for value in values if isinstance(value, int)]
            limit = limits[0] if limits else _MAX_ANSWER_TOKENS
            costs.append(DocumentCost(1, limit / 2))  # most answers are shorter
        else:
            costs.append(DocumentCost(1, 0))
    costs = costs or [DocumentCost(_CHOICES, 0)]
    return DocumentCost(*(sum(part) / len(costs) for part in zip(*costs, strict=True)))


def document_seconds(
    tasks: Sequence[EvalTask], scores_by_task: Mapping[str, Sequence[Artifact[Scores]]]
) -> dict[str, float]:
    """Return the cost of one document of each task.

    The unit is seconds if all tasks were measured, else documents of a choice task. Measurements and guesses are never
    mixed, so that a run that is interrupted before everything is measured resumes in the same order. A guess depends
    only on whether a task generates answers; a task that lm-eval ships counts as a choice task, as most of them are.
    """
    measured = {task.name: measured_seconds(scores_by_task.get(task.name, ())) for task in tasks}
    if all(measured.values()):
        return {name: 2.0 ** round(math.log2(seconds)) for name, seconds in measured.items() if seconds}
    costs = {}
    for task in tasks:
        leaves = read_definition(task.definition).leaves if task.definition else ()
        generates = [str(leaf.config.get("output_type", "generate_until")) == "generate_until" for leaf in leaves]
        costs[task.name] = sum(GENERATED if flag else 1.0 for flag in generates) / len(generates) if generates else 1.0
    return costs


def measured_seconds(measurements: Sequence[Artifact[Scores]]) -> float | None:
    """Return the seconds per document, or None without measurements.

    This is the smallest measurement, because the first one includes the time to load a model.
    """
    values = [scores.value for scores in measurements]
    return min((value.seconds / len(value.part) for value in values if value.seconds and value.part), default=None)

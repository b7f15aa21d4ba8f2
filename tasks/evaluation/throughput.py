"""How long a document of a task takes: as models took that were scored before, else guessed from how it is asked.

The order in which tasks are run hangs on it, so that what decides soonest comes first, and what is said of a night
before it; no score, and no verdict. For the order it is rounded to powers of two: what a machine does beside must not
change it from night to night.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from mergegate.tasks.evaluation.lm_eval_index import shipped_leaves
from mergegate.tasks.evaluation.stage import Scores
from mergegate.tasks.evaluation.task_definition import EvalTask, read_definition
from mergegate.tasks.store import Artifact

_CHOICES = 4.0  # answers of a document that does not say how many it has
_MOST_WRITTEN = 256  # tokens that lm-eval lets a model write where a task says nothing
GENERATED = 30.0  # times as long as a choice takes an answer that is written: GSM8K against MMLU on one CPU


class DocumentCost(NamedTuple):
    """What a model is asked of one document of a task, on average.

    Args:
        readings: How often its prompt is read, each time with another answer.
        written: Tokens that the model writes.
    """

    readings: float
    written: float


def estimate_document_cost(task: EvalTask) -> DocumentCost:
    """What a document of the task costs, as far as its definition says. Of a task by name the definition is in lm-eval;
    of what is not said there, how many answers a document has or how long one becomes, it is a guess."""
    configs: Sequence[Mapping[str, Any]]
    if task.definition is None:
        configs = [leaf.config for leaf in shipped_leaves(task.name)]
    else:
        configs = [leaf.config for leaf in read_definition(task.definition).leaves]
    each = [_asked_of(config) for config in configs] or [DocumentCost(_CHOICES, 0)]
    return DocumentCost(*(sum(part) / len(each) for part in zip(*each, strict=True)))


def document_seconds(tasks: Sequence[EvalTask], known: Mapping[str, Sequence[Artifact[Scores]]]) -> dict[str, float]:
    """What a document of each task takes, by task: in seconds where all of them were measured, else in documents of a
    choice task.

    Of several measurements the least counts: whichever came first had a model to load. Measured and guessed are never
    compared with each other, so that a run that was killed on its first night goes on in the order in which it began.

    Args:
        known: By task, scores of any models.
    """
    measured = {task.name: measured_seconds(known.get(task.name, ())) for task in tasks}
    if all(measured.values()):
        return {name: 2.0 ** round(math.log2(seconds)) for name, seconds in measured.items() if seconds}
    return {task.name: _guessed(task) for task in tasks}


def measured_seconds(known: Sequence[Artifact[Scores]]) -> float | None:
    """What a document took of those that were scored, the least of several; None where nobody measured it."""
    took = [one.value.seconds / len(one.value.part) for one in known if one.value.seconds and one.value.part]
    return min(took, default=None)


def _asked_of(config: Mapping[str, Any]) -> DocumentCost:
    kind = config.get("output_type", "generate_until")
    if kind == "multiple_choice":
        choices = config.get("doc_to_choice")
        return DocumentCost(len(choices) if isinstance(choices, list) else _CHOICES, 0)
    if kind == "generate_until":
        said = config.get("generation_kwargs")
        most = said.get("max_gen_toks", _MOST_WRITTEN) if isinstance(said, Mapping) else _MOST_WRITTEN
        return DocumentCost(1, (most if isinstance(most, int) else _MOST_WRITTEN) / 2)  # few answers are as long
    return DocumentCost(1, 0)


def _guessed(task: EvalTask) -> float:
    """By what is asked of a document: a choice, or an answer to be written. A task by name says nothing before it is
    loaded, and most of them are choices."""
    if task.definition is None:
        return 1.0
    leaves = read_definition(task.definition).leaves
    written = [str(leaf.config.get("output_type", "generate_until")) == "generate_until" for leaf in leaves]
    return sum(GENERATED if one else 1.0 for one in written) / len(written)

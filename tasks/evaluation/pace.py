"""How long a document of a task takes: as models took that were scored before, else guessed from how it is asked.

Only the order in which tasks are run hangs on it, so that what decides soonest comes first; no score, and no verdict.
Therefore it is rounded to powers of two: what a machine does beside must not change the order from night to night.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from merge_core.store import Artifact
from tasks.evaluation.stage import Scores
from tasks.evaluation.task_definition import EvalTask, read_definition

GENERATED = 30.0  # times as long as a choice takes an answer that is written: GSM8K against MMLU on one CPU


def document_seconds(tasks: Sequence[EvalTask], known: Mapping[str, Sequence[Artifact[Scores]]]) -> dict[str, float]:
    """What a document of each task takes, by task: in seconds where all of them were measured, else in documents of a
    choice task.

    Of several measurements the least counts: whichever came first had a model to load. Measured and guessed are never
    compared with each other, so that a run that was killed on its first night goes on in the order in which it began.

    Args:
        known: By task, scores of any models.
    """
    measured = {task.name: _measured(known.get(task.name, ())) for task in tasks}
    if all(measured.values()):
        return {name: 2.0 ** round(math.log2(seconds)) for name, seconds in measured.items() if seconds}
    return {task.name: _guessed(task) for task in tasks}


def _measured(known: Sequence[Artifact[Scores]]) -> float | None:
    took = [one.value.seconds / len(one.value.part) for one in known if one.value.seconds and one.value.part]
    return min(took, default=None)


def _guessed(task: EvalTask) -> float:
    """By what is asked of a document: a choice, or an answer to be written. A task by name says nothing before it is
    loaded, and most of them are choices."""
    if task.definition is None:
        return 1.0
    leaves = read_definition(task.definition).leaves
    written = [str(leaf.config.get("output_type", "generate_until")) == "generate_until" for leaf in leaves]
    return sum(GENERATED if one else 1.0 for one in written) / len(written)

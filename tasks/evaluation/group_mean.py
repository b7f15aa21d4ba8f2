"""What a group calls its own score, against the mean over documents that a guard compares.

lm-eval gives a group a score where its file has an ``aggregate_metric_list``: the mean over all documents of its
tasks, or, with ``weight_by_size: false``, the mean of the tasks' scores, each task counting alike. A guard pairs
documents, and each counts alike: what is not the group's own number has to be asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from mergegate.merge_core.errors import InvalidInput
from mergegate.tasks.evaluation.lm_eval_index import shipped_group
from mergegate.tasks.evaluation.task_definition import is_file_name, read_definition

MeanOver = Literal["documents"]


def require_declared_mean(task: str, mean_over: MeanOver | None, root: Path) -> None:
    """See that the score of a group that guards a release is what the group calls its own, or was asked for.

    Args:
        task: As a guard names it: a name of lm-eval's, or a YAML file.
        mean_over: What the guard says; None: nothing.
        root: What a YAML file is relative to.

    Raises:
        InvalidInput: for a group in which each task counts alike; or a list that lm-eval does not take.
    """
    is_file = is_file_name(task)
    config = read_definition((root / task).absolute()).config if is_file else shipped_group(task)
    if "group" not in config:
        return
    weighs = [_weighs_by_size(entry, task) for entry in _entries(config, task)]
    if not all(weighs) and mean_over is None:
        raise InvalidInput(
            f"evaluate.tasks: {task}",
            found="a group with weight_by_size: false: its own score counts each task alike, a guard each document",
            expected="the mean over its documents, asked for",
            remedy="mean_over: documents in the guard"
            + (", or weight_by_size: true in the file" if is_file else "")
            + "; or a guard for each of its tasks",
        )


def _entries(config: Mapping[str, Any], task: str) -> list[Mapping[str, Any]]:
    listed = config.get("aggregate_metric_list") or []
    entries = listed if isinstance(listed, list) else [listed]
    if all(isinstance(entry, Mapping) and isinstance(entry.get("metric"), str) for entry in entries):
        return entries
    raise InvalidInput(
        f"evaluate.tasks: {task}: aggregate_metric_list",
        found=f"{listed!r:.80}",
        expected="a list of {metric: NAME, weight_by_size: true or false}",
    )


def _weighs_by_size(entry: Mapping[str, Any], task: str) -> bool:
    said = entry.get("weight_by_size", True)
    if entry.get("aggregation", "mean") != "mean" or not isinstance(said, bool):
        raise InvalidInput(
            f"evaluate.tasks: {task}: aggregate_metric_list",
            found=f"aggregation: {entry.get('aggregation', 'mean')}, weight_by_size: {said}",
            expected="aggregation: mean, which is all that lm-eval has, and weight_by_size: true or false",
        )
    return said

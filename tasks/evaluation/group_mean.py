"""Compare the score that a group declares as its own with the mean over documents that a guard tests.

lm-eval gives a group a score if its file has an ``aggregate_metric_list``. This score is the mean over all documents of
its tasks or, with ``weight_by_size: false``, the mean of the tasks' scores, in which all tasks have equal weight. A
guard pairs documents, which all have equal weight. If that is not the group's own score, the guard must request it.
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
    """Check that the mean that a guard tests is the group's own score, or that the guard requests it.

    Args:
        task: Task in the guard: a name of lm-eval's, or a YAML file.
        mean_over: Setting of the guard. None: absent.
        root: Directory that a YAML file is relative to.

    Raises:
        InvalidInput: For a group in which all tasks have equal weight, or a list that lm-eval does not accept.
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
    weight_by_size = entry.get("weight_by_size", True)
    if entry.get("aggregation", "mean") != "mean" or not isinstance(weight_by_size, bool):
        raise InvalidInput(
            f"evaluate.tasks: {task}: aggregate_metric_list",
            found=f"aggregation: {entry.get('aggregation', 'mean')}, weight_by_size: {weight_by_size}",
            expected="aggregation: mean, which is all that lm-eval has, and weight_by_size: true or false",
        )
    return weight_by_size

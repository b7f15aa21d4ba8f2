"""Draw scores as bars, task by task.

Many tasks are grouped by the first part of their names, and each group shows its mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mergegate.tasks.report import wording
from mergegate.tasks.report.content import ReportedModel
from mergegate.tasks.report.table import TaskRow

_MAX_UNGROUPED = 10  # largest number of tasks that are drawn without groups


@dataclass(frozen=True)
class Bar:
    """Score of one model, in points."""

    model: str
    points: float
    text: str
    is_merge: bool


@dataclass(frozen=True)
class Bars:
    """Bars of one task, or the mean bars of a group together with its tasks."""

    name: str
    bars: tuple[Bar, ...]
    tasks: tuple[Bars, ...] = ()


def score_bars(rows: Sequence[TaskRow], models: Sequence[ReportedModel]) -> tuple[Bars, ...]:
    """Return the bars above the table: one set for each task whose scores are in [0, 1]."""
    single: dict[str, Bars] = {}
    for row in rows:
        name = (
            row.task
            if sum(candidate.task == row.task and candidate.metric != row.metric for candidate in rows) == 0
            else row.label
        )
        task_bars = tuple(
            _bar(model, 100 * cell.share)
            for model, cell in zip(models, row.cells, strict=True)
            if cell.share is not None
        )
        if task_bars:
            single.setdefault(name, Bars(name, task_bars))
    if len(single) <= _MAX_UNGROUPED:
        return tuple(single.values())
    groups: dict[str, list[Bars]] = {}
    for name, bars in single.items():
        groups.setdefault(name.partition("_")[0], []).append(bars)
    return tuple(members[0] if len(members) == 1 else _group(name, members, models) for name, members in groups.items())


def _group(name: str, members: list[Bars], models: Sequence[ReportedModel]) -> Bars:
    means = []
    for model in models:
        points = [bar.points for task in members for bar in task.bars if bar.model == model.name]
        if len(points) == len(members):  # a mean over fewer tasks would not be comparable
            means.append(_bar(model, sum(points) / len(points)))
    return Bars(f"{name}: mean of {len(members)} tasks", tuple(means), tuple(members))


def _bar(model: ReportedModel, points: float) -> Bar:
    return Bar(model.name, points, wording.number(points, 1), model.role == "merge")

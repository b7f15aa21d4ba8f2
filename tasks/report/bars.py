"""Scores as bars, a task at a time: of many tasks, groups by the first part of their names, each with its mean."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mergegate.tasks.report import wording
from mergegate.tasks.report.content import ReportedModel
from mergegate.tasks.report.table import TaskRow

_MOST_APART = 10  # tasks that are drawn without groups


@dataclass(frozen=True)
class Bar:
    """A model's score, in points."""

    model: str
    points: float
    text: str
    is_merge: bool


@dataclass(frozen=True)
class Bars:
    """The bars of one task, or of a group's means; and of a group the tasks in it."""

    name: str
    bars: tuple[Bar, ...]
    tasks: tuple[Bars, ...] = ()


def score_bars(rows: Sequence[TaskRow], models: Sequence[ReportedModel]) -> tuple[Bars, ...]:
    """What is drawn above the table: of every task whose scores are in [0, 1], once each."""
    single: dict[str, Bars] = {}
    for row in rows:
        name = row.task if sum(one.task == row.task and one.metric != row.metric for one in rows) == 0 else row.label
        found = tuple(
            _bar(model, 100 * cell.share)
            for model, cell in zip(models, row.cells, strict=True)
            if cell.share is not None
        )
        if found:
            single.setdefault(name, Bars(name, found))
    if len(single) <= _MOST_APART:
        return tuple(single.values())
    groups: dict[str, list[Bars]] = {}
    for name, bars in single.items():
        groups.setdefault(name.partition("_")[0], []).append(bars)
    return tuple(inside[0] if len(inside) == 1 else _group(name, inside, models) for name, inside in groups.items())


def _group(name: str, inside: list[Bars], models: Sequence[ReportedModel]) -> Bars:
    means = []
    for model in models:
        points = [bar.points for task in inside for bar in task.bars if bar.model == model.name]
        if len(points) == len(inside):  # a mean over other tasks would not compare
            means.append(_bar(model, sum(points) / len(points)))
    return Bars(f"{name}: mean of {len(inside)} tasks", tuple(means), tuple(inside))


def _bar(model: ReportedModel, points: float) -> Bar:
    return Bar(model.name, points, wording.number(points, 1), model.role == "merge")

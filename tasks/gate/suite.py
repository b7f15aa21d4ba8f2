"""A suite judged as a suite: the mean drop over its tasks is shown to be small, and no task alone has fallen far.

::

    fail          mean drop > T and its interval excludes zero, or a task is shown to have lost more than its max_drop
    pass          mean drop <= T, its upper bound <= M, and the upper bound of every task within its limit
    inconclusive  anything else

``T`` and ``M`` are the weighted means of the tasks' own ``max_drop`` and ``margin``: what each may lose alone, they may
lose together. Judged one by one, each task must show by itself what its documents hardly suffice for, and an equal
merge must be lucky as many times as there are tasks; their mean has the documents of all.

The interval of the mean is put together from those of the tasks (Zou & Donner 2008, Stat. Med. 27:1693: a method of
variance estimates recovery), so that what a task needs (Tango's interval, clusters, graded scores) is kept. Tasks have
different documents, so their distances from estimate to bound add in quadrature; guards of one task share documents,
so theirs add plainly.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from pydantic import BaseModel, ConfigDict

from mergegate.merge_core.errors import InvalidInput
from mergegate.tasks.gate.guards import Guard
from mergegate.tasks.gate.regression import GuardEvidence, Points, decide_guard
from mergegate.tasks.gate.sequential import InterimLook, chance_to_decide, look_levels
from mergegate.tasks.gate.statistics import POWER, normal_quantile
from mergegate.tasks.stage import Outcome, verdict_word


class PooledDrop(BaseModel):
    """What a task has probably lost, told by its own documents and by the other tasks'."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    task: str
    drop: float  # points
    pooled: float  # points: drawn to the mean of the suite the more, the noisier the task is


class SuiteVerdict(BaseModel):
    """All guarded tasks together. Differences are in points (0 to 100), positive when the merge is worse."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    tasks: int
    reference: str  # name of the model that all are compared with; 'their references' where there are several
    documents: int
    drop: float  # weighted mean over tasks
    low: float  # interval: all looks together have ``confidence``, one-sided each way
    high: float
    confidence: float
    max_drop: float  # weighted mean of the tasks'
    margin: float
    outcome: Outcome  # of the mean alone
    reason: str
    detectable_drop: float  # the smallest true mean drop that these documents show, 4 times in 5
    documents_needed: int | None = None  # that would decide it, if the drop is as seen; None where it is decided
    chance_left: float | None = None  # that the documents that are left decide it; None where nothing is left to decide
    look: InterimLook | None = None
    pooled: tuple[PooledDrop, ...] = ()

    @property
    def word(self) -> str:
        """What was shown, in one of four words."""
        return verdict_word(self.outcome, shown_worse=self.low > 0)


class TaskDrop(NamedTuple):
    """A drop with its interval, as one of those that a mean is taken over; in any unit, of one sample or of many."""

    task: str
    weight: float
    drop: Points
    low: Points
    high: Points


def judge_suite(measured: Sequence[GuardEvidence], confidence: float) -> SuiteVerdict:
    """The verdict on the mean drop over all tasks.

    Args:
        measured: The guards, at least one; several of one task count as that task's mean.
        confidence: One-sided, over all looks together.

    Raises:
        InvalidInput: when tasks have been evaluated to where no look was planned.
    """
    look = suite_look(measured, confidence)
    estimates = [100 * np.asarray(one.interval(confidence, look.confidence)[:3]) for one in measured]
    together = mean_drop([_of(one, *estimate) for one, estimate in zip(measured, estimates, strict=True)])
    drop, low, high = map(float, together)
    error = mean_drop(
        [_of(one, 0.0, -one_error, one_error) for one, one_error in _standard_errors(measured, confidence)]
    )[2]
    max_drop = _weighted(measured, lambda guard: guard.max_drop)
    margin = _weighted(measured, lambda guard: guard.upper_limit)
    outcome = decide_guard(drop, low, high, max_drop, margin, last_look=look.number == look.of)
    references = {one.reference for one in measured}
    verdict = SuiteVerdict(
        tasks=len({one.guard.task for one in measured}),
        reference=references.pop() if len(references) == 1 else "their references",
        documents=look.documents,
        drop=drop,
        low=low,
        high=high,
        confidence=confidence,
        max_drop=max_drop,
        margin=margin,
        outcome=outcome,
        reason="",
        detectable_drop=(normal_quantile(look.confidence) + normal_quantile(POWER)) * error,
        look=look,
        pooled=pooled_drops(measured, confidence),
    )
    if outcome == "inconclusive":
        chance = _chance_left(measured, verdict, error)
        verdict = verdict.model_copy(update={"documents_needed": _needed(verdict, error), "chance_left": chance})
    return verdict.model_copy(update={"reason": _sentence(verdict)})


def suite_look(measured: Sequence[GuardEvidence], confidence: float) -> InterimLook:
    """The look that the suite has reached: its tasks are extended together, each as long as it has documents.

    Raises:
        InvalidInput: when the tasks have been evaluated to different looks.
    """
    seen = {one.guard.task: one.documents for one in measured}
    planned = _steps({one.guard.task: one.schedule for one in measured})
    levels = look_levels(suite_information(measured), confidence)
    for number, (one, level) in enumerate(zip(planned, levels, strict=True), start=1):
        if one == seen:
            return InterimLook(number=number, of=len(planned), documents=sum(seen.values()), confidence=level)
    raise InvalidInput(
        "evaluate.tasks",
        found="tasks scored to different looks: " + ", ".join(f"{task} {n:,}" for task, n in seen.items()),
        expected="all tasks of a suite at the same look: " + " or ".join(_planned(one) for one in planned),
        remedy="evaluate up to the next look, or rule: each",
    )


def suite_information(measured: Sequence[GuardEvidence]) -> tuple[float, ...]:
    """``information_shares`` of the suite's looks."""
    weights = task_weights([_of(one, 0.0, 0.0, 0.0) for one in measured])
    return information_shares(weights, {one.guard.task: one.schedule for one in measured})


def information_shares(weights: Mapping[str, float], schedules: Mapping[str, Sequence[int]]) -> tuple[float, ...]:
    """Share of the information in the mean that each look has, rising to 1: the inverse squared error, as far as it is
    known beforehand, from the numbers of documents and the weights.

    Args:
        weights: Of each task in the mean.
        schedules: Of each task, documents after each look.
    """
    known = [1 / sum(weights[task] ** 2 / n for task, n in step.items()) for step in _steps(schedules)]
    return tuple(one / known[-1] for one in known)


def _steps(schedules: Mapping[str, Sequence[int]]) -> list[dict[str, int]]:
    """Documents of each task after each look of the suite."""
    steps = range(max(map(len, schedules.values())))
    return [{task: ends[min(step, len(ends) - 1)] for task, ends in schedules.items()} for step in steps]


def mean_drop(parts: Sequence[TaskDrop]) -> tuple[Any, Any, Any]:
    """Weighted mean over tasks, and its interval from theirs; a task with several guards counts once, as their mean."""
    weights = task_weights(parts)
    by_task: dict[str, list[TaskDrop]] = defaultdict(list)
    for part in parts:
        by_task[part.task].append(part)
    drop: Any = 0.0
    below: Any = 0.0
    above: Any = 0.0
    for task, same in by_task.items():
        share = weights[task] / len(same)
        drop += share * sum(part.drop for part in same)
        below += (share * sum(part.drop - part.low for part in same)) ** 2
        above += (share * sum(part.high - part.drop for part in same)) ** 2
    return drop, drop - below**0.5, drop + above**0.5


def task_weights(parts: Sequence[TaskDrop]) -> dict[str, float]:
    """Weight of each task in the mean; they sum to 1. Of several guards of a task the largest counts."""
    weights: dict[str, float] = {}
    for part in parts:
        weights[part.task] = max(part.weight, weights.get(part.task, 0.0))
    total = sum(weights.values())
    return {task: weight / total for task, weight in weights.items()}


def pooled_drops(measured: Sequence[GuardEvidence], confidence: float = 0.95) -> tuple[PooledDrop, ...]:
    """Each guard's drop, drawn to the common mean by as much as noise explains of the spread between them.

    ``mean + t2 / (t2 + v) * (drop - mean)`` with the squared error ``v`` of each and the variance ``t2`` between them
    (DerSimonian & Laird 1986, Control. Clin. Trials 7:177). Which task is alarming is better told by this than by the
    largest of many noisy numbers; nothing is decided by it.
    """
    drops = [100 * sum(one.differences) / len(one.differences) for one in measured]
    squared = [max(error**2, 1e-12) for _, error in _standard_errors(measured, confidence)]
    precision = [1 / error for error in squared]
    mean = sum(p * d for p, d in zip(precision, drops, strict=True)) / sum(precision)
    spread = sum(p * (d - mean) ** 2 for p, d in zip(precision, drops, strict=True))
    scale = sum(precision) - sum(p**2 for p in precision) / sum(precision)
    between = max(0.0, (spread - (len(measured) - 1)) / scale) if len(measured) > 1 else 0.0
    return tuple(
        PooledDrop(task=one.guard.task, drop=drop, pooled=mean + between / (between + error) * (drop - mean))
        for one, drop, error in zip(measured, drops, squared, strict=True)
    )


def _of(one: GuardEvidence, drop: Points, low: Points, high: Points) -> TaskDrop:
    return TaskDrop(one.guard.task, one.guard.weight, drop, low, high)


def _standard_errors(measured: Sequence[GuardEvidence], confidence: float) -> list[tuple[GuardEvidence, float]]:
    """Each guard with the standard error of its drop, points. It is the same at any ``confidence``; at the one that the
    bounds were asked for they are known."""
    return [
        (one, 100 * math.sqrt(one.interval(confidence, confidence).variance / len(one.differences))) for one in measured
    ]


def _weighted(measured: Sequence[GuardEvidence], limit: Callable[[Guard], float]) -> float:
    return float(mean_drop([_of(one, limit(one.guard), 0.0, 0.0) for one in measured])[0])


def _needed(verdict: SuiteVerdict, error: float) -> int | None:
    """Documents of the whole suite, in equal shares, that would decide with power 0.8 if the drop is as seen."""
    distance = verdict.drop if verdict.drop > verdict.max_drop else verdict.margin - verdict.drop
    if distance <= 0:
        return None
    z = normal_quantile(verdict.confidence) + normal_quantile(POWER)
    return max(verdict.documents + 1, math.ceil(verdict.documents * (z * error / distance) ** 2))


def _chance_left(measured: Sequence[GuardEvidence], verdict: SuiteVerdict, error: float) -> float | None:
    information, reached = suite_information(measured), verdict.look.number - 1 if verdict.look else 0
    if reached + 1 == len(information):
        return None
    share = information[reached]
    quantile = normal_quantile(look_levels(information, verdict.confidence)[-1])
    last_error = error * math.sqrt(share)
    pass_below = min(verdict.max_drop, verdict.margin - quantile * last_error)
    return chance_to_decide(verdict.drop, error, share, pass_below, max(verdict.max_drop, quantile * last_error))


def _planned(documents: dict[str, int]) -> str:
    return ", ".join(f"{task} {n:,}" for task, n in documents.items())


def _sentence(verdict: SuiteVerdict) -> str:
    """``mean of 6 tasks: 0.4 points below [-0.3, 1.1], limit 2``."""
    drop, low, high, limit = verdict.drop, verdict.low, verdict.high, verdict.max_drop
    # 2.04 is over a limit of 2, and must be seen to be.
    digits = next((d for d in (1, 2) if (round(drop, d) > limit) == (drop > limit)), 3)
    direction = "below"
    if drop < 0:
        drop, low, high, direction = -drop, -high, -low, "above"
    sentence = (
        f"mean of {verdict.tasks} tasks: {drop:.{digits}f} points {direction} {verdict.reference} "
        f"[{low:.{digits}f}, {high:.{digits}f}], limit {limit:.{digits}f}"
    )
    if verdict.outcome != "inconclusive":
        return sentence
    sentence += f": undecided after {verdict.documents:,} documents"
    return sentence + (f"; about {verdict.documents_needed:,} would decide it" if verdict.documents_needed else "")

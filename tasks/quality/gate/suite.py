"""Judge a suite as a whole: by the mean drop over its tasks, and by the drop of each task.

::

    fail          mean drop > T and its interval excludes zero, or a task is shown to have lost more than its max_drop
    pass          mean drop <= T, its upper bound <= M, and the upper bound of every task within its limit
    inconclusive  anything else

``T`` and ``M`` are the weighted means of ``max_drop`` and ``margin`` over the guards. The mean drop uses the documents
of all tasks. If every task had to pass on its own, its documents would hardly suffice, and an equal merge would have to
be lucky once per task.

The interval of the mean is combined from the intervals of the tasks (Zou & Donner 2008, Stat. Med. 27:1693), so each
task keeps the kind of interval that it needs (for binary scores, graded scores or clusters). Different tasks have
different documents, so their distances from estimate to bound add in quadrature. Guards of one task share documents, so
their distances add linearly.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from mergegate.merge_core.errors import Finding, InvalidInput
from mergegate.merge_core.wording import format_count
from mergegate.tasks.quality.gate.cut_answers import answer_cases, count_extensible, describe_remedy
from mergegate.tasks.quality.gate.evidence import GuardEvidence, Points
from mergegate.tasks.quality.gate.regression import decide_guard
from mergegate.tasks.quality.gate.sequential import InterimLook, chance_to_decide, look_levels
from mergegate.tasks.quality.gate.settings import ANCHOR, Guard
from mergegate.tasks.quality.gate.statistics import POWER, normal_quantile
from mergegate.tasks.quality.gate.verdicts import UNSAFE, CutAnswers, PooledDrop, SuiteVerdict, drop_sentence


class TaskDrop(NamedTuple):
    """Drop of a task with its bounds, in any unit. The numbers may be arrays with one element per sample."""

    task: str
    weight: float
    drop: Points
    low: Points = 0.0
    high: Points = 0.0


def reference_findings(guards: Sequence[Guard], rule: str) -> Iterator[Finding]:
    """Yield a warning for the tasks of a suite that are compared with several references.

    The drops of such a task are averaged, so a gain over one reference can hide a loss against another. Guards against
    the anchor have a mean of their own.
    """
    references = defaultdict[str, list[str]](list)
    for guard in guards:
        if not guard.advisory and guard.guarded_by != ANCHOR:
            references[guard.task].append(guard.guarded_by)
    tasks = [task for task, names in references.items() if len(names) > 1]
    if rule == "suite" and len(references) > 1 and tasks:
        others = f" (and {format_count(len(tasks) - 1, 'more task')})" if len(tasks) > 1 else ""
        yield Finding(
            "warn",
            "evaluate.rule",
            found=f"the mean averages the drops of {tasks[0]}{others} against {' and '.join(references[tasks[0]])}, so "
            "a gain over one of them can hide a loss against another",
            expected="one reference per task, or a decision on each guard",
            remedy="set rule: each",
        )


def judge_suite(guard_evidence: Sequence[GuardEvidence], confidence: float) -> SuiteVerdict:
    """Return the verdict on the mean drop over all tasks. It is inconclusive if it depends on cut-off answers.

    Args:
        guard_evidence: Evidence on the guards, at least one. Several guards of one task count as that task's mean.
        confidence: One-sided confidence over all looks together.
    """
    measured, *extremes = (_judge_measured(case, confidence) for case in answer_cases(guard_evidence))
    if not extremes:
        return measured
    outcomes = [case.outcome for case in (measured, *extremes)]
    cut = CutAnswers(lowest_drop=extremes[0].drop, highest_drop=extremes[1].drop, decide=len(set(outcomes)) > 1)
    update: dict[str, object] = {"cut_answers": cut}
    if len(set(outcomes)) > 1:
        limits = {evidence.answer_limit for evidence in guard_evidence}
        reason = (
            f"{UNSAFE}: the mean of {measured.tasks} tasks depends on answers that were cut off. {cut.describe()}; the "
            f"mean margin is {measured.margin:.4g}. "
            f"{describe_remedy(count_extensible(guard_evidence), limits.pop())}"
        )
        update |= {"outcome": "inconclusive", "reason": reason}
    return measured.model_copy(update=update)


def _judge_measured(guard_evidence: Sequence[GuardEvidence], confidence: float) -> SuiteVerdict:
    """Return the verdict of ``judge_suite`` with all answers counted as measured."""
    # The tasks of a suite reach each look together. A task without further documents stays as it is.
    documents = {evidence.guard.task: evidence.documents for evidence in guard_evidence}
    planned = _steps({evidence.guard.task: evidence.schedule for evidence in guard_evidence})
    if documents not in planned:
        raise InvalidInput(
            "evaluate.tasks",
            found=f"tasks at different looks: {_format_counts(documents)}",
            expected=f"all tasks of a suite at the same look: {' or '.join(map(_format_counts, planned))}",
            remedy="evaluate up to the next look, or set rule: each",
        )
    number = planned.index(documents)
    information = information_shares([(evidence.guard, evidence.schedule) for evidence in guard_evidence])
    level = look_levels(information, confidence)[number]
    look = InterimLook(number=number + 1, of=len(planned), documents=sum(documents.values()), confidence=level)
    drops, errors = [], []
    for evidence, task_error in zip(guard_evidence, _standard_errors(guard_evidence, confidence), strict=True):
        task, weight = evidence.guard.task, evidence.guard.weight
        drops.append(TaskDrop(task, weight, *(100 * np.asarray(evidence.interval(confidence, level)[:3]))))
        errors.append(TaskDrop(task, weight, 0.0, -task_error, task_error))
    drop, low, high = map(float, mean_drop(drops))
    error = mean_drop(errors)[2]
    max_drop, margin = mean_limits(evidence.guard for evidence in guard_evidence)
    outcome = decide_guard(drop, low, high, max_drop, margin, last_look=look.number == look.of)
    references = {evidence.reference for evidence in guard_evidence}
    verdict = SuiteVerdict(
        tasks=len({evidence.guard.task for evidence in guard_evidence}),
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
        pooled=pooled_drops(guard_evidence, confidence),
    )
    if outcome == "inconclusive":
        update = {
            "documents_needed": _documents_to_decide(verdict, error),
            "chance_left": _chance_left(information, number, verdict, error),
        }
        verdict = verdict.model_copy(update=update)
    return verdict.model_copy(update={"reason": drop_sentence(verdict, sum(planned[-1].values()))})


def information_shares(planned_guards: Sequence[tuple[Guard, Sequence[int]]]) -> tuple[float, ...]:
    """Return the share of the information in the mean that is available at each look of a suite, increasing to 1.

    Information is the inverse squared error of the mean if all documents have the same variance. ``planned_guards``
    holds each guard with the number of documents of its task after each look.
    """
    weights = task_weights([TaskDrop(guard.task, guard.weight, 0.0) for guard, _ in planned_guards])
    steps = _steps({guard.task: schedule for guard, schedule in planned_guards})
    information = [1 / sum(weights[task] ** 2 / n for task, n in step.items()) for step in steps]
    return tuple(amount / information[-1] for amount in information)


def _steps(schedules: Mapping[str, Sequence[int]]) -> list[dict[str, int]]:
    """Return the number of documents of each task after each look of the suite."""
    steps = range(max(map(len, schedules.values())))
    return [{task: ends[min(step, len(ends) - 1)] for task, ends in schedules.items()} for step in steps]


def mean_drop(parts: Sequence[TaskDrop]) -> tuple[Any, Any, Any]:
    """Return the weighted mean over tasks and its bounds. Several guards of a task count once, as their mean."""
    weights = task_weights(parts)
    by_task: dict[str, list[TaskDrop]] = defaultdict(list)
    for part in parts:
        by_task[part.task].append(part)
    drop: Any = 0.0
    below: Any = 0.0
    above: Any = 0.0
    for task, task_drops in by_task.items():
        share = weights[task] / len(task_drops)
        drop += share * sum(part.drop for part in task_drops)
        below += (share * sum(part.drop - part.low for part in task_drops)) ** 2
        above += (share * sum(part.high - part.drop for part in task_drops)) ** 2
    return drop, drop - below**0.5, drop + above**0.5


def task_weights(parts: Sequence[TaskDrop]) -> dict[str, float]:
    """Return the weight of each task in the mean; they sum to 1. The largest weight of a task's guards counts."""
    weights: dict[str, float] = {}
    for part in parts:
        weights[part.task] = max(part.weight, weights.get(part.task, 0.0))
    total = sum(weights.values())
    return {task: weight / total for task, weight in weights.items()}


def pooled_drops(guard_evidence: Sequence[GuardEvidence], confidence: float = 0.95) -> tuple[PooledDrop, ...]:
    """Return each guard's drop, shrunk toward the common mean to the extent that noise explains the spread of drops.

    The formula is ``mean + t2 / (t2 + v) * (drop - mean)`` with the squared error ``v`` of each guard and the variance
    ``t2`` between guards (DerSimonian & Laird 1986, Control. Clin. Trials 7:177). A large pooled drop indicates a bad
    task more reliably than the largest of many noisy drops. It is only reported, and does not affect the verdict.
    """
    drops = [100 * sum(evidence.differences) / len(evidence.differences) for evidence in guard_evidence]
    squared = [max(error**2, 1e-12) for error in _standard_errors(guard_evidence, confidence)]
    precision = [1 / error for error in squared]
    mean = sum(p * d for p, d in zip(precision, drops, strict=True)) / sum(precision)
    spread = sum(p * (d - mean) ** 2 for p, d in zip(precision, drops, strict=True))
    scale = sum(precision) - sum(p**2 for p in precision) / sum(precision)
    between = max(0.0, (spread - (len(guard_evidence) - 1)) / scale) if len(guard_evidence) > 1 else 0.0
    return tuple(
        PooledDrop(task=evidence.guard.task, drop=drop, pooled=mean + between / (between + error) * (drop - mean))
        for evidence, drop, error in zip(guard_evidence, drops, squared, strict=True)
    )


def _standard_errors(guard_evidence: Sequence[GuardEvidence], confidence: float) -> list[float]:
    """Return the standard error of each drop in points. It does not depend on ``confidence``.

    With the confidence of the bounds, the interval is already cached.
    """
    return [
        100 * math.sqrt(evidence.interval(confidence, confidence).variance / len(evidence.differences))
        for evidence in guard_evidence
    ]


def mean_limits(guards: Iterable[Guard]) -> tuple[float, float]:
    """Return the weighted means of ``max_drop`` and of the margin over the guards, in points."""
    limits = [(guard.task, guard.weight, guard.max_drop, guard.upper_limit) for guard in guards]
    max_drop, *_ = mean_drop([TaskDrop(task, weight, limit) for task, weight, limit, _ in limits])
    margin, *_ = mean_drop([TaskDrop(task, weight, limit) for task, weight, _, limit in limits])
    return float(max_drop), float(margin)


def _documents_to_decide(verdict: SuiteVerdict, error: float) -> int | None:
    """Return the documents of all tasks that decide with power 0.8 if the true drop is as observed."""
    distance = verdict.drop if verdict.drop > verdict.max_drop else verdict.margin - verdict.drop
    if distance <= 0:
        return None
    z = normal_quantile(verdict.confidence) + normal_quantile(POWER)
    return max(verdict.documents + 1, math.ceil(verdict.documents * (z * error / distance) ** 2))


def _chance_left(information: tuple[float, ...], position: int, verdict: SuiteVerdict, error: float) -> float | None:
    if position + 1 == len(information):
        return None
    share = information[position]
    quantile = normal_quantile(look_levels(information, verdict.confidence)[-1])
    last_error = error * math.sqrt(share)
    pass_below = min(verdict.max_drop, verdict.margin - quantile * last_error)
    return chance_to_decide(verdict.drop, error, share, pass_below, max(verdict.max_drop, quantile * last_error))


def _format_counts(documents: dict[str, int]) -> str:
    return ", ".join(f"{task} {n:,}" for task, n in documents.items())

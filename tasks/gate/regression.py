"""A regression guard: what was measured on its task, and the verdict that follows. Pure decisions.

A guard has three outcomes, because evidence can be too thin to say (T: ``max_drop``, M: ``margin``, both in points)::

    fail          drop > T and the interval excludes zero        over the threshold, and not noise
    pass          drop <= T and its upper bound <= M             shown to be at most so much worse
    inconclusive  anything else                                  more documents would tell

That is ``rule: each``. Where the suite is judged as a whole (``tasks.gate.suite``), a task alone must only not have
fallen far, by L: ``limit``::

    fail          lower bound > T                                shown to have lost more than it may
    pass          upper bound <= L                               shown not to have fallen far
    inconclusive  anything else

The bounds are those of the look at which it is asked (``tasks.gate.sequential``). While more documents can be had,
failing takes a drop over the margin, not only over the threshold: what lies between may come out either way.

To pass, each guard is asked on its own: all must pass, and a bad merge has to get by every one of them. To fail, one of
them suffices, and among many guards one sees a drop by chance; so that side is corrected for their number by Holm's
step-down (1979, Scand. J. Stat. 6:65), where a guard compared with the best of K parents counts as K questions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from mergegate.merge_core.errors import InvalidInput
from mergegate.tasks.evaluation import PairedScores, TaskData
from mergegate.tasks.gate.clusters import check_clusters, clustered_difference
from mergegate.tasks.gate.graded_scores import graded_difference
from mergegate.tasks.gate.guards import Guard
from mergegate.tasks.gate.sequential import InterimLook, chance_to_decide, look_at, plan_looks
from mergegate.tasks.gate.statistics import (
    Difference,
    binary_difference,
    detectable_difference,
    documents_needed,
    normal_quantile,
)
from mergegate.tasks.stage import Outcome, verdict_word


class GuardVerdict(BaseModel):
    """One regression guard: the merge against its reference on one task. Differences are in points (0 to 100),
    positive when the merge is worse."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    task: str
    metric: str  # of a group whose tasks have several: each once, 'acc,none + exact_match,none'
    reference: str  # name of the model it is compared with
    reference_score: float  # in [0, 1]
    merge_score: float
    n: int  # paired documents
    lost: int  # documents the reference gets right and the merge wrong (graded: on which the merge is worse)
    won: int  # the reverse
    drop: float  # points
    low: float  # interval of the drop, points: all looks together have ``confidence``, one-sided each way
    high: float
    confidence: float  # 0.95
    max_drop: float  # points
    margin: float  # points: the upper bound must stay within it to pass
    outcome: Outcome
    reason: str  # a sentence: task, drop, interval, threshold
    documents_needed: int | None = None  # that would decide it, if the drop is as seen; None where it is decided
    detectable_drop: float | None = None  # points: the smallest true drop so many documents show, 4 times in 5
    look: InterimLook | None = None  # at which it was judged
    documents_left: int = 0  # that further looks can still add
    alarm_confidence: float | None = None  # at which it is asked whether there is a drop, one question among several
    candidates: int = 1  # parents of which the reference is the best
    selection_bias: float = 0.0  # points of the drop that choosing the best of them makes, at most
    clusters: int | None = None  # independent groups of documents; None where each document stands for itself
    documents_asked: int | None = None  # of which ``n`` were scored: all of them, or the guard is not judged
    leaf_metrics: dict[str, str] = Field(default_factory=dict)  # by task below the group, where they differ
    data: TaskData | None = None  # what was asked; None for results that lm-eval wrote
    chance_left: float | None = None  # that the documents that are left decide it; None where nothing is left to decide
    weight: float = 1.0  # of the task in the mean over all
    limit: float | None = None  # points that its suite allows this task alone; None where it is judged on its own

    @property
    def word(self) -> str:
        """What was shown of this task by its own margin, in one of four words, whatever the suite allows it."""
        if self.limit is None or self.outcome == "fail":
            return verdict_word(self.outcome, shown_worse=self.low > 0)
        alone = decide_guard(self.drop, self.low, self.high, self.max_drop, self.margin)
        return verdict_word(alone, shown_worse=self.low > 0)


Points = float | NDArray[np.float64]


@dataclass(frozen=True)
class GuardEvidence:
    """What is known of one guard before anything is decided. Scores are in [0, 1], higher is better."""

    guard: Guard
    metric: str
    reference: str
    reference_score: float
    merge_score: float
    differences: tuple[float, ...]  # reference minus merge, signed so that positive is worse
    binary: bool
    documents: int  # of the task that were evaluated
    schedule: tuple[int, ...]  # documents after each planned look
    clusters: tuple[str, ...] | None = None  # of each difference
    candidates: int = 1
    selection_bias: float = 0.0  # in [0, 1]
    leaf_metrics: Mapping[str, str] = field(default_factory=dict)  # by task below a group, where they differ
    data: TaskData | None = None  # what was asked

    def look(self, confidence: float) -> InterimLook:
        """The look that has been reached, where all looks together have ``confidence``.

        Raises:
            InvalidInput: when no look was planned after so many documents.
        """
        return look_at(self.documents, self.schedule, confidence, f"task {self.guard.task}")

    def interval(self, confidence: float, level: float | None = None) -> Difference:
        """Interval of the mean difference at the look that has been reached, one-sided each way.

        Args:
            confidence: Of all looks together. Bounds of graded scores hold at all of them as they are; those of right
                or wrong, and of clusters, are taken at the confidence of the look.
            level: That confidence, where the look is not this task's own but its suite's.
        """
        level = self.look(confidence).confidence if level is None else level
        if not self.binary:
            plain = graded_difference(self.differences, confidence, self.schedule)
        else:
            lost, won = sum(d > 0 for d in self.differences), sum(d < 0 for d in self.differences)
            plain = binary_difference(lost, won, len(self.differences), level)
        if self.clusters is None:
            return plain
        return clustered_difference(self.differences, self.clusters, plain, level)


def measure_guard(
    guard: Guard,
    metric: str,
    paired: PairedScores,
    higher_is_better: bool,
    *,
    reference: str | None = None,
    documents: int | None = None,
    schedule: Sequence[int] = (),
    candidates: int = 1,
    selection_bias: float = 0.0,
    leaf_metrics: Mapping[str, str] | None = None,
    data: TaskData | None = None,
) -> GuardEvidence:
    """Evidence on one guard from paired scores within ``guard.score_range``, in the order in which they were scored.

    Args:
        reference: The model that was chosen; absent: as the guard says.
        documents: Of the task, evaluated so far; absent: those that are paired.
        schedule: Documents after each planned look; empty: this look is the only one.
        candidates: Parents of which the reference is the best.
        selection_bias: What that adds to the drop, at most; in [0, 1].
        leaf_metrics: By task below a group, where they are judged by different ones.
        data: What was asked, where it is known.

    Raises:
        InvalidInput: when there are too few documents or clusters to say anything, not all that were evaluated have a
            score, documents are not known to be in clusters, or a score is not a number within the guard's range.
    """
    sign = 1.0 if higher_is_better else -1.0
    n = len(paired.documents)
    if n < 2:
        raise InvalidInput(f"task {guard.task}", found=f"{n} document", expected="2 or more, better hundreds")
    documents = documents or n
    if n != documents:
        raise InvalidInput(
            f"task {guard.task}",
            found=f"{n:,} documents with a score under {metric}",
            expected=f"all {documents:,} that were asked",
            remedy="judge by a metric that every document has",
        )
    theirs = _mapped(guard, metric, paired, paired.reference, reference or guard.guarded_by)
    ours = _mapped(guard, metric, paired, paired.merge, "the merge")
    return GuardEvidence(
        guard=guard,
        metric=metric,
        reference=reference or guard.guarded_by,
        reference_score=sum(theirs) / n,
        merge_score=sum(ours) / n,
        differences=tuple(sign * (left - right) for left, right in zip(theirs, ours, strict=True)),
        binary=set(theirs) | set(ours) <= {0.0, 1.0},
        documents=documents,
        schedule=tuple(schedule) or (documents,),
        clusters=_clusters(guard, paired),
        candidates=candidates,
        selection_bias=selection_bias,
        leaf_metrics=dict(leaf_metrics or {}),
        data=data,
    )


def decide_guard(
    drop: float, low: float, high: float, max_drop: float, margin: float, *, last_look: bool = True
) -> Outcome:
    """The rule at the top of this file, on a drop with its interval; all in points."""
    if is_worse(drop, low, max_drop if last_look else margin):
        return "fail"
    return "pass" if is_within(drop, high, max_drop, margin) else "inconclusive"


def is_worse(drop: Points, low: Points, limit: float) -> Any:
    """Over the limit, and not noise; of one drop or of many."""
    return (drop > limit) & (low > 0)


def is_within(drop: Points, high: Points, max_drop: float, margin: float) -> Any:
    """Shown to be at most so much worse; of one drop or of many."""
    return (drop <= max_drop) & (high <= margin)


def decide_task(low: float, high: float, max_drop: float, limit: float) -> Outcome:
    """Whether a task of a suite has fallen far; all in points.

    Args:
        low: Lower bound among as many questions as are asked.
        high: Upper bound of this task alone: a merge that has fallen far in one task has to get by that one.
    """
    if low > max_drop:
        return "fail"
    return "pass" if high <= limit else "inconclusive"


def judge_guard(
    guard: Guard, metric: str, paired: PairedScores, higher_is_better: bool, confidence: float
) -> GuardVerdict:
    """The verdict of a guard that is the only one, on paired scores in [0, 1] that are all there will be.

    Raises:
        InvalidInput: as ``measure_guard``.
    """
    return judge_guards([measure_guard(guard, metric, paired, higher_is_better)], confidence)[0]


def judge_guards(
    measured: Sequence[GuardEvidence], confidence: float, *, as_suite: bool = False, unasked: int = 0
) -> tuple[GuardVerdict, ...]:
    """The verdicts of all guards of a merge, each at the look that its task has reached.

    Args:
        confidence: One-sided, of each passing guard over all of its looks; and that no alarm at all is false.
        as_suite: Each must only not have fallen far, instead of being within its own margin.
        unasked: Further guards of the merge of which nothing is known yet.

    Raises:
        InvalidInput: when a task has been evaluated to where no look was planned.
    """
    alarms = alarm_confidences(measured, confidence, unasked)
    asked = sum(one.candidates for one in measured)
    return tuple(
        _judged(one, confidence, alarm, asked, as_suite=as_suite) for one, alarm in zip(measured, alarms, strict=True)
    )


def alarm_confidences(measured: Sequence[GuardEvidence], confidence: float, unasked: int = 0) -> list[float]:
    """At which confidence, over all its looks, each guard is asked whether there is a drop at all.

    Holm's step-down in the form of Bretz et al. 2009 (Stat. Med. 28:586): the allowed error is shared by the guards
    that have not yet shown a drop, so each one that has leaves its share to the others. Each look spends the share of
    its guard as ``tasks.gate.sequential`` says (Maurer & Bretz 2013, Stat. Biopharm. Res. 5:311). Guards of which
    nothing is known yet (``unasked``) keep their shares: what is shown without them is shown whatever they say.
    """
    confidences = [confidence] * len(measured)
    waiting = list(range(len(measured)))
    while waiting:
        for i in waiting:
            questions = (len(waiting) + unasked) * measured[i].candidates
            confidences[i] = confidence if questions == 1 else 1 - (1 - confidence) / questions
        shown = [i for i in waiting if _low(measured[i], confidences[i]) > 0]
        waiting = [i for i in waiting if i not in shown]
        if not shown:
            break
    return confidences


def _low(one: GuardEvidence, confidence: float) -> float:
    return one.interval(confidence).low


def _judged(one: GuardEvidence, confidence: float, alarm: float, asked: int, *, as_suite: bool) -> GuardVerdict:
    guard, n = one.guard, len(one.differences)
    look, alarm_look = one.look(confidence), one.look(alarm)
    estimate = one.interval(confidence)
    drop, low, high = (100 * value for value in (estimate.mean, estimate.low, estimate.high))
    last_look = look.number == look.of
    sure_low = 100 * _low(one, alarm)
    if as_suite:
        outcome = decide_task(sure_low, high, guard.max_drop, guard.catastrophe)
    else:
        outcome = decide_guard(drop, sure_low, high, guard.max_drop, guard.upper_limit, last_look=last_look)
    needed = chance_left = None
    if outcome == "inconclusive":
        chance_left = _chance_left(one, estimate, confidence, alarm, as_suite=as_suite)
        alarming = drop > guard.max_drop and not as_suite
        needed = _needed(one, estimate, alarm if alarming else confidence, as_suite=as_suite)
    verdict = GuardVerdict(
        task=guard.task,
        metric=one.metric,
        reference=one.reference,
        reference_score=one.reference_score,
        merge_score=one.merge_score,
        n=n,
        lost=sum(d > 0 for d in one.differences),
        won=sum(d < 0 for d in one.differences),
        drop=drop,
        low=low,
        high=high,
        confidence=confidence,
        max_drop=guard.max_drop,
        margin=guard.upper_limit,
        outcome=outcome,
        reason="",
        documents_needed=needed,
        detectable_drop=100 * detectable_difference(estimate.variance, n, alarm_look.confidence),
        look=look,
        documents_left=one.schedule[-1] - one.documents,
        alarm_confidence=alarm,
        candidates=one.candidates,
        selection_bias=100 * one.selection_bias,
        clusters=len(set(one.clusters)) if one.clusters is not None else None,
        chance_left=chance_left,
        weight=guard.weight,
        limit=guard.catastrophe if as_suite else None,
        documents_asked=one.documents,
        leaf_metrics=dict(one.leaf_metrics),
        data=one.data,
    )
    return verdict.model_copy(update={"reason": _sentence(verdict, asked)})


def _needed(one: GuardEvidence, estimate: Difference, confidence: float, *, as_suite: bool) -> int | None:
    """Documents that would decide with power 0.8 if the drop is as seen: those of a planned look, or more than all."""
    drop, guard = estimate.mean, one.guard
    threshold, margin = guard.max_drop / 100, (guard.catastrophe if as_suite else guard.upper_limit) / 100
    # Above the threshold it takes showing that there is a drop at all; below it, and for a task of a suite, that it is
    # within what is allowed.
    distance = drop if drop > threshold and not as_suite else margin - drop
    if distance <= 0:
        return None
    for look in plan_looks(one.schedule, confidence):
        can_decide = as_suite or look.number == look.of or not threshold < drop <= margin
        enough = documents_needed(estimate.variance, distance, look.confidence) <= look.documents
        if look.documents > one.documents and can_decide and enough:
            return look.documents
    return max(one.schedule[-1] + 1, documents_needed(estimate.variance, distance, confidence))


def _chance_left(
    one: GuardEvidence, estimate: Difference, confidence: float, alarm: float, *, as_suite: bool
) -> float | None:
    if one.documents >= one.schedule[-1]:
        return None
    share, guard = one.documents / one.schedule[-1], one.guard
    error = math.sqrt(estimate.variance / len(one.differences))
    sure, alarmed = (normal_quantile(plan_looks(one.schedule, level)[-1].confidence) for level in (confidence, alarm))
    last_error, limit = error * math.sqrt(share), guard.max_drop / 100
    if as_suite:
        pass_below, fail_above = guard.catastrophe / 100 - sure * last_error, limit + alarmed * last_error
    else:
        pass_below = min(limit, guard.upper_limit / 100 - sure * last_error)
        fail_above = max(limit, alarmed * last_error)
    return chance_to_decide(estimate.mean, error, share, pass_below, fail_above)


def _mapped(guard: Guard, metric: str, paired: PairedScores, scores: Sequence[float], model: str) -> tuple[float, ...]:
    """Scores of one model on the scale from 0 to 1, on which ``max_drop`` counts hundredths."""
    low, high = guard.score_range
    rounding = 1e-9 * (high - low)  # 0.1 + 0.2 is more than 0.3
    for (task, doc_id), score in zip(paired.documents, scores, strict=True):
        if not low - rounding <= score <= high + rounding:
            raise InvalidInput(
                f"{guard.task}: {metric} of {model}",
                found=f"{score:g} for document {doc_id} of {task}",
                expected=f"a number from {low:g} to {high:g}",
                remedy="state the least and greatest score in the guard's score_range"
                if math.isfinite(score)
                else "look at the model's answer to this document: a merge that answers so is broken",
            )
    return tuple(min(1.0, max(0.0, (score - low) / (high - low))) for score in scores)


def _clusters(guard: Guard, paired: PairedScores) -> tuple[str, ...] | None:
    if guard.clustered_by is None:
        return None
    clusters = tuple(task for task, _ in paired.documents) if guard.clustered_by == "task" else paired.clusters
    check_clusters(clusters, guard.clustered_by, guard.task)
    return clusters


def _sentence(verdict: GuardVerdict, asked: int) -> str:
    """What was found, in the words of a person: ``gsm8k: 4.1 points below math [2.3, 5.9], limit 3.0``."""
    drop, low, high, limit = verdict.drop, verdict.low, verdict.high, verdict.limit or verdict.max_drop
    # 3.04 is over a limit of 3, and must be seen to be.
    digits = next((d for d in (1, 2) if (round(drop, d) > limit) == (drop > limit)), 3)
    if drop < 0:  # said the other way round, interval and all
        difference, low, high = f"{-drop:.{digits}f} points above", -high, -low
    else:
        difference = f"{drop:.{digits}f} points below" if drop > 0 else "level with"
    reference = verdict.reference
    if verdict.candidates > 1:
        reference += f", the best of {verdict.candidates} parents,"
    interval = f"[{low:.{digits}f}, {high:.{digits}f}]"
    sentence = f"{verdict.task}: {difference} {reference} {interval}, limit {limit:.{digits}f}"
    if verdict.candidates > 1:
        sentence += f" (choosing the best makes up to {verdict.selection_bias:.1f} of it)"
    look = verdict.look
    total = look.documents + verdict.documents_left if look else verdict.n
    seen = f"{look.documents:,} of {total:,}" if look and look.of > 1 else f"{total:,}"
    if verdict.limit is not None and verdict.outcome == "fail":
        sentence = f"{sentence.rpartition(', limit')[0]}, shown to be more than {verdict.max_drop:g}"
    if verdict.outcome != "inconclusive":
        return f"{sentence}, after {seen} documents" if verdict.documents_left else sentence
    sentence += f": undecided after {seen} documents"
    if verdict.limit is None and verdict.low > 0 and drop > (verdict.margin if verdict.documents_left else limit):
        sentence += f", where one of {asked} comparisons may be off by chance"
    return sentence + (f"; about {verdict.documents_needed:,} would decide it" if verdict.documents_needed else "")

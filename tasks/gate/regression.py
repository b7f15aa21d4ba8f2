"""A regression guard: what was measured on its task, and the verdict that follows. Pure decisions.

A guard has three outcomes, because evidence can be too thin to say (T: ``max_drop``, M: ``margin``, both in points)::

    fail          drop > T and the interval excludes zero        over the threshold, and not noise
    pass          drop <= T and its upper bound <= M             shown to be at most so much worse
    inconclusive  anything else                                  more documents would tell

The bounds are those of the look at which it is asked (``tasks.gate.sequential``). While more documents can be had,
failing takes a drop over the margin, not only over the threshold: what lies between may come out either way.

To pass, each guard is asked on its own: all must pass, and a bad merge has to get by every one of them. To fail, one of
them suffices, and among many guards one sees a drop by chance; so that side is corrected for their number by Holm's
step-down (1979, Scand. J. Stat. 6:65), where a guard compared with the best of K parents counts as K questions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pydantic import BaseModel, ConfigDict, Field

from merge_core.errors import InvalidInput
from tasks.evaluation import Paired, TaskData
from tasks.gate.guards import Guard
from tasks.gate.sequential import Look, look_at, plan_looks
from tasks.gate.statistics import (
    Difference,
    binary_difference,
    clustered_difference,
    detectable_difference,
    documents_needed,
    graded_difference,
)
from tasks.stage import Outcome


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
    look: Look | None = None  # at which it was judged
    documents_left: int = 0  # that further looks can still add
    alarm_confidence: float | None = None  # at which it is asked whether there is a drop, one question among several
    candidates: int = 1  # parents of which the reference is the best
    selection_bias: float = 0.0  # points of the drop that choosing the best of them makes, at most
    clusters: int | None = None  # independent groups of documents; None where each document stands for itself
    documents_asked: int | None = None  # of which ``n`` were scored: all of them, or the guard is not judged
    leaf_metrics: dict[str, str] = Field(default_factory=dict)  # by task below the group, where they differ
    data: TaskData | None = None  # what was asked; None for results that lm-eval wrote


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

    def look(self, confidence: float) -> Look:
        """The look that has been reached, where all looks together have ``confidence``.

        Raises:
            InvalidInput: when no look was planned after so many documents.
        """
        return look_at(self.documents, self.schedule, confidence, f"task {self.guard.task}")

    def interval(self, confidence: float) -> Difference:
        """Interval of the mean difference, one-sided each way."""
        if not self.binary:
            plain = graded_difference(self.differences, confidence)
        else:
            lost, won = sum(d > 0 for d in self.differences), sum(d < 0 for d in self.differences)
            plain = binary_difference(lost, won, len(self.differences), confidence)
        if self.clusters is None:
            return plain
        return clustered_difference(self.differences, self.clusters, plain, confidence)


def measure_guard(
    guard: Guard,
    metric: str,
    paired: Paired,
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
    """Evidence on one guard from paired scores in [0, 1].

    Args:
        reference: The model that was chosen; absent: as the guard says.
        documents: Of the task, evaluated so far; absent: those that are paired.
        schedule: Documents after each planned look; empty: this look is the only one.
        candidates: Parents of which the reference is the best.
        selection_bias: What that adds to the drop, at most; in [0, 1].
        leaf_metrics: By task below a group, where they are judged by different ones.
        data: What was asked, where it is known.

    Raises:
        InvalidInput: when there are too few documents to say anything, not all that were evaluated have a score, or
            they are not known to be in clusters.
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
    return GuardEvidence(
        guard=guard,
        metric=metric,
        reference=reference or guard.guarded_by,
        reference_score=sum(paired.reference) / n,
        merge_score=sum(paired.merge) / n,
        differences=tuple(sign * (ours - theirs) for ours, theirs in zip(paired.reference, paired.merge, strict=True)),
        binary=set(paired.reference) | set(paired.merge) <= {0.0, 1.0},
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
    if drop > (max_drop if last_look else margin) and low > 0:
        return "fail"
    if drop <= max_drop and high <= margin:
        return "pass"
    return "inconclusive"


def judge_guard(guard: Guard, metric: str, paired: Paired, higher_is_better: bool, confidence: float) -> GuardVerdict:
    """The verdict of a guard that is the only one, on paired scores in [0, 1] that are all there will be.

    Raises:
        InvalidInput: as ``measure_guard``.
    """
    return judge_guards([measure_guard(guard, metric, paired, higher_is_better)], confidence)[0]


def judge_guards(measured: Sequence[GuardEvidence], confidence: float) -> tuple[GuardVerdict, ...]:
    """The verdicts of all guards of a merge, each at the look that its task has reached.

    Args:
        confidence: One-sided, of each passing guard over all of its looks; and that no alarm at all is false.

    Raises:
        InvalidInput: when a task has been evaluated to where no look was planned.
    """
    alarms = alarm_confidences(measured, confidence)
    asked = sum(one.candidates for one in measured)
    return tuple(_judged(one, confidence, alarm, asked) for one, alarm in zip(measured, alarms, strict=True))


def alarm_confidences(measured: Sequence[GuardEvidence], confidence: float) -> list[float]:
    """At which confidence, over all its looks, each guard is asked whether there is a drop at all.

    Holm's step-down in the form of Bretz et al. 2009 (Stat. Med. 28:586): the allowed error is shared by the guards
    that have not yet shown a drop, so each one that has leaves its share to the others. Each look spends the share of
    its guard as ``tasks.gate.sequential`` says (Maurer & Bretz 2013, Stat. Biopharm. Res. 5:311).
    """
    confidences = [confidence] * len(measured)
    waiting = list(range(len(measured)))
    while waiting:
        for i in waiting:
            questions = len(waiting) * measured[i].candidates
            confidences[i] = confidence if questions == 1 else 1 - (1 - confidence) / questions
        shown = [i for i in waiting if _low(measured[i], confidences[i]) > 0]
        waiting = [i for i in waiting if i not in shown]
        if not shown:
            break
    return confidences


def _low(one: GuardEvidence, confidence: float) -> float:
    return one.interval(one.look(confidence).confidence).low


def _judged(one: GuardEvidence, confidence: float, alarm: float, asked: int) -> GuardVerdict:
    guard, n = one.guard, len(one.differences)
    look, alarm_look = one.look(confidence), one.look(alarm)
    estimate = one.interval(look.confidence)
    drop, low, high = (100 * value for value in (estimate.mean, estimate.low, estimate.high))
    last_look = look.number == look.of
    outcome = decide_guard(drop, 100 * _low(one, alarm), high, guard.max_drop, guard.upper_limit, last_look=last_look)
    needed = None
    if outcome == "inconclusive":
        needed = _needed(one, estimate, alarm if drop > guard.max_drop else confidence)
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
        documents_asked=one.documents,
        leaf_metrics=dict(one.leaf_metrics),
        data=one.data,
    )
    return verdict.model_copy(update={"reason": _sentence(verdict, asked)})


def _needed(one: GuardEvidence, estimate: Difference, confidence: float) -> int | None:
    """Documents that would decide with power 0.8 if the drop is as seen: those of a planned look, or more than all."""
    drop, threshold, margin = estimate.mean, one.guard.max_drop / 100, one.guard.upper_limit / 100
    # Above the threshold it takes showing that there is a drop at all; below it, that it is within the margin.
    distance = drop if drop > threshold else margin - drop
    if distance <= 0:
        return None
    for look in plan_looks(one.schedule, confidence):
        can_decide = look.number == look.of or not threshold < drop <= margin
        enough = documents_needed(estimate.variance, distance, look.confidence) <= look.documents
        if look.documents > one.documents and can_decide and enough:
            return look.documents
    return max(one.schedule[-1] + 1, documents_needed(estimate.variance, distance, confidence))


def _clusters(guard: Guard, paired: Paired) -> tuple[str, ...] | None:
    if guard.cluster_by is None:
        return None
    clusters = tuple(task for task, _ in paired.documents) if guard.cluster_by == "task" else paired.clusters
    where = f"evaluate.tasks: {guard.task}: cluster_by"
    if not clusters or "" in clusters:
        raise InvalidInput(
            where,
            found=f"{guard.cluster_by!r}, which is not known of every document",
            expected="'task', or a field that every document of the task has",
        )
    if len(set(clusters)) < 2:
        raise InvalidInput(
            where,
            found=f"all documents in one cluster ({clusters[0]})",
            expected="2 or more, better dozens",
            remedy="leave cluster_by out where documents do not belong together",
        )
    return clusters


def _sentence(verdict: GuardVerdict, asked: int) -> str:
    """What was found, in the words of a person: ``gsm8k: 4.1 points below math [2.3, 5.9], limit 3.0``."""
    drop, low, high, limit = verdict.drop, verdict.low, verdict.high, verdict.max_drop
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
    if verdict.outcome != "inconclusive":
        return f"{sentence}, after {seen} documents" if verdict.documents_left else sentence
    sentence += f": undecided after {seen} documents"
    if verdict.low > 0 and drop > (verdict.margin if verdict.documents_left else limit):
        sentence += f", where one of {asked} comparisons may be off by chance"
    return sentence + (f"; about {verdict.documents_needed:,} would decide it" if verdict.documents_needed else "")

"""Measure a regression guard on its task, before any decision, and define its verdict. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from mergegate.merge_core.errors import InvalidInput
from mergegate.tasks.evaluation import DocumentScore, PairedScores, TaskData
from mergegate.tasks.gate.clusters import check_clusters, clustered_difference
from mergegate.tasks.gate.graded_scores import graded_difference
from mergegate.tasks.gate.repeated_documents import find_units, interval_over_units, join_clusters
from mergegate.tasks.gate.sequential import InterimLook, plan_looks
from mergegate.tasks.gate.settings import Guard
from mergegate.tasks.gate.statistics import Difference, binary_difference
from mergegate.tasks.stage import Outcome


class GateFinding(BaseModel):
    """Reason, apart from the interval of the drop, why a guard or a whole merge does not pass."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: str  # Name of the check, such as 'reference' or 'cut answers'.
    outcome: Outcome  # A ``pass`` is a note that does not affect the verdict.
    reason: str  # Sentence with the task, the numbers and the limit.
    chance_left: float | None = None  # Chance that the remaining documents settle it; None if unknown.


class CutAnswers(BaseModel):
    """Effect of cut-off answers on a drop: its range if they are counted for the merge, or against it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    lowest_drop: float  # Points, with the cut-off answers of the merge right and those of the reference wrong.
    highest_drop: float  # Points, with the cut-off answers of the merge wrong and those of the reference right.
    decide: bool  # Whether the outcome depends on how they are counted.

    def describe(self) -> str:
        """Return a sentence, without a period at the end."""
        return (
            "Depending on how they are counted, the drop is between "
            f"{self.lowest_drop + 0.0:.1f} and {self.highest_drop + 0.0:.1f} points"
        )


class AnswerLengths(BaseModel):
    """How the generated answers of one model ended, over the documents of a guard."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    cut_off: int  # Documents with an answer that was cut off and might have ended with a larger budget.
    endless: int  # Documents with an answer that never ends (see ``DocumentScore.never_ends``).
    regenerated: int  # Documents that were answered again with a larger budget.
    largest_budget: int | None  # Largest budget of these answers; None: there are none.
    mean_tokens: float | None  # Mean number of tokens per document; None: unknown.


class GuardAnswers(BaseModel):
    """Generated answers of both models of a guard."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    reference: AnswerLengths
    merge: AnswerLengths
    budgets: tuple[int, ...]  # Token budgets that cut off an answer, ascending.
    extensible: int  # Number of cut-off answers that may be generated again with a larger budget.
    # Mean tokens of the merge divided by those of the reference, on documents that both answer completely.
    length_ratio: float | None = None
    length_ratio_low: float | None = None  # Its one-sided lower bound.


class GuardVerdict(BaseModel):
    """Regression guard with its outcome: the merge against its reference on one task.

    Differences are in points (0 to 100) and positive if the merge is worse.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    task: str
    metric: str  # For a group with several metrics, each once: 'acc,none + exact_match,none'.
    reference: str  # Name of the reference model.
    reference_score: float  # In [0, 1].
    merge_score: float
    n: int  # Number of paired documents.
    lost: int  # Documents that the reference gets right and the merge wrong (graded: the merge scores lower).
    won: int  # Documents that the merge gets right and the reference wrong.
    drop: float  # Points.
    low: float  # Bounds of the drop in points; each holds over all looks with the one-sided ``confidence``.
    high: float
    confidence: float  # For example 0.95.
    max_drop: float  # Points.
    margin: float  # Largest upper bound that passes, in points.
    outcome: Outcome
    reason: str  # Sentence with task, drop, interval and threshold.
    documents_needed: int | None = None  # Documents that would decide if the true drop is as observed; None if unknown.
    detectable_drop: float | None = None  # Smallest true drop that these documents show with power 0.8, in points.
    look: InterimLook | None = None  # Look at which the guard was judged.
    documents_left: int = 0  # Documents that further looks can still add.
    alarm_confidence: float | None = None  # Confidence of the test for failure, corrected for the number of guards.
    candidates: int = 1  # Number of parents among which the reference is the best.
    selection_bias: float = 0.0  # Largest part of the drop, in points, that comes from choosing the best parent.
    clusters: int | None = None  # Number of independent groups of documents; None if each document is independent.
    documents_asked: int | None = None  # Number of evaluated documents. All of them have a score.
    leaf_metrics: dict[str, str] = Field(default_factory=dict)  # Metric by task below the group, where they differ.
    data: TaskData | None = None  # Evaluated data; None for result files of lm-eval itself.
    chance_left: float | None = None  # Chance that the remaining documents decide; None if nothing is left to decide.
    weight: float = 1.0  # Weight of the task in the mean over all tasks.
    limit: float | None = None  # Largest drop of this task in a suite, in points; None with ``rule: each``.
    findings: tuple[GateFinding, ...] = ()  # Results of the checks in ``tasks.gate.findings``.
    advisory: bool = False  # Whether this verdict is only shown, and does not count in the verdict on the merge.
    answers: GuardAnswers | None = None  # None: no answer was generated, or their ends are unknown.
    cut_answers: CutAnswers | None = None  # None: no answer was cut off, or its end is certain.
    sample_start: int = 0  # Position in the task's order of documents at which the sample starts.

    @property
    def word(self) -> str:
        """Verdict in a word: ``pass``, ``fail`` or ``inconclusive``; ``advisory: fail`` if the guard is advisory."""
        return f"advisory: {self.outcome}" if self.advisory else self.outcome


NEAR_CEILING = 0.1  # Share of wrong answers of the reference below which a guard limits the ratio of error rates.

Points = float | NDArray[np.float64]


@dataclass(frozen=True)
class MetricDrop:
    """Differences under a metric that the task reports but that does not judge the guard."""

    metric: str
    differences: tuple[float, ...]  # Of each document that has the metric, in scoring order, in [-1, 1].
    units: tuple[str | int, ...] | None = None  # Independent unit of each difference; None: the document itself.


@dataclass(frozen=True)
class GuardEvidence:
    """Measurements for one guard, before any decision. Scores are in [0, 1]."""

    guard: Guard
    metric: str
    reference: str
    reference_score: float
    merge_score: float
    differences: tuple[float, ...]  # Difference of each document, in [-1, 1]; positive if the merge is worse.
    binary: bool
    documents: int  # Number of evaluated documents of the task.
    schedule: tuple[int, ...]  # Number of documents after each planned look.
    clusters: tuple[str, ...] | None = None  # Cluster of each difference.
    candidates: int = 1
    selection_bias: float = 0.0  # In [0, 1].
    leaf_metrics: Mapping[str, str] = field(default_factory=dict)  # Metric by task below a group, where they differ.
    data: TaskData | None = None  # Evaluated data; None for result files of lm-eval itself.
    # Scores of the reference and the merge for each document, with answers and their ends. Empty if only the outcomes
    # are known.
    rows: tuple[tuple[DocumentScore, DocumentScore], ...] = ()
    leaves: tuple[str, ...] = ()  # Task of each difference below a group; empty if the task is not a group.
    higher_is_better: bool = True  # Direction of the metric.
    other_metrics: tuple[MetricDrop, ...] = ()
    unusable_metrics: tuple[str, ...] = ()  # Other metrics with scores outside [0, 1], which raise no alarm.

    sample_start: int = 0  # Position in the task's order of documents at which the sample starts.
    units: tuple[int, ...] | None = None  # Independent unit of each document; None if no document repeats another.
    answer_limit: int | None = None  # ``GateRule.max_answer_tokens``.
    max_length_ratio: float = 2.0  # ``GateRule.max_length_ratio``.

    @property
    def limits_errors(self) -> bool:
        """Whether the ratio of error rates is limited.

        Answers are right or wrong, the reference's are mostly right, and ``max_drop`` does not allow as many errors.
        """
        errors = 1 - self.reference_score if self.higher_is_better else self.reference_score
        is_near_ceiling = errors < NEAR_CEILING - 1e-9 and self.guard.max_drop < 100 * NEAR_CEILING
        return self.binary and self.guard.max_error_ratio is not None and is_near_ceiling

    def counting_cut_answers(self, *, for_merge: bool) -> GuardEvidence:
        """Return the evidence with all cut-off answers counted for the merge, or against it.

        For the merge means that its cut-off answers are right and those of the reference are wrong. A complete answer
        lies between both cases. An answer that never ends counts as measured. The result is this object if all
        differences stay the same.
        """
        low, high = self.guard.score_range
        rows, differences, changed = list(self.rows), list(self.differences), False
        for position, pair in enumerate(self.rows):
            counted = tuple(
                row._replace(outcome=high if row.higher_is_better == is_right else low)
                if row.is_open(self.answer_limit)
                else row
                for row, is_right in zip(pair, (not for_merge, for_merge), strict=True)
            )
            if counted != pair:
                reference, merge = counted
                loss = (reference.outcome - merge.outcome) / (high - low)
                differences[position] = min(1.0, max(-1.0, loss if merge.higher_is_better else -loss))
                rows[position], changed = (reference, merge), True
        if not changed:
            return self
        scores = [
            min(1.0, max(0.0, (sum(pair[side].outcome for pair in rows) / len(rows) - low) / (high - low)))
            for side in (0, 1)
        ]
        return replace(
            self,
            differences=tuple(differences),
            rows=tuple(rows),
            reference_score=scores[0],
            merge_score=scores[1],
        )

    def look(self, confidence: float) -> InterimLook:
        """Return the look that has been reached. All looks together have ``confidence``.

        Raises:
            InvalidInput: No look is planned at the number of evaluated documents.
        """
        for look in plan_looks(self.schedule, confidence):
            if look.documents == self.documents:
                return look
        # Looks at unplanned moments would invalidate the confidence.
        raise InvalidInput(
            f"task {self.guard.task}",
            found=f"{self.documents:,} evaluated documents",
            expected=f"the number of documents of a planned look: {', '.join(f'{n:,}' for n in self.schedule)}",
            remedy="evaluate up to the next look",
        )

    def interval(self, confidence: float, level: float | None = None) -> Difference:
        """Return the mean difference with its one-sided bounds at the current look.

        Args:
            confidence: Confidence over all looks together, which bounds of graded scores have at every look.
            level: Confidence of the current look, for bounds of binary scores and of clusters. Default: that of the
                look in the schedule of this task. A suite passes that of its own look.
        """
        level = self.look(confidence).confidence if level is None else level
        if self.units is not None:
            at_look = level if self.binary else None
            plain = interval_over_units(self.differences, self.units, self.schedule, confidence, at_look)
        elif not self.binary:
            plain = graded_difference(self.differences, confidence, self.schedule)
        else:
            lost, won = sum(d > 0 for d in self.differences), sum(d < 0 for d in self.differences)
            plain = binary_difference(lost, won, len(self.differences), level)
        if self.clusters is None:
            return plain
        return clustered_difference(self.differences, self.clusters, plain, level)


class ReferenceChoice(NamedTuple):
    """Model that a guard compares with."""

    name: str
    candidates: int = 1  # Number of parents among which it was chosen as the best.
    selection_bias: float = 0.0  # Largest amount that this choice adds to the drop, in [0, 1].


def measure_guard(
    guard: Guard,
    metric: str,
    paired_scores: PairedScores,
    higher_is_better: bool,
    *,
    choice: ReferenceChoice | None = None,
    schedule: Sequence[int] = (),
) -> GuardEvidence:
    """Return the evidence on one guard from the paired scores of all documents evaluated so far, in scoring order.

    ``choice`` is the reference model. Default: ``guard.guarded_by``. ``schedule`` holds the number of documents after
    each planned look. Default: a single look at these documents.

    Raises:
        InvalidInput: There are too few documents or clusters, a document's cluster is unknown, or a score is outside
            ``guard.score_range``.
    """
    choice = choice or ReferenceChoice(guard.guarded_by)
    sign = 1.0 if higher_is_better else -1.0
    n = len(paired_scores.documents)
    if n < 2:
        raise InvalidInput(f"task {guard.task}", found=f"{n} document", expected="2 or more, preferably hundreds")
    reference = _rescaled(guard, metric, paired_scores, paired_scores.reference, choice.name)
    merge = _rescaled(guard, metric, paired_scores, paired_scores.merge, "the merge")
    units = find_units([row for row, _ in paired_scores.rows])
    clusters = None
    if guard.clustered_by is not None:
        clusters = (
            tuple(task for task, _ in paired_scores.documents)
            if guard.clustered_by == "task"
            else paired_scores.clusters
        )
        clusters = join_clusters(clusters, units) if units and clusters else clusters
        check_clusters(clusters, guard.clustered_by, guard.task)
    leaves = tuple(task for task, _ in paired_scores.documents)
    return GuardEvidence(
        guard=guard,
        metric=metric,
        reference=choice.name,
        reference_score=sum(reference) / n,
        merge_score=sum(merge) / n,
        differences=tuple(sign * (left - right) for left, right in zip(reference, merge, strict=True)),
        binary=set(reference) | set(merge) <= {0.0, 1.0},
        documents=n,
        schedule=tuple(schedule) or (n,),
        clusters=clusters,
        candidates=choice.candidates,
        selection_bias=choice.selection_bias,
        rows=paired_scores.rows,
        leaves=leaves if len(set(leaves)) > 1 else (),
        higher_is_better=higher_is_better,
        units=units,
    )


def _rescaled(
    guard: Guard, metric: str, paired_scores: PairedScores, scores: Sequence[float], model: str
) -> tuple[float, ...]:
    """Return the scores of one model on a scale from 0 to 1. A point is a hundredth of it."""
    low, high = guard.score_range
    rounding = 1e-9 * (high - low)  # In floating point, 0.1 + 0.2 is more than 0.3.
    for (task, doc_id), score in zip(paired_scores.documents, scores, strict=True):
        if not low - rounding <= score <= high + rounding:
            raise InvalidInput(
                f"{guard.task}: {metric} of {model}",
                found=f"{score:g} for document {doc_id} of {task}",
                expected=f"a number from {low:g} to {high:g}",
                remedy="set the lowest and highest possible score in the guard's score_range"
                if math.isfinite(score)
                else "inspect the model's answer to this document: the merge is probably broken",
            )
    return tuple(min(1.0, max(0.0, (score - low) / (high - low))) for score in scores)

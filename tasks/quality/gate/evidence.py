"""Measure the guards of a merge on the stored scores of all models, before any decision."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from mergegate.merge_core.errors import InvalidInput
from mergegate.tasks.base.store import Artifact
from mergegate.tasks.quality.evaluation import (
    SCORES_FILE,
    DocumentScore,
    PairedScores,
    Scores,
    TaskData,
    TaskScores,
    by_task,
    choose_metrics,
    pair_documents,
    read_document_scores,
)
from mergegate.tasks.quality.gate.clusters import (
    check_clusters,
    clustered_difference,
    find_units,
    interval_over_units,
    join_clusters,
)
from mergegate.tasks.quality.gate.graded_scores import graded_difference
from mergegate.tasks.quality.gate.references import reference_models
from mergegate.tasks.quality.gate.sequential import InterimLook, plan_looks
from mergegate.tasks.quality.gate.settings import ANCHOR, CHAMPION, RELEASES, GateRule, Guard
from mergegate.tasks.quality.gate.statistics import Difference, binary_difference, selection_bias
from mergegate.tasks.quality.gate.verdicts import GateFinding

# Scores by metric, then by task below a group and document.
_ScoresByMetric = Mapping[str, Mapping[tuple[str, int], DocumentScore]]
_PairedRows = Sequence[tuple[DocumentScore, DocumentScore]]  # Scores of a reference and of the merge.

_LEAST_EQUAL = 100  # Smallest number of equal answers that make a merge a copy.


@dataclass(frozen=True)
class GatePlan:
    """Everything that determines how a merge is judged and is known before its evaluation.

    Args:
        rule: Rule of the profile.
        merged: Name of the merge among the models. Default: ``merge``.
        schedule: Number of documents after each planned look, by task. A task without a schedule has a single look.
        first_release: Whether there is no champion yet, so that guards against it are skipped. Default: false.
        parents: Parents that 'best parent' chooses from. Default: all models except the merge and releases.
        anchor_confidence: Confidence of comparisons with the anchor. Default: that of ``rule``.
        copy_of: Parent with the weights of the merge. Default: none.
        accepted_copies: Names of the parents that the merge may copy.
        untested: Sentence about what no task tests (see ``describe_untested``). Empty if there is nothing.
    """

    rule: GateRule
    merged: str = "merge"
    schedule: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    first_release: bool = False
    parents: tuple[str, ...] | None = None
    anchor_confidence: float | None = None
    copy_of: str = ""
    accepted_copies: tuple[str, ...] = ()
    untested: Annotated[str, Field(exclude_if=lambda note: not note)] = ""

    def content_key(self) -> object:
        content = {item.name: getattr(self, item.name) for item in fields(self)}
        # Models that read only text keep the keys from before this field existed.
        return content if self.untested else {name: value for name, value in content.items() if name != "untested"}

    @property
    def name(self) -> str:
        """Name of the quantized variant that is judged against its merge. Empty for any other model."""
        return self.merged if self.parents == ("merge",) else ""

    def guards_to_judge(self, guards: Sequence[Guard]) -> tuple[Guard, ...]:
        """Return the guards, without those against a champion that does not exist yet."""
        return tuple(guard for guard in guards if not (self.first_release and guard.guarded_by == CHAMPION))

    def is_suite(self, guards: Sequence[Guard]) -> bool:
        """Return whether the mean over all tasks is judged. It is not with a single task that counts."""
        return self.rule.rule == "suite" and len({guard.task for guard in guards if not guard.advisory}) > 1

    def comparisons(self, guards: Sequence[Guard]) -> Iterator[tuple[list[Guard], float]]:
        """Yield the guards that share an allowed error, with its confidence: those against the anchor come last."""
        against_anchor = [guard for guard in guards if guard.guarded_by == ANCHOR]
        yield [guard for guard in guards if guard.guarded_by != ANCHOR], self.rule.confidence
        yield against_anchor, self.anchor_confidence or self.rule.confidence


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
        """Return the look that has been reached. All looks together have ``confidence``."""
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


@dataclass(frozen=True)
class ComparedScores:
    """Scores of the merge and of its possible references, by model and task.

    ``models`` are the names of all models with scores, in order. The merge is ``plan.merged``.
    """

    plan: GatePlan
    models: tuple[str, ...]
    by_task: Mapping[tuple[str, str], TaskScores]

    @classmethod
    def of_parts(cls, scores: Mapping[str, Sequence[Artifact[Scores]]], plan: GatePlan) -> ComparedScores:
        """Return the scores whose parts, one or more for each task, are given by model."""
        joined = {
            (model, task): task_scores
            for model, parts in scores.items()
            for task, task_scores in by_task(model, parts).items()
        }
        return cls(plan, tuple(scores), joined)

    def is_measured(self, task: str) -> bool:
        return (self.plan.merged, task) in self.by_task

    def measure(self, guard: Guard) -> GuardEvidence:
        """Return the evidence on a guard, with the best of its possible references."""
        plan = self.plan
        location = f"{guard.task}: {plan.merged} against {guard.guarded_by}"
        names = reference_models(guard, self.models, plan.merged, plan.parents) or (guard.guarded_by,)
        for name in (*names, plan.merged):
            if (name, guard.task) not in self.by_task:
                expected = "both models evaluated on this task"
                raise InvalidInput(location, found=f"no scores for {name}", expected=expected)
        references = {name: self.by_task[name, guard.task] for name in names}
        merge = self.by_task[plan.merged, guard.task]
        for reference in references.values():
            _check_comparable(reference, merge, location)
        metrics = next(iter(references.values())).metrics(guard.metric)
        merge_scores = merge.judge(metrics)
        paired = {
            name: pair_documents(reference.judge(metrics), merge_scores, metrics.label, location)
            for name, reference in references.items()
        }
        # The parent with the best mean; ties go to the first. Its cut-off answers count as right, because a parent must
        # not be overlooked for its short budget.
        sign = 1.0 if metrics.higher_is_better else -1.0
        right = guard.score_range[metrics.higher_is_better]

        def best_mean(name: str) -> float:
            rows = [reference for reference, _ in paired[name].rows]
            scores = [right if row.is_open(plan.rule.max_answer_tokens) else row.outcome for row in rows]
            return sign * math.fsum(scores) / len(scores)

        best = max(paired, key=best_mean)
        if (scored := len(paired[best].documents)) != merge.requested_documents:
            raise InvalidInput(
                f"task {guard.task}",
                found=f"{scored:,} documents with a score for {metrics.label}",
                expected=f"scores for all {merge.requested_documents:,} evaluated documents",
                remedy="choose a metric that every document has",
            )
        bias = selection_bias([pair.reference for pair in paired.values()])
        evidence = replace(
            measure_guard(
                guard,
                metrics.label,
                paired[best],
                metrics.higher_is_better,
                choice=ReferenceChoice(best, len(paired), bias),
                schedule=plan.schedule.get(guard.task, ()),
            ),
            leaf_metrics=dict(metrics.by_leaf_if_different),
            data=merge.data,
            answer_limit=plan.rule.max_answer_tokens,
            max_length_ratio=plan.rule.max_length_ratio,
            sample_start=merge.sample_start,
        )
        return _with_other_metrics(
            evidence, metrics.other_scores(references[best].rows), metrics.other_scores(merge.rows)
        )

    def find_copies(self, guards: Sequence[Guard]) -> Iterator[GateFinding]:
        """Yield a finding for each parent that the merge copies, by its weights or by its answers to all guards."""
        metrics = {guard.task: guard.metric for guard in guards}
        answers: dict[str, _PairedRows] = {}
        for name in self.models:
            if name in (self.plan.merged, *RELEASES) or not all((name, task) in self.by_task for task in metrics):
                continue
            pairs: list[tuple[DocumentScore, DocumentScore]] = []
            for task, metric in metrics.items():
                judged = self.by_task[self.plan.merged, task].metrics(metric)
                of_parent, of_merge = (
                    {(row.task, row.doc_id): row for row in judged.select(self.by_task[model, task].rows)}
                    for model in (name, self.plan.merged)
                )
                pairs += [(of_parent[key], row) for key, row in of_merge.items() if key in of_parent]
            answers[name] = pairs
        yield from find_copies(self.plan.copy_of, answers, self.plan.accepted_copies)


def find_copies(
    same_weights: str, answers: Mapping[str, _PairedRows], accepted_parents: Collection[str]
) -> Iterator[GateFinding]:
    """Yield a finding for each parent that the merge copies: the weights are equal, or all answers are.

    Answers to 100 documents or more are compared. Of equal merges that change 5 % of the answers, 0.6 % have no
    different answer on 100 documents, and none on 500.

    Args:
        same_weights: Name of a parent with the same weights, or an empty string.
        answers: Scores of the parent and the merge for every document of all tasks, by parent.
        accepted_parents: Names of the parents that the merge may copy. They are only noted.
    """
    facts = {}
    for name, rows in answers.items():
        are_known = any(row.answer for _, row in rows)
        are_equal = all((row.outcome, row.answer) == (other.outcome, other.answer) for row, other in rows)
        if len(rows) >= _LEAST_EQUAL and are_known and are_equal:
            facts[name] = f"the merge behaves like a copy of {name}: all {len(rows):,} answers are equal"
    if same_weights:
        facts[same_weights] = f"the merge is a copy of {same_weights}: all weights are equal"
    for name, fact in facts.items():
        advice = f"publish {name} itself, or set checks.copies.accepted: [{name}]"
        remedy = f". Raise weight or density in the recipe if its changes cancel out, {advice}"
        is_accepted = name in accepted_parents
        yield GateFinding(
            kind="copy", outcome="pass" if is_accepted else "fail", reason=fact + ("" if is_accepted else remedy)
        )


def _check_comparable(reference: TaskScores, merge: TaskScores, location: str) -> None:
    if reference.lm_eval_version != merge.lm_eval_version:
        versions = f"{reference.lm_eval_version} and {merge.lm_eval_version}"
        raise InvalidInput(location, found=f"scores of lm-eval {versions}", expected="one version on both sides")
    if reference.data and merge.data and reference.data.digest != merge.data.digest:
        raise InvalidInput(
            location,
            found="scores on different data",
            expected="the same documents, examples and templates on both sides",
            remedy="evaluate both models again, because the dataset of the task has changed",
        )


def _with_other_metrics(evidence: GuardEvidence, reference: _ScoresByMetric, merge: _ScoresByMetric) -> GuardEvidence:
    """Return the evidence with the drops under the metrics that do not judge the guard.

    A metric that the two models have for different documents does not count. A cut-off answer counts for the merge, so
    that only complete answers can raise an alarm.
    """
    units = evidence.clusters or evidence.units
    position = {(row.task, row.doc_id): index for index, (_, row) in enumerate(evidence.rows)}

    def score(row: DocumentScore, *, is_merge: bool) -> float:
        best = float(row.higher_is_better == is_merge)
        return (1 if row.higher_is_better else -1) * (best if row.is_open(evidence.answer_limit) else row.outcome)

    drops, unusable = [], []
    for metric, ours in merge.items():
        theirs = reference.get(metric, {})
        if theirs.keys() != ours.keys() or not ours.keys() <= position.keys():
            continue
        if not all(0 <= row.outcome <= 1 for row in (*ours.values(), *theirs.values())):
            unusable.append(metric)
            continue
        documents = sorted(ours, key=position.__getitem__)
        differences = (
            score(theirs[document], is_merge=False) - score(ours[document], is_merge=True) for document in documents
        )
        own_units = tuple(units[position[document]] for document in documents) if units else None
        drops.append(MetricDrop(metric, tuple(differences), own_units))
    return replace(evidence, other_metrics=tuple(drops), unusable_metrics=tuple(unusable))


def stored_rows(guard: Guard, parts: Sequence[Artifact[Scores]]) -> tuple[DocumentScore, ...]:
    """Return the scores of one model by the guard's metric, for forecasts. Empty if the model has none.

    The stored ``parts`` of a task may overlap. An error of the metric is left to the gate, which reports it.
    """
    stored = {
        (row.task, row.doc_id, row.metric): row
        for part in parts
        for row in read_document_scores(part.directory / SCORES_FILE)
    }
    try:
        return choose_metrics(stored.values(), guard.metric, guard.task).select(stored.values())
    except InvalidInput:
        return ()

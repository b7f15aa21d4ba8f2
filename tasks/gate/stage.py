"""Decide from scores and likelihoods whether a merge passes: the stage ``gate``.

The gate judges the perplexity drift (``tasks.gate.drift``), each guard of the profile (``tasks.gate.regression``) and,
with ``rule: suite``, their mean (``tasks.gate.suite``). All must pass.

The flow (``flows.attempt``) evaluates task after task up to the next interim look. If ``cannot_pass`` reports that a
task has already ruled out publication, the flow skips the remaining tasks. After the look it calls ``gate``. It then
generates the cut-off answers of ``tasks_with_short_answers`` again and calls ``gate`` for the same look, until that
list is empty. It then evaluates the tasks in ``undecided_tasks`` up to the next look, until that list is empty.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from mergegate.merge_core.architecture import ModelKind, TaskForm
from mergegate.merge_core.errors import InvalidInput
from mergegate.tasks.evaluation import DocumentScore, Scores, TaskScores, by_task, pair_documents
from mergegate.tasks.gate.copies import find_copies
from mergegate.tasks.gate.drift import DriftVerdict, ModelLikelihoods, judge_drift
from mergegate.tasks.gate.evidence import (
    GateFinding,
    GuardEvidence,
    GuardVerdict,
    MetricDrop,
    ReferenceChoice,
    measure_guard,
)
from mergegate.tasks.gate.references import check_guards, reference_models
from mergegate.tasks.gate.regression import judge_guards
from mergegate.tasks.gate.sensitivity import NO_POWER
from mergegate.tasks.gate.sentences import UNSAFE
from mergegate.tasks.gate.sequential import FUTILE
from mergegate.tasks.gate.settings import ANCHOR, CHAMPION, RELEASES, GateRule, Guard
from mergegate.tasks.gate.statistics import selection_bias
from mergegate.tasks.gate.suite import SuiteVerdict, TaskDrop, judge_suite, mean_drop
from mergegate.tasks.perplexity import DriftLimits, Likelihoods, read_documents
from mergegate.tasks.stage import Outcome, Section, StageValue, Verdict, severity, value_stage, worst_verdict
from mergegate.tasks.store import Artifact

# Scores by metric, then by task below a group and document.
_ScoresByMetric = Mapping[str, Mapping[tuple[str, int], DocumentScore]]

OnInconclusive = Literal["block", "warn", "pass"]

UNTESTED = "untested"  # Kind of the finding with the sentence of ``describe_untested``.


class SkippedGuard(BaseModel):
    """Guard whose task was not evaluated, because another guard had already failed."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    task: str
    reference: str  # The guard's ``guarded_by``.
    limit: float  # Limit of this task alone, in points.
    decided_by: str  # Task whose guard failed.
    documents: int  # Number of documents that might have been evaluated; 0 if unknown.

    @property
    def word(self) -> str:
        """Reason why there is no verdict: ``skipped: gsm8k had already failed``."""
        return f"skipped: {self.decided_by} had already failed"


class GateVerdict(StageValue):
    """Decision about a merge, with the verdicts that it is based on."""

    outcome: Outcome  # Most severe outcome of all verdicts.
    publishable: bool  # Whether ``outcome`` and ``on_inconclusive`` allow publication.
    guards: tuple[GuardVerdict, ...]
    drift: DriftVerdict | None
    overall_drop: float | None  # Mean over tasks, in points.
    overall_low: float | None
    overall_high: float | None
    on_inconclusive: OnInconclusive
    reasons: tuple[str, ...]  # Why the merge did not pass, most severe reason first.
    notes: tuple[str, ...] = ()  # Guards against a champion that does not exist yet, one sentence each.
    # Verdict on the mean over all tasks, if it is judged: first without the anchor, then against the anchor only.
    suites: tuple[SuiteVerdict, ...] = ()
    not_run: tuple[SkippedGuard, ...] = ()
    findings: tuple[GateFinding, ...] = ()  # Findings about the whole merge; those about a guard are in ``guards``.
    advisory: tuple[GuardVerdict, ...] = ()  # Advisory guards, which do not affect ``outcome`` or the other fields.

    @property
    def all_guards(self) -> tuple[GuardVerdict, ...]:
        """All guards with a verdict, the advisory ones last."""
        return (*self.guards, *self.advisory)

    @property
    def untested_note(self) -> str:
        """Sentence about what no task tested, such as how the merge reads pictures. Empty if there is nothing."""
        return next((finding.reason for finding in self.findings if finding.kind == UNTESTED), "")

    def summary(self) -> str:
        if not self.publishable:
            return self.reasons[0]
        if self.outcome != "pass":
            return f"{self.outcome}, but publishable: {self.reasons[0]}"
        if self.suites:
            return f"{self.suites[0].tasks} tasks passed"
        if self.guards:
            return "1 guard passed" if len(self.guards) == 1 else f"{len(self.guards)} guards passed"
        return "no drift" if self.drift else "; ".join(self.notes) or "nothing to judge"

    def refuses(self) -> bool:
        return not self.publishable

    def as_verdict(self) -> Verdict:
        """Return this decision in the common form of verdicts."""
        return Verdict(
            name="gate",
            outcome=self.outcome,
            publishable=self.publishable,
            reasons=self.reasons,
            evidence=self,
            section=Section(title="Gate", sentences=self.reasons or (self.summary(),)),
        )


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

    def confidence(self, *, is_anchor: bool) -> float:
        """Return the confidence of comparisons with the anchor, or with all other references."""
        return (self.anchor_confidence if is_anchor else None) or self.rule.confidence


def describe_untested(kind: ModelKind, forms: Iterable[TaskForm]) -> str:
    """Return a sentence if a model of this kind reads more than tasks of these forms test. Empty if they test it all.

    For example: ``only text was tested: no task tests how the merge reads pictures``.
    """
    if not kind.modalities:
        return ""  # without reading the definitions of the tasks
    tested = set(forms)
    if not (modalities := kind.untested_modalities(tested)):
        return ""
    sentence = f"no task tests how the merge reads {' and '.join(modalities)}"
    return f"only text was tested: {sentence}" if tested <= {"text"} else sentence


class GateInputs(NamedTuple):
    """Arguments of the stage :func:`gate`, which a release records so that its verdict can be recomputed."""

    guards: tuple[Guard, ...]
    scores: Mapping[str, Sequence[Artifact[Scores]]]
    likelihoods: Mapping[str, Artifact[Likelihoods]]
    limits: DriftLimits | None
    plan: GatePlan
    waiting: tuple[str, ...] = ()


@value_stage("gate", version=5, subject="plan")
def gate(
    guards: tuple[Guard, ...],
    scores: Mapping[str, Sequence[Artifact[Scores]]],
    likelihoods: Mapping[str, Artifact[Likelihoods]],
    limits: DriftLimits | None,
    plan: GatePlan,
    waiting: tuple[str, ...] = (),
) -> GateVerdict:
    """Judge a merge by its perplexity drift and, unless the perplexity shows that it is broken, by its guards.

    Args:
        guards: Guards with pinned tasks (see ``pin_tasks``).
        scores: Scores by model, including the merge. A task may have several artifacts, which are judged together. May
            be empty if the perplexity shows that the merge is broken, or if the merge copies a parent.
        likelihoods: Likelihoods by model, including the merge. May be empty if ``limits`` is None.
        limits: Limits of the perplexity drift. None: perplexity is not judged.
        plan: Rule of the gate, planned looks and name of the merge.
        waiting: Tasks that were not evaluated up to this look, because another task already rules out publication (see
            ``cannot_pass``). If there are any, the mean over all tasks is not judged.

    Raises:
        InvalidInput: The model, task or metric of a guard does not exist, or scores are not comparable.
    """
    rule, merged = plan.rule, plan.merged
    if plan.copy_of and plan.copy_of not in plan.accepted_copies:
        copies = tuple(find_copies(plan.copy_of, {}, plan.accepted_copies))
        return gate_verdict((), None, rule.on_inconclusive, findings=copies)
    drift = perplexity_drift(likelihoods, limits, rule.confidence, merged) if limits is not None else None
    if drift is not None and drift.broken:
        return gate_verdict((), drift, rule.on_inconclusive)
    check_guards(guards, set(scores) - {merged, CHAMPION, ANCHOR})
    scores_by_task = _scores_by_task(scores)
    judged = plan.guards_to_judge(guards)
    pending = [guard for guard in judged if guard.task in waiting and (merged, guard.task) not in scores_by_task]
    measured = [_measure(guard, scores, scores_by_task, plan) for guard in judged if guard not in pending]
    notes = tuple(f"{guard.task}: no release to compare with yet" for guard in guards if guard not in judged)
    is_suite = plan.is_suite(judged)
    suites: list[SuiteVerdict] = []
    verdicts: list[GuardVerdict] = []
    advisory: list[GuardVerdict] = []
    for is_anchor in (False, True):
        confidence = plan.confidence(is_anchor=is_anchor)
        compared = [evidence for evidence in measured if (evidence.guard.guarded_by == ANCHOR) == is_anchor]
        if group := [evidence for evidence in compared if not evidence.guard.advisory]:
            suites += [judge_suite(group, confidence)] if is_suite and not waiting else []
            pending_count = sum((guard.guarded_by == ANCHOR) == is_anchor and not guard.advisory for guard in pending)
            verdicts += judge_guards(group, confidence, as_suite=is_suite, pending=pending_count)
        for evidence in compared:  # Each by its own margin, as if it were the only guard.
            advisory += judge_guards([evidence], confidence) if evidence.guard.advisory else ()
    failed_task = next((verdict.task for verdict in verdicts if verdict.outcome == "fail"), "")
    if waiting and not failed_task:
        raise ValueError(f"{', '.join(waiting)} not evaluated although nothing is decided")
    not_run = tuple(
        SkippedGuard(
            task=guard.task,
            reference=guard.guarded_by,
            limit=guard.catastrophe if is_suite else guard.max_drop,
            decided_by=failed_task,
            documents=plan.schedule[guard.task][-1] if guard.task in plan.schedule else 0,
        )
        for guard in pending
    )
    answers = {} if pending else _answers_by_parent(judged, scores, scores_by_task, plan)
    findings = tuple(find_copies(plan.copy_of, answers, plan.accepted_copies))
    if plan.untested:
        findings += (GateFinding(kind=UNTESTED, outcome="pass", reason=plan.untested),)
    verdict = gate_verdict(verdicts, drift, rule.on_inconclusive, notes, suites, not_run, findings)
    return verdict.model_copy(update={"advisory": tuple(advisory)})


def cannot_pass(
    task: str, guards: Sequence[Guard], scores: Mapping[str, Sequence[Artifact[Scores]]], plan: GatePlan
) -> bool:
    """Return whether a guard on ``task`` fails regardless of the other guards, which rules out publication.

    ``scores`` holds the scores on this task, and possibly on others, by model. Each guard on the task is tested as one
    of all guards. In ``gate``, a guard that fails here fails too, so the decision does not depend on the order in which
    tasks are evaluated.
    """
    judged = [guard for guard in plan.guards_to_judge(guards) if not guard.advisory]
    scores_by_task = _scores_by_task(scores)
    for is_anchor in (False, True):
        group = [guard for guard in judged if (guard.guarded_by == ANCHOR) == is_anchor]
        measured = [_measure(guard, scores, scores_by_task, plan) for guard in group if guard.task == task]
        verdicts = judge_guards(
            measured,
            plan.confidence(is_anchor=is_anchor),
            as_suite=plan.is_suite(judged),
            pending=len(group) - len(measured),
        )
        if any(verdict.outcome == "fail" for verdict in verdicts):
            return True
    return False


def perplexity_drift(
    likelihoods: Mapping[str, Artifact[Likelihoods]],
    limits: DriftLimits,
    confidence: float,
    merged_models: str = "merge",
) -> DriftVerdict:
    """Return the drift verdict on stored likelihoods, for callers that need it before the costly tasks are run.

    Raises:
        InvalidInput: See ``judge_drift``.
    """
    models = {
        name: ModelLikelihoods(artifact.value, read_documents(artifact.directory))
        for name, artifact in likelihoods.items()
    }
    merge = models.pop(merged_models)
    return judge_drift(models, merge, limits, confidence)


def tasks_with_short_answers(verdict: GateVerdict) -> tuple[str, ...]:
    """Return the tasks whose cut-off answers must be generated again, because the verdict depends on them.

    The result is empty if a guard has failed, or if the limit of the profile is reached.
    """
    if verdict.outcome == "fail":
        return ()
    all_tasks = any(suite.cut_answers and suite.cut_answers.decide for suite in verdict.suites)
    return tuple(
        dict.fromkeys(
            guard.task
            for guard in verdict.guards
            if guard.answers
            and guard.answers.extensible
            and (all_tasks or (guard.cut_answers and guard.cut_answers.decide))
        )
    )


def undecided_tasks(verdict: GateVerdict) -> tuple[str, ...]:
    """Return the tasks whose remaining documents may still decide an inconclusive verdict.

    The result is empty if a guard has failed, or if the remaining documents are unlikely to decide. Tasks of a suite
    are evaluated together, so the result contains all tasks with documents left.
    """
    if verdict.outcome == "fail":
        return ()  # More documents cannot make this merge publishable.
    limits = [(guard.cut_answers, guard.max_drop, guard.limit or guard.max_drop) for guard in verdict.guards]
    limits += [(suite.cut_answers, suite.max_drop, suite.max_drop) for suite in verdict.suites]
    if any(cut and cut.decide and cut.lowest_drop <= low and cut.highest_drop > high for cut, low, high in limits):
        return ()  # More documents do not complete the answers that the verdict depends on.
    chances = [*(suite.chance_left for suite in verdict.suites), *(guard.chance_left for guard in verdict.guards)]
    chances += [finding.chance_left for guard in verdict.guards for finding in guard.findings]
    if any(chance is not None and chance < FUTILE for chance in chances):
        return ()  # The remaining documents of this run would not decide it.
    undecided = [guard for guard in verdict.guards if guard.outcome == "inconclusive"]
    is_weak = any(finding.kind == NO_POWER and finding.outcome == "inconclusive" for finding in verdict.findings)
    if is_weak or (undecided and verdict.suites) or any(suite.outcome == "inconclusive" for suite in verdict.suites):
        undecided = list(verdict.guards)
    return tuple(dict.fromkeys(guard.task for guard in undecided if guard.documents_left))


def gate_verdict(
    guards: Sequence[GuardVerdict],
    drift: DriftVerdict | None,
    on_inconclusive: OnInconclusive,
    notes: tuple[str, ...] = (),
    suites: Sequence[SuiteVerdict] = (),
    not_run: tuple[SkippedGuard, ...] = (),
    findings: tuple[GateFinding, ...] = (),
) -> GateVerdict:
    """Combine the verdicts on a merge into one decision: the most severe outcome and whether it allows publication."""
    findings = (*findings, *_find_missing_power(guards, suites))
    # A failed task tells more than the mean that it drags down, so the guards come before the suites.
    parts = [(guard.outcome, guard.reason) for guard in guards]
    for finding in (*(finding for guard in guards for finding in guard.findings), *findings):
        parts += [(finding.outcome, finding.reason)] if (finding.outcome, finding.reason) not in parts else []
    parts += [(suite.outcome, suite.reason) for suite in suites]
    if drift is not None:
        further = [(found.outcome, found.reason) for found in drift.findings if found.reason != drift.reason]
        parts = [(drift.outcome, drift.reason), *further, *parts]
    outcome = worst_verdict(part for part, _ in parts)
    bad = [(part, reason) for part, reason in parts if part != "pass"]
    bad.sort(key=lambda part: -severity(part[0]))  # Stable: drift first, then the order of the profile.
    drop: float | None = None
    low: float | None = None
    high: float | None = None
    if suites:
        drop, low, high = suites[0].drop, suites[0].low, suites[0].high
    elif guards:
        # Bounds of an early look have a higher confidence, which can only widen the interval.
        drop, low, high = mean_drop(
            [TaskDrop(guard.task, guard.weight, guard.drop, guard.low, guard.high) for guard in guards]
        )
    return GateVerdict(
        outcome=outcome,
        publishable=outcome == "pass" or (outcome == "inconclusive" and on_inconclusive != "block"),
        guards=tuple(guards),
        drift=drift,
        overall_drop=drop,
        overall_low=low,
        overall_high=high,
        on_inconclusive=on_inconclusive,
        reasons=tuple(reason for _, reason in bad),
        notes=notes,
        suites=tuple(suites),
        not_run=not_run,
        findings=findings,
    )


def _find_missing_power(guards: Sequence[GuardVerdict], suites: Sequence[SuiteVerdict]) -> tuple[GateFinding, ...]:
    """Return a finding if neither a guard nor the mean of a suite could detect a drop as large as its limit.

    A suite may pass although each task is weak, if its mean detects its margin.
    """
    weak = [finding.reason for guard in guards for finding in guard.findings if finding.kind == NO_POWER]
    is_weak = all(any(finding.kind == NO_POWER for finding in guard.findings) for guard in guards)
    if not guards or not is_weak or any(suite.detectable_drop <= suite.margin for suite in suites):
        return ()
    if {*(guard.outcome for guard in guards), *(suite.outcome for suite in suites)} != {"pass"}:
        return ()  # Their reasons already say what would decide.
    reason = f"{UNSAFE}: too few documents to detect the loss of a skill. {weak[0]}. More documents would decide"
    return (GateFinding(kind=NO_POWER, outcome="inconclusive", reason=reason),)


def _scores_by_task(scores: Mapping[str, Sequence[Artifact[Scores]]]) -> dict[tuple[str, str], TaskScores]:
    return {
        (model, task): task_scores
        for model, parts in scores.items()
        for task, task_scores in by_task(model, parts).items()
    }


def _answers_by_parent(
    guards: Sequence[Guard], models: Iterable[str], scores_by_task: Mapping[tuple[str, str], TaskScores], plan: GatePlan
) -> dict[str, list[tuple[DocumentScore, DocumentScore]]]:
    """Return the scores of parent and merge for all documents, by parent, for the parents with scores on every task."""
    settings = {guard.task: guard.metric for guard in guards}
    answers = {}
    for name in models:
        if name in (plan.merged, *RELEASES) or not all((name, task) in scores_by_task for task in settings):
            continue
        pairs: list[tuple[DocumentScore, DocumentScore]] = []
        for task, setting in settings.items():
            metrics = scores_by_task[plan.merged, task].metrics(setting)
            of_parent, of_merge = (
                {(row.task, row.doc_id): row for row in metrics.select(scores_by_task[model, task].rows)}
                for model in (name, plan.merged)
            )
            pairs += [(of_parent[key], row) for key, row in of_merge.items() if key in of_parent]
        answers[name] = pairs
    return answers


def _measure(
    guard: Guard, models: Iterable[str], scores_by_task: Mapping[tuple[str, str], TaskScores], plan: GatePlan
) -> GuardEvidence:
    location = f"{guard.task}: {plan.merged} against {guard.guarded_by}"
    names = reference_models(guard, models, plan.merged, plan.parents) or (guard.guarded_by,)
    for name in (*names, plan.merged):
        if (name, guard.task) not in scores_by_task:
            raise InvalidInput(location, found=f"no scores for {name}", expected="both models evaluated on this task")
    references = {name: scores_by_task[name, guard.task] for name in names}
    merge = scores_by_task[plan.merged, guard.task]
    for reference in references.values():
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
    metrics = next(iter(references.values())).metrics(guard.metric)
    merge_scores = merge.judge(metrics)
    paired = {
        name: pair_documents(reference.judge(metrics), merge_scores, metrics.label, location)
        for name, reference in references.items()
    }
    # The parent with the best mean; ties go to the first. Its cut-off answers count as right, because a parent must not
    # be overlooked for its short budget.
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
    evidence = measure_guard(
        guard,
        metrics.label,
        paired[best],
        metrics.higher_is_better,
        choice=ReferenceChoice(best, len(paired), bias),
        schedule=plan.schedule.get(guard.task, ()),
    )
    evidence = replace(
        evidence,
        leaf_metrics=dict(metrics.by_leaf_if_different),
        data=merge.data,
        answer_limit=plan.rule.max_answer_tokens,
        max_length_ratio=plan.rule.max_length_ratio,
        sample_start=merge.sample_start,
    )
    return _with_other_metrics(evidence, metrics.other_scores(references[best].rows), metrics.other_scores(merge.rows))


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
        drops.append(
            MetricDrop(
                metric=metric,
                differences=tuple(
                    score(theirs[document], is_merge=False) - score(ours[document], is_merge=True)
                    for document in documents
                ),
                units=tuple(units[position[document]] for document in documents) if units else None,
            )
        )
    return replace(evidence, other_metrics=tuple(drops), unusable_metrics=tuple(unusable))

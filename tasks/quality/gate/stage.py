"""Decide from scores and likelihoods whether a merge passes: the stage ``gate``.

The gate judges the perplexity drift (``gate.drift``), each guard of the profile (``gate.regression``) and,
with ``rule: suite``, their mean (``gate.suite``). All must pass.

The flow (``flows.attempt``) evaluates task after task up to the next interim look. If ``cannot_pass`` reports that a
task has already ruled out publication, the flow skips the remaining tasks. After the look it calls ``gate``. It then
generates the cut-off answers of ``tasks_with_short_answers`` again and calls ``gate`` for the same look, until that
list is empty. It then evaluates the tasks in ``undecided_tasks`` up to the next look, until that list is empty.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from mergegate.merge_core.architecture import ModelKind, TaskForm
from mergegate.tasks.base.stage import severity, value_stage, worst_verdict
from mergegate.tasks.base.store import Artifact
from mergegate.tasks.quality.evaluation import Scores
from mergegate.tasks.quality.gate.drift import perplexity_drift
from mergegate.tasks.quality.gate.evidence import ComparedScores, GatePlan, find_copies
from mergegate.tasks.quality.gate.references import check_guards
from mergegate.tasks.quality.gate.regression import judge_guards
from mergegate.tasks.quality.gate.sensitivity import NO_POWER
from mergegate.tasks.quality.gate.sequential import FUTILE
from mergegate.tasks.quality.gate.settings import ANCHOR, CHAMPION, Guard
from mergegate.tasks.quality.gate.suite import TaskDrop, judge_suite, mean_drop
from mergegate.tasks.quality.gate.verdicts import (
    UNSAFE,
    UNTESTED,
    DriftVerdict,
    GateFinding,
    GateVerdict,
    GuardVerdict,
    OnInconclusive,
    SkippedGuard,
    SuiteVerdict,
)
from mergegate.tasks.quality.perplexity import DriftLimits, Likelihoods


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
    rule = plan.rule
    if plan.copy_of and plan.copy_of not in plan.accepted_copies:
        copies = tuple(find_copies(plan.copy_of, {}, plan.accepted_copies))
        return gate_verdict((), None, rule.on_inconclusive, findings=copies)
    drift = perplexity_drift(likelihoods, limits, rule.confidence, plan.merged) if limits is not None else None
    if drift is not None and drift.broken:
        return gate_verdict((), drift, rule.on_inconclusive)
    check_guards(guards, set(scores) - {plan.merged, CHAMPION, ANCHOR})
    stored = ComparedScores.of_parts(scores, plan)
    judged = plan.guards_to_judge(guards)
    pending = [guard for guard in judged if guard.task in waiting and not stored.is_measured(guard.task)]
    measured = [stored.measure(guard) for guard in judged if guard not in pending]
    is_suite = plan.is_suite(judged)
    suites: list[SuiteVerdict] = []
    verdicts: list[GuardVerdict] = []
    advisory: list[GuardVerdict] = []
    for compared, confidence in plan.comparisons(judged):
        counted = [guard for guard in compared if not guard.advisory]
        if group := [evidence for evidence in measured if evidence.guard in counted]:
            suites += [judge_suite(group, confidence)] if is_suite and not waiting else []
            verdicts += judge_guards(group, confidence, as_suite=is_suite, pending=len(counted) - len(group))
        for evidence in measured:  # Each by its own margin, as if it were the only guard.
            if evidence.guard.advisory and evidence.guard in compared:
                advisory += judge_guards([evidence], confidence)
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
    findings = tuple(stored.find_copies(() if pending else judged))
    if plan.untested:
        findings += (GateFinding(kind=UNTESTED, outcome="pass", reason=plan.untested),)
    notes = tuple(f"{guard.task}: no release to compare with yet" for guard in guards if guard not in judged)
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
    stored = ComparedScores.of_parts(scores, plan)
    for compared, confidence in plan.comparisons(judged):
        group = [stored.measure(guard) for guard in compared if guard.task == task]
        verdicts = judge_guards(group, confidence, as_suite=plan.is_suite(judged), pending=len(compared) - len(group))
        if any(verdict.outcome == "fail" for verdict in verdicts):
            return True
    return False


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

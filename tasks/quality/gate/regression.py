"""Decide the verdict of a regression guard from its evidence. Pure functions.

With ``rule: each``, the outcome depends on the drop, on T (``max_drop``) and on M (``margin``), all in points::

    fail          drop > T and the interval excludes zero        over the threshold, and not noise
    pass          drop <= T and its upper bound <= M             shown to be at most M worse
    inconclusive  anything else                                  more documents would decide

With ``rule: suite``, the suite is judged as a whole (``gate.suite``), and L (``limit``) bounds each task::

    fail          lower bound > T                                shown to have lost more than allowed
    pass          upper bound <= L                               shown not to have fallen far
    inconclusive  anything else

The bounds have the confidence of the interim look at which the guard is judged (``gate.sequential``). Before the
last look, a guard with ``rule: each`` fails only if its drop exceeds the margin, because with more documents a drop
between threshold and margin may still pass or fail.

A merge passes only if every guard passes, so passing needs no correction for the number of guards. It fails if one
guard fails, and one of many guards shows a drop by chance. Failures are therefore corrected by Holm's step-down
procedure (1979, Scand. J. Stat. 6:65). A guard that compares with the best of K parents counts as K questions.

Each guard is decided as measured, and in the best and the worst case of its cut-off answers. If the outcomes differ,
it is inconclusive (``gate.cut_answers``). Further checks show whether the evidence can carry this verdict. Each
is a function ``(evidence, verdict) -> findings``, which can make the outcome more severe, never less.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from mergegate.tasks.base.stage import Outcome, severity
from mergegate.tasks.quality.gate.alarms import find_alarms
from mergegate.tasks.quality.gate.cut_answers import (
    answer_cases,
    check_cut_answers,
    check_lengths,
    compare_cases,
    summarize_answers,
)
from mergegate.tasks.quality.gate.evidence import GuardEvidence, Points
from mergegate.tasks.quality.gate.sensitivity import check_prompts, check_reference, note_detectable_drop
from mergegate.tasks.quality.gate.sequential import chance_to_decide, plan_looks
from mergegate.tasks.quality.gate.statistics import POWER, Difference, documents_needed, normal_quantile
from mergegate.tasks.quality.gate.verdicts import GateFinding, GuardVerdict, drop_sentence


def decide_guard(
    drop: float, low: float, high: float, max_drop: float, margin: float, *, last_look: bool = True
) -> Outcome:
    """Apply ``rule: each`` of the module docstring to a drop with its bounds. All values are in points."""
    # The drop exceeds the limit, and is not noise.
    if drop > (max_drop if last_look else margin) and low > 0:
        return "fail"
    return "pass" if is_within(drop, high, max_drop, margin) else "inconclusive"


def is_within(drop: Points, high: Points, max_drop: float, margin: float) -> Any:
    """Return whether a drop (or each of many) is at most ``max_drop`` and shown to be at most ``margin``."""
    return (drop <= max_drop) & (high <= margin)


def decide_task(low: float, high: float, max_drop: float, limit: float) -> Outcome:
    """Apply the rule for one task of a suite (see the module docstring) to its bounds. All values are in points.

    ``low`` is corrected for the number of guards. ``high`` is not, because every task must pass.
    """
    if low > max_drop:
        return "fail"
    return "pass" if high <= limit else "inconclusive"


def judge_guards(
    guard_evidence: Sequence[GuardEvidence], confidence: float, *, as_suite: bool = False, pending: int = 0
) -> tuple[GuardVerdict, ...]:
    """Return the verdicts of all guards of a merge, each at the look that its task has reached.

    Args:
        guard_evidence: Evidence on each guard.
        confidence: One-sided confidence, over all looks, of each guard that passes, and of all failures together.
        as_suite: Whether each task is judged by its ``limit``, as part of a suite, instead of by its own margin.
        pending: Number of further guards of the merge that have no evidence yet.
    """
    cases = answer_cases(guard_evidence)
    alarms = [alarm_confidences(case, confidence, pending) for case in cases]
    outcomes = [
        [_outcome(evidence, confidence, alarm, as_suite=as_suite) for evidence, alarm in zip(case, levels, strict=True)]
        for case, levels in zip(cases, alarms, strict=True)
    ]
    questions = sum(evidence.candidates for evidence in guard_evidence)
    return tuple(
        _judge(own_cases, confidence, alarm, questions, own_outcomes, as_suite=as_suite)
        for own_cases, own_outcomes, alarm in zip(
            zip(*cases, strict=True), zip(*outcomes, strict=True), alarms[0], strict=True
        )
    )


def alarm_confidences(guard_evidence: Sequence[GuardEvidence], confidence: float, pending: int = 0) -> list[float]:
    """Return the confidence, over all looks, at which each guard is tested for failure.

    This is Holm's step-down procedure in the form of Bretz et al. 2009 (Stat. Med. 28:586): all guards share the
    allowed error, and each guard that shows a drop passes its share on to the others. The looks of a guard spend its
    share as described in ``gate.sequential`` (Maurer & Bretz 2013, Stat. Biopharm. Res. 5:311). The ``pending``
    guards without evidence keep their shares, so the result is valid for all their possible outcomes.
    """
    confidences = [confidence] * len(guard_evidence)
    waiting = list(range(len(guard_evidence)))
    while waiting:
        for i in waiting:
            questions = (len(waiting) + pending) * guard_evidence[i].candidates
            confidences[i] = confidence if questions == 1 else 1 - (1 - confidence) / questions
        dropped = [i for i in waiting if guard_evidence[i].interval(confidences[i]).low > 0]
        waiting = [i for i in waiting if i not in dropped]
        if not dropped:
            break
    return confidences


def _outcome(evidence: GuardEvidence, confidence: float, alarm: float, *, as_suite: bool) -> Outcome:
    """Return the outcome of a guard by its interval alone, however its answers ended."""
    guard, estimate, look = evidence.guard, evidence.interval(confidence), evidence.look(confidence)
    drop, high, sure_low = (100 * value for value in (estimate.mean, estimate.high, evidence.interval(alarm).low))
    if as_suite:
        return decide_task(sure_low, high, guard.max_drop, guard.catastrophe)
    return decide_guard(drop, sure_low, high, guard.max_drop, guard.upper_limit, last_look=look.number == look.of)


def _judge(
    cases: Sequence[GuardEvidence],
    confidence: float,
    alarm: float,
    questions: int,
    outcomes: Sequence[Outcome],
    *,
    as_suite: bool,
) -> GuardVerdict:
    """Return the verdict of one guard. ``outcomes`` are those of ``cases`` (see ``answer_cases``)."""
    evidence = cases[0]
    guard, n = evidence.guard, len(evidence.differences)
    look, alarm_look = evidence.look(confidence), evidence.look(alarm)
    estimate = evidence.interval(confidence)
    drop, low, high = (100 * value for value in (estimate.mean, estimate.low, estimate.high))
    outcome: Outcome = outcomes[0] if len(set(outcomes)) == 1 else "inconclusive"
    needed = chance_left = None
    if outcome == "inconclusive":
        chance_left = _chance_left(evidence, estimate, confidence, alarm, as_suite=as_suite)
        alarming = drop > guard.max_drop and not as_suite
        needed = _documents_to_decide(evidence, estimate, alarm if alarming else confidence, as_suite=as_suite)
    # The smallest true difference that these documents would have shown with ``POWER``.
    quantiles = normal_quantile(alarm_look.confidence) + normal_quantile(POWER)
    detectable_drop = quantiles * math.sqrt(estimate.variance / n)
    verdict = GuardVerdict(
        task=guard.task,
        metric=evidence.metric,
        reference=evidence.reference,
        reference_score=evidence.reference_score,
        merge_score=evidence.merge_score,
        n=n,
        lost=sum(d > 0 for d in evidence.differences),
        won=sum(d < 0 for d in evidence.differences),
        drop=drop,
        low=low,
        high=high,
        confidence=confidence,
        max_drop=guard.max_drop,
        margin=guard.upper_limit,
        outcome=outcome,
        reason="",
        documents_needed=needed,
        detectable_drop=100 * detectable_drop,
        look=look,
        documents_left=evidence.schedule[-1] - evidence.documents,
        alarm_confidence=alarm,
        candidates=evidence.candidates,
        selection_bias=100 * evidence.selection_bias,
        clusters=len(set(evidence.clusters)) if evidence.clusters is not None else None,
        chance_left=chance_left,
        weight=guard.weight,
        limit=guard.catastrophe if as_suite else None,
        documents_asked=evidence.documents,
        leaf_metrics=dict(evidence.leaf_metrics),
        data=evidence.data,
        advisory=guard.advisory,
        answers=summarize_answers(evidence, alarm_look.confidence),
        cut_answers=compare_cases(cases, outcomes),
        sample_start=evidence.sample_start,
    )
    reason = drop_sentence(verdict, look.documents + verdict.documents_left, questions)
    verdict = verdict.model_copy(update={"reason": reason})
    findings = tuple(finding for check in _CHECKS for finding in check(evidence, verdict))
    worst = max(findings, key=lambda finding: severity(finding.outcome), default=None)
    is_open = verdict.cut_answers is not None and verdict.cut_answers.decide  # A finding says more than the interval.
    if worst and severity(worst.outcome) + is_open > severity(outcome):
        verdict = verdict.model_copy(update={"outcome": worst.outcome, "reason": worst.reason})
    return verdict.model_copy(update={"findings": findings})


def _documents_to_decide(
    evidence: GuardEvidence, estimate: Difference, confidence: float, *, as_suite: bool
) -> int | None:
    """Return the documents that decide with power 0.8 if the true drop is the observed one, at a look if possible."""
    drop, guard = estimate.mean, evidence.guard
    threshold, margin = guard.max_drop / 100, (guard.catastrophe if as_suite else guard.upper_limit) / 100
    # A drop above the threshold must be shown to be above zero. Any other drop, and that of a task in a suite, must
    # be shown to be within the margin.
    distance = drop if drop > threshold and not as_suite else margin - drop
    if distance <= 0:
        return None
    for look in plan_looks(evidence.schedule, confidence):
        can_decide = as_suite or look.number == look.of or not threshold < drop <= margin
        enough = documents_needed(estimate.variance, distance, look.confidence) <= look.documents
        if look.documents > evidence.documents and can_decide and enough:
            return look.documents
    return max(evidence.schedule[-1] + 1, documents_needed(estimate.variance, distance, confidence))


def _chance_left(
    evidence: GuardEvidence, estimate: Difference, confidence: float, alarm: float, *, as_suite: bool
) -> float | None:
    if evidence.documents >= evidence.schedule[-1]:
        return None
    share, guard = evidence.documents / evidence.schedule[-1], evidence.guard
    error = math.sqrt(estimate.variance / len(evidence.differences))
    sure, alarmed = (
        normal_quantile(plan_looks(evidence.schedule, level)[-1].confidence) for level in (confidence, alarm)
    )
    last_error, limit = error * math.sqrt(share), guard.max_drop / 100
    if as_suite:
        pass_below, fail_above = guard.catastrophe / 100 - sure * last_error, limit + alarmed * last_error
    else:
        pass_below = min(limit, guard.upper_limit / 100 - sure * last_error)
        fail_above = max(limit, alarmed * last_error)
    return chance_to_decide(estimate.mean, error, share, pass_below, fail_above)


def note_repeated_documents(evidence: GuardEvidence, verdict: GuardVerdict) -> Iterator[GateFinding]:
    """Yield a note with the number of independent documents of a guard, if some documents repeat others."""
    if evidence.units is not None:
        n, distinct = len(evidence.units), len(set(evidence.units))
        yield GateFinding(
            kind="duplicates",
            outcome="pass",
            reason=f"{verdict.task}: {n - distinct:,} of {n:,} documents repeat the prompt of another document, so the "
            f"interval counts {distinct:,} independent documents",
        )


# The checks of a guard, in the order of their findings.
_CHECKS: tuple[Callable[[GuardEvidence, GuardVerdict], Iterable[GateFinding]], ...] = (
    find_alarms,
    check_prompts,  # before the reference, because it explains a score at chance
    check_reference,
    note_detectable_drop,
    check_cut_answers,
    check_lengths,
    note_repeated_documents,
)

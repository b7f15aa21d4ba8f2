"""The gate: from paired evidence to a verdict. Pure decisions; the stage around them only stores the answer.

A guard has three outcomes, because evidence can be too thin to say (T: ``max_drop``, M: ``margin``, both in points)::

    fail          drop > T and the interval excludes zero        over the threshold, and not noise
    pass          drop <= T and its upper bound <= M             shown to be at most so much worse
    inconclusive  anything else                                  more documents would tell

Perplexity drift follows the same rule with the ratio of perplexities, where threshold and margin are one limit. All
guards must pass: that needs no correction for their number, since a bad merge has to get by every one of them.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from pydantic import BaseModel, ConfigDict

from merge_core.errors import InvalidInput, Refused, suggest
from merge_core.store import Artifact
from tasks import outcomes
from tasks.evaluate import Scores, default_metric
from tasks.guards import GateRule, Guard
from tasks.outcomes import Paired
from tasks.outcomes import pair as pair
from tasks.perplexity import DocumentLikelihood, DriftLimits, Likelihoods, read_documents
from tasks.stage import StageValue, stage
from tasks.statistics import (
    binary_difference,
    detectable_difference,
    documents_needed,
    graded_difference,
    likelihood_ratio,
)

Outcome = Literal["pass", "fail", "inconclusive"]
OnInconclusive = Literal["block", "warn", "pass"]

BROKEN_RATIO = 2.0  # of perplexities; no merge that is worth a look is worse
_SEVERITY: tuple[Outcome, ...] = ("pass", "inconclusive", "fail")


class GuardVerdict(BaseModel):
    """One regression guard: the merge against its reference on one task. Differences are in points (0 to 100),
    positive when the merge is worse."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    task: str
    metric: str
    reference: str  # name of the model it is held against
    reference_score: float  # in [0, 1]
    merge_score: float
    n: int  # paired documents
    lost: int  # documents the reference gets right and the merge wrong (graded: on which the merge is worse)
    won: int  # the reverse
    drop: float  # points
    low: float  # interval of the drop at ``confidence``, one-sided each way, points
    high: float
    confidence: float  # 0.95
    max_drop: float  # points
    margin: float  # points: the upper bound must stay within it to pass
    outcome: Outcome
    reason: str  # a sentence: task, drop, interval, threshold
    documents_needed: int | None = None  # that would decide it, if the drop is as seen; None where it is decided
    detectable_drop: float | None = None  # points: the smallest true drop so many documents show, 4 times in 5


class DriftVerdict(BaseModel):
    """Perplexity of the merge over the better parent's on the same documents."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    reference: str  # the better parent
    documents: int
    unit: Literal["token", "byte"]  # bytes when tokenizers differ
    ratio: float | None  # None when the merge's likelihood is not finite
    low: float | None
    high: float | None
    max_ratio: float  # 1.05
    warn_ratio: float  # 1.02
    outcome: Outcome
    broken: bool  # not finite, or worse than twice: the costly tasks are not worth running
    warning: bool
    reason: str


class Verdict(StageValue):
    """The decision about one merge, with all that led to it."""

    outcome: Outcome  # worst of all
    publishable: bool  # what the outcome and ``on_inconclusive`` make of it
    guards: tuple[GuardVerdict, ...]
    drift: DriftVerdict | None
    overall_drop: float | None  # mean over tasks, points
    overall_low: float | None
    overall_high: float | None
    on_inconclusive: OnInconclusive
    reasons: tuple[str, ...]  # why not, worst first; empty when it passes

    def summary(self) -> str:
        if not self.publishable:
            return self.reasons[0]
        if self.outcome == "pass":
            return f"{len(self.guards)} guards passed" if self.guards else "no drift"
        return f"let through although {self.outcome}: {self.reasons[0]}"

    def refuses(self) -> bool:
        return not self.publishable

    def refused(self) -> Refused | None:
        """Why the merge must not be published, or None. The flow raises it, after the report is written."""
        if self.publishable:
            return None
        if self.outcome == "inconclusive":
            remedy = "evaluate more documents, or set evaluate.on_inconclusive"
        else:
            remedy = "a method with less interference (ties), a smaller weight or density, or fewer parents"
        several = f"{len(self.reasons)} of the merge's guards did not pass"
        found = self.reasons[0] if len(self.reasons) == 1 else "\n  ".join((several, *self.reasons))
        return Refused("gate", found=found, expected="every guard to pass", remedy=remedy)


class ModelLikelihoods(NamedTuple):
    """What the drift check knows of one model."""

    value: Likelihoods
    documents: tuple[DocumentLikelihood, ...]


def check_guards(guards: Iterable[Guard], names: Iterable[str]) -> None:
    """See that every guard is held against a model that there is.

    Raises:
        InvalidInput: naming the first that is not, with a suggestion.
    """
    known = sorted(names)
    for position, guard in enumerate(guards):
        if guard.guarded_by not in known:
            raise InvalidInput(
                f"evaluate.tasks[{position}].guarded_by",
                found=f"{guard.guarded_by!r}, which is no model of this merge",
                expected="the name of a parent",
                remedy=suggest(guard.guarded_by, known),
            )


@stage("gate", version=1)
def gate(
    out: Path,
    guards: tuple[Guard, ...],
    scores: Mapping[str, Sequence[Artifact[Scores]]],
    likelihoods: Mapping[str, Artifact[Likelihoods]],
    limits: DriftLimits | None,
    rule: GateRule,
    merged: str = "merge",
) -> Verdict:
    """Judge one merge on perplexity and, unless that shows it broken, by its guards.

    Args:
        guards: Their ``task`` is what lm-eval calls it (see ``pin_tasks``).
        scores: By model, the merge among them; may be empty when perplexity shows the merge broken.
        likelihoods: By model, the merge among them; may be empty where ``limits`` is None.
        merged: Name of the merge in both.

    Raises:
        InvalidInput: for a guard whose model, task or metric there is not, or evidence that cannot be compared.
    """
    drifted = drift(likelihoods, limits, rule.confidence, merged) if limits is not None else None
    verdicts = []
    if drifted is None or not drifted.broken:
        check_guards(guards, set(scores) - {merged})
        verdicts = [_judge_artifacts(guard, scores, rule.confidence, merged) for guard in guards]
    return judge(verdicts, drifted, rule.on_inconclusive)


def drift(
    likelihoods: Mapping[str, Artifact[Likelihoods]], limits: DriftLimits, confidence: float, merged: str = "merge"
) -> DriftVerdict:
    """The drift verdict on stored likelihoods, for whoever must know it before the costly tasks are run.

    Raises:
        InvalidInput: as ``judge_drift``.
    """
    read = {name: ModelLikelihoods(a.value, read_documents(a.directory)) for name, a in likelihoods.items()}
    merge = read.pop(merged)
    return judge_drift(read, merge, limits, confidence)


def decide(drop: float, low: float, high: float, max_drop: float, margin: float) -> Outcome:
    """The rule at the top of this file, on a drop with its interval; all in points."""
    if drop > max_drop and low > 0:
        return "fail"
    if drop <= max_drop and high <= margin:
        return "pass"
    return "inconclusive"


def judge_guard(guard: Guard, metric: str, paired: Paired, higher_is_better: bool, confidence: float) -> GuardVerdict:
    """The verdict of one guard on paired scores in [0, 1].

    Raises:
        InvalidInput: when there are too few documents to say anything.
    """
    sign = 1.0 if higher_is_better else -1.0
    differences = [sign * (ours - theirs) for ours, theirs in zip(paired.reference, paired.merge, strict=True)]
    n, lost, won = len(differences), sum(d > 0 for d in differences), sum(d < 0 for d in differences)
    if n < 2:
        raise InvalidInput(f"task {guard.task}", found=f"{n} document", expected="2 or more, better hundreds")
    binary = set(paired.reference) | set(paired.merge) <= {0.0, 1.0}
    estimate = binary_difference(lost, won, n, confidence) if binary else graded_difference(differences, confidence)
    drop, low, high = (100 * value for value in (estimate.mean, estimate.low, estimate.high))
    outcome = decide(drop, low, high, guard.max_drop, guard.upper_limit)
    needed = None
    if outcome == "inconclusive":
        # Above the threshold it takes showing that there is a drop at all; below it, that it is within the margin.
        distance = drop if drop > guard.max_drop else guard.upper_limit - drop
        needed = max(n + 1, documents_needed(estimate.variance, distance / 100, confidence)) if distance > 0 else None
    return GuardVerdict(
        task=guard.task,
        metric=metric,
        reference=guard.guarded_by,
        reference_score=sum(paired.reference) / n,
        merge_score=sum(paired.merge) / n,
        n=n,
        lost=lost,
        won=won,
        drop=drop,
        low=low,
        high=high,
        confidence=confidence,
        max_drop=guard.max_drop,
        margin=guard.upper_limit,
        outcome=outcome,
        reason=_guard_sentence(guard, drop, low, high, outcome, n, needed),
        documents_needed=needed,
        detectable_drop=100 * detectable_difference(estimate.variance, n, confidence),
    )


def judge_drift(
    parents: Mapping[str, ModelLikelihoods], merge: ModelLikelihoods, limits: DriftLimits, confidence: float
) -> DriftVerdict:
    """The verdict on perplexity: the merge against the parent that predicts the held-out text best.

    Raises:
        InvalidInput: when no parent has a finite likelihood, or the models did not read the same documents alike.
    """
    finite = {name: parent for name, parent in parents.items() if parent.value.bits_per_byte is not None}
    if not finite:
        raise InvalidInput("perplexity", found="no parent whose likelihood is finite", expected="working parents")
    # Bits per byte compare whatever the tokenizers are: all have read the same text.
    reference = min(finite, key=lambda name: (finite[name].value.bits_per_byte, name))
    parent = finite[reference]
    _check_same_reading(reference, parent, merge)
    unit: Literal["token", "byte"] = "token" if parent.value.vocabulary == merge.value.vocabulary else "byte"
    max_ratio, warn_ratio = 1 + limits.max_increase, 1 + limits.warn_increase
    ratio = low = high = None
    broken = True
    outcome: Outcome = "fail"
    if all(math.isfinite(document.loglik) for document in merge.documents):
        differences = [p.loglik - m.loglik for p, m in zip(parent.documents, merge.documents, strict=True)]
        weights = [document.tokens if unit == "token" else document.bytes for document in parent.documents]
        ratio, low, high = likelihood_ratio(differences, weights, confidence)
        broken = ratio > BROKEN_RATIO
        if not broken and not (ratio > max_ratio and low > 1):
            outcome = "pass" if high <= max_ratio else "inconclusive"
    return DriftVerdict(
        reference=reference,
        documents=len(merge.documents),
        unit=unit,
        ratio=ratio,
        low=low,
        high=high,
        max_ratio=max_ratio,
        warn_ratio=warn_ratio,
        outcome=outcome,
        broken=broken,
        warning=ratio is not None and outcome != "fail" and ratio > warn_ratio,
        reason=_drift_sentence(reference, unit, ratio, low, high, max_ratio, outcome, len(merge.documents)),
    )


def judge(guards: Sequence[GuardVerdict], drift: DriftVerdict | None, on_inconclusive: OnInconclusive) -> Verdict:
    """The decision about a merge: the worst of all its guards, and what follows from it."""
    parts = [(guard.outcome, guard.reason) for guard in guards]
    if drift is not None:
        parts.insert(0, (drift.outcome, drift.reason))
    outcome = max((part for part, _ in parts), key=_SEVERITY.index, default="pass")
    bad = [(part, reason) for part, reason in parts if part != "pass"]
    bad.sort(key=lambda part: -_SEVERITY.index(part[0]))  # stable: drift first, then in the order of the profile
    drop, low, high = _overall(guards)
    return Verdict(
        outcome=outcome,
        publishable=outcome == "pass" or (outcome == "inconclusive" and on_inconclusive != "block"),
        guards=tuple(guards),
        drift=drift,
        overall_drop=drop,
        overall_low=low,
        overall_high=high,
        on_inconclusive=on_inconclusive,
        reasons=tuple(reason for _, reason in bad),
    )


def _judge_artifacts(
    guard: Guard, scores: Mapping[str, Sequence[Artifact[Scores]]], confidence: float, merged: str
) -> GuardVerdict:
    where = f"{guard.task}: {merged} against {guard.guarded_by}"
    ours, theirs = (_scores_on(guard.task, name, scores.get(name, ()), where) for name in (guard.guarded_by, merged))
    if ours.value.lm_eval_version != theirs.value.lm_eval_version:
        versions = f"{ours.value.lm_eval_version} and {theirs.value.lm_eval_version}"
        raise InvalidInput(where, found=f"scores of lm-eval {versions}", expected="one version on both sides")
    better = {score.metric: score.higher_is_better for score in ours.value.tasks}
    metric = guard.metric or default_metric(tuple(better))
    if metric not in better:
        raise InvalidInput(
            f"evaluate.tasks: {guard.task}: metric",
            found=f"{metric!r}, which the task does not have",
            remedy=suggest(metric, better),
        )
    left, right = (outcomes.read(side.directory / outcomes.FILE) for side in (ours, theirs))
    return judge_guard(guard, metric, pair(left, right, metric, where), better[metric], confidence)


def _scores_on(task: str, model: str, artifacts: Sequence[Artifact[Scores]], where: str) -> Artifact[Scores]:
    for artifact in artifacts:
        if artifact.value.tasks[0].task == task:
            return artifact
    raise InvalidInput(where, found=f"no scores of {model}", expected="both models evaluated on this task")


def _check_same_reading(reference: str, parent: ModelLikelihoods, merge: ModelLikelihoods) -> None:
    where = f"perplexity: merge against {reference}"
    if parent.value.window != merge.value.window:
        raise InvalidInput(
            where,
            found=f"windows of {parent.value.window} and {merge.value.window} tokens",
            expected="one length for all models",
            remedy=f"perplexity.max_length: {min(w for w in (parent.value.window, merge.value.window) if w)}",
        )
    read = [[(document.doc_id, document.bytes) for document in side.documents] for side in (parent, merge)]
    if read[0] != read[1]:
        raise InvalidInput(where, found="other documents on each side", expected="the same documents")
    if len(read[0]) < 2:
        raise InvalidInput(where, found="1 document", expected="2 or more, better 500", remedy="add held-out text")


def _overall(guards: Sequence[GuardVerdict]) -> tuple[float | None, float | None, float | None]:
    """Mean drop over tasks with its interval, points.

    Tasks have different documents and are independent, so their distances from estimate to bound add in quadrature;
    guards of one task share documents, so theirs add plainly.
    """
    if not guards:
        return None, None, None
    by_task: dict[str, list[GuardVerdict]] = defaultdict(list)
    for guard in guards:
        by_task[guard.task].append(guard)
    means = [
        tuple(_mean(getattr(g, name) for g in same) for name in ("drop", "low", "high")) for same in by_task.values()
    ]
    drop = _mean(mean[0] for mean in means)
    below = math.hypot(*(mean[0] - mean[1] for mean in means)) / len(means)
    above = math.hypot(*(mean[2] - mean[0] for mean in means)) / len(means)
    return drop, drop - below, drop + above


def _mean(values: Iterable[float]) -> float:
    listed = list(values)
    return sum(listed) / len(listed)


def _guard_sentence(
    guard: Guard, drop: float, low: float, high: float, outcome: Outcome, n: int, needed: int | None
) -> str:
    # 3.04 is over a limit of 3, and must be seen to be.
    digits = next((d for d in (1, 2) if (round(drop, d) > guard.max_drop) == (drop > guard.max_drop)), 3)
    if drop < 0:  # said the other way round, interval and all
        difference, low, high = f"{-drop:.{digits}f} points above", -high, -low
    else:
        difference = f"{drop:.{digits}f} points below" if drop > 0 else "level with"
    interval = f"[{low:.{digits}f}, {high:.{digits}f}]"
    sentence = f"{guard.task}: {difference} {guard.guarded_by} {interval}, limit {guard.max_drop:.{digits}f}"
    if outcome != "inconclusive":
        return sentence
    would = f"; about {needed:,} would decide it" if needed else ""
    return f"{sentence}: undecided after {n:,} documents{would}"


def _drift_sentence(
    reference: str,
    unit: str,
    ratio: float | None,
    low: float | None,
    high: float | None,
    max_ratio: float,
    outcome: Outcome,
    n: int,
) -> str:
    if ratio is None or low is None or high is None:
        return "perplexity: not finite, the merge is broken"
    per_byte = " per byte" if unit == "byte" else ""
    interval = f"{_figure(ratio)} times {reference}'s{per_byte} [{_figure(low)}, {_figure(high)}], limit {max_ratio:g}"
    undecided = f": undecided after {n:,} documents" if outcome == "inconclusive" else ""
    return f"perplexity: {interval}{undecided}"


def _figure(ratio: float) -> str:
    return f"{ratio:.3f}" if ratio < 10 else f"{ratio:,.0f}" if ratio < 1e6 else f"{ratio:.1e}"

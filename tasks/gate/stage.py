"""The gate: from paired evidence to a verdict. Pure decisions; the stage around them only reads and stores.

Perplexity is judged first (``tasks.gate.drift``), then one guard for each promise of the profile
(``tasks.gate.regression``). All of them must pass. While a guard is undecided and its task has documents left,
``undecided_tasks`` names the task: the flow has more of it evaluated, up to the next look, and asks again
(``flows.assessment``).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from merge_core.errors import InvalidInput
from merge_core.store import Artifact
from tasks.evaluation import Scores, TaskScores, by_task, pair_documents
from tasks.gate.drift import DriftVerdict, ModelLikelihoods, judge_drift
from tasks.gate.guards import CHAMPION, GateRule, Guard
from tasks.gate.references import best_model, check_guards, reference_models
from tasks.gate.regression import GuardEvidence, GuardVerdict, judge_guards, measure_guard
from tasks.gate.statistics import selection_bias
from tasks.perplexity import DriftLimits, Likelihoods, read_documents
from tasks.stage import JointVerdict, Outcome, Section, StageValue, Verdict, severity, value_stage, worst

OnInconclusive = Literal["block", "warn", "pass"]


class GateVerdict(StageValue):
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
    notes: tuple[str, ...] = ()  # what was not judged, and why that is well

    def summary(self) -> str:
        if not self.publishable:
            return self.reasons[0]
        if self.outcome != "pass":
            return f"let through although {self.outcome}: {self.reasons[0]}"
        if self.guards:
            return f"{len(self.guards)} guards passed"
        return "no drift" if self.drift else "; ".join(self.notes) or "nothing to judge"

    def refuses(self) -> bool:
        return not self.publishable

    def as_verdict(self) -> Verdict:
        """The same in the shape of every judgement."""
        return Verdict(
            name="gate",
            outcome=self.outcome,
            publishable=self.publishable,
            reasons=self.reasons,
            evidence=self,
            section=Section(title="Gate", sentences=self.reasons or (self.summary(),)),
        )

    def joined_by(self, joint: JointVerdict) -> GateVerdict:
        """This verdict with what all judgements of the merge come to together."""
        return self.model_copy(update=joint._asdict())


@value_stage("gate", version=3)
def gate(
    guards: tuple[Guard, ...],
    scores: Mapping[str, Sequence[Artifact[Scores]]],
    likelihoods: Mapping[str, Artifact[Likelihoods]],
    limits: DriftLimits | None,
    rule: GateRule,
    merged: str = "merge",
    schedule: Mapping[str, tuple[int, ...]] | None = None,
    first_release: bool = False,
) -> GateVerdict:
    """Judge one merge on perplexity and, unless that shows it broken, by its guards.

    Args:
        guards: Their ``task`` is what lm-eval calls it (see ``pin_tasks``).
        scores: By model, the merge among them; may be empty when perplexity shows the merge broken. A task may come in
            several parts, which are judged together.
        likelihoods: By model, the merge among them; may be empty where ``limits`` is None.
        merged: Name of the merge in both.
        schedule: By task, documents after each look that was planned; a task without one is looked at once.
        first_release: There is no champion yet, so guards compared with it have nothing to say.

    Raises:
        InvalidInput: for a guard whose model, task or metric there is not, or evidence that cannot be compared.
    """
    drifted = perplexity_drift(likelihoods, limits, rule.confidence, merged) if limits is not None else None
    if drifted is not None and drifted.broken:
        return gate_verdict((), drifted, rule.on_inconclusive)
    check_guards(guards, set(scores) - {merged, CHAMPION})
    known = {(model, task): each for model, parts in scores.items() for task, each in by_task(model, parts).items()}
    judged = [guard for guard in guards if not (first_release and guard.guarded_by == CHAMPION)]
    plan = schedule or {}
    measured = [_measured(guard, known, tuple(scores), merged, plan.get(guard.task, ())) for guard in judged]
    notes = tuple(f"{guard.task}: no release to hold it against yet" for guard in guards if guard not in judged)
    return gate_verdict(judge_guards(measured, rule.confidence), drifted, rule.on_inconclusive, notes)


def perplexity_drift(
    likelihoods: Mapping[str, Artifact[Likelihoods]], limits: DriftLimits, confidence: float, merged: str = "merge"
) -> DriftVerdict:
    """The drift verdict on stored likelihoods, for whoever must know it before the costly tasks are run.

    Raises:
        InvalidInput: as ``judge_drift``.
    """
    read = {name: ModelLikelihoods(a.value, read_documents(a.directory)) for name, a in likelihoods.items()}
    merge = read.pop(merged)
    return judge_drift(read, merge, limits, confidence)


def undecided_tasks(verdict: GateVerdict) -> tuple[str, ...]:
    """Tasks of which more documents would serve: a guard is undecided, some are left, and nothing has failed yet."""
    if verdict.outcome == "fail":
        return ()  # whatever they said, it would not be published
    open_tasks = (guard.task for guard in verdict.guards if guard.outcome == "inconclusive" and guard.documents_left)
    return tuple(dict.fromkeys(open_tasks))


def gate_verdict(
    guards: Sequence[GuardVerdict],
    drift: DriftVerdict | None,
    on_inconclusive: OnInconclusive,
    notes: tuple[str, ...] = (),
) -> GateVerdict:
    """The decision about a merge: the worst of all its guards, and what follows from it."""
    parts = [(guard.outcome, guard.reason) for guard in guards]
    if drift is not None:
        parts.insert(0, (drift.outcome, drift.reason))
    outcome = worst(part for part, _ in parts)
    bad = [(part, reason) for part, reason in parts if part != "pass"]
    bad.sort(key=lambda part: -severity(part[0]))  # stable: drift first, then in the order of the profile
    drop, low, high = _overall(guards)
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
    )


def _measured(
    guard: Guard,
    known: Mapping[tuple[str, str], TaskScores],
    models: Sequence[str],
    merged: str,
    schedule: Sequence[int],
) -> GuardEvidence:
    where = f"{guard.task}: {merged} against {guard.guarded_by}"
    sides = {
        name: _scores_on(guard.task, name, known, where)
        for name in reference_models(guard, models, merged) or (guard.guarded_by,)
    }
    ours = _scores_on(guard.task, merged, known, where)
    for theirs in sides.values():
        if theirs.lm_eval_version != ours.lm_eval_version:
            versions = f"{theirs.lm_eval_version} and {ours.lm_eval_version}"
            raise InvalidInput(where, found=f"scores of lm-eval {versions}", expected="one version on both sides")
        if theirs.data and ours.data and theirs.data.digest != ours.data.digest:
            raise InvalidInput(
                where,
                found="scores on different data",
                expected="the same documents, examples and templates on both sides",
                remedy="the task's dataset was exchanged: evaluate both again",
            )
    metrics = next(iter(sides.values())).metrics(guard.metric)
    judged = ours.judged(metrics)
    paired = {
        name: pair_documents(theirs.judged(metrics), judged, metrics.label, where) for name, theirs in sides.items()
    }
    chosen = best_model({name: each.reference for name, each in paired.items()}, metrics.higher_is_better)
    return measure_guard(
        guard,
        metrics.label,
        paired[chosen],
        metrics.higher_is_better,
        reference=chosen,
        documents=ours.documents_asked,
        leaf_metrics=metrics.differing,
        data=ours.data,
        schedule=schedule,
        candidates=len(paired),
        selection_bias=selection_bias([each.reference for each in paired.values()]),
    )


def _scores_on(task: str, model: str, known: Mapping[tuple[str, str], TaskScores], where: str) -> TaskScores:
    if (model, task) in known:
        return known[model, task]
    raise InvalidInput(where, found=f"no scores of {model}", expected="both models evaluated on this task")


def _overall(guards: Sequence[GuardVerdict]) -> tuple[float | None, float | None, float | None]:
    """Mean drop over tasks with its interval, points.

    Tasks have different documents and are independent, so their distances from estimate to bound add in quadrature;
    guards of one task share documents, so theirs add plainly. A distance at an early look is taken at the higher
    confidence of that look, which makes the interval wider than it need be, never narrower.
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

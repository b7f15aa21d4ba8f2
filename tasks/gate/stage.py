"""The gate: from paired evidence to a verdict. Pure decisions; the stage around them only reads and stores.

Perplexity is judged first (``tasks.gate.drift``), then one guard for each promise of the profile
(``tasks.gate.regression``) and, unless each is judged on its own, their mean (``tasks.gate.suite``). All must pass.
While anything is undecided and there are documents left, ``undecided_tasks`` names the tasks: the flow has more of them
evaluated, up to the next look, and asks again (``flows.attempt``). Within a look ``cannot_pass`` tells after each
task whether those to come could still change anything; where they cannot, they are not run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from pydantic import BaseModel, ConfigDict

from mergegate.merge_core.errors import InvalidInput
from mergegate.tasks.evaluation import Scores, TaskScores, by_task, pair_documents
from mergegate.tasks.gate.drift import DriftVerdict, ModelLikelihoods, judge_drift
from mergegate.tasks.gate.guards import ANCHOR, CHAMPION, GateRule, Guard
from mergegate.tasks.gate.references import best_model, check_guards, reference_models
from mergegate.tasks.gate.regression import GuardEvidence, GuardVerdict, judge_guards, measure_guard
from mergegate.tasks.gate.sequential import FUTILE
from mergegate.tasks.gate.statistics import selection_bias
from mergegate.tasks.gate.suite import SuiteVerdict, TaskDrop, judge_suite, mean_drop
from mergegate.tasks.perplexity import DriftLimits, Likelihoods, read_documents
from mergegate.tasks.stage import (
    JointVerdict,
    Outcome,
    Section,
    StageValue,
    Verdict,
    severity,
    value_stage,
    worst_verdict,
)
from mergegate.tasks.store import Artifact

OnInconclusive = Literal["block", "warn", "pass"]


class SkippedGuard(BaseModel):
    """A guard whose task was not asked, because another had decided."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    task: str
    reference: str  # what it would have been compared with, as the guard says
    limit: float  # points, of this task alone
    decided_by: str  # the task whose guard failed
    documents: int  # that might have been asked of it; 0 where nobody counted

    @property
    def word(self) -> str:
        return f"not run: decided by {self.decided_by}"


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
    suites: tuple[SuiteVerdict, ...] = ()  # the mean over all tasks, where it is judged: first against all references
    # but the anchor, then against that
    not_run: tuple[SkippedGuard, ...] = ()  # guards whose tasks were not asked, since what was asked decides

    def summary(self) -> str:
        if not self.publishable:
            return self.reasons[0]
        if self.outcome != "pass":
            return f"let through although {self.outcome}: {self.reasons[0]}"
        if self.suites:
            return f"{self.suites[0].tasks} tasks together: {self.suites[0].word}"
        if self.guards:
            return "1 guard passed" if len(self.guards) == 1 else f"{len(self.guards)} guards passed"
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


@value_stage("gate", version=4)
def gate(
    guards: tuple[Guard, ...],
    scores: Mapping[str, Sequence[Artifact[Scores]]],
    likelihoods: Mapping[str, Artifact[Likelihoods]],
    limits: DriftLimits | None,
    rule: GateRule,
    merged: str = "merge",
    schedule: Mapping[str, tuple[int, ...]] | None = None,
    first_release: bool = False,
    parents: tuple[str, ...] | None = None,
    anchor_confidence: float | None = None,
    waiting: tuple[str, ...] = (),
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
        parents: That 'best parent' chooses from; None: all but the merge and releases.
        anchor_confidence: Of comparisons with the anchor, where it is another than the rule's.
        waiting: Tasks that were not asked, or not as far as this look goes, because one that was is lost for good (see
            ``cannot_pass``). Then there is no mean over all tasks to judge.

    Raises:
        InvalidInput: for a guard whose model, task or metric there is not, or evidence that cannot be compared.
    """
    drifted = perplexity_drift(likelihoods, limits, rule.confidence, merged) if limits is not None else None
    if drifted is not None and drifted.broken:
        return gate_verdict((), drifted, rule.on_inconclusive)
    check_guards(guards, set(scores) - {merged, CHAMPION, ANCHOR})
    known = {(model, task): each for model, parts in scores.items() for task, each in by_task(model, parts).items()}
    judged = [guard for guard in guards if not (first_release and guard.guarded_by == CHAMPION)]
    plan = schedule or {}
    unasked = [guard for guard in judged if guard.task in waiting and (merged, guard.task) not in known]
    measured = []
    for guard in judged:
        if guard not in unasked:
            models = reference_models(guard, scores, merged, parents) or (guard.guarded_by,)
            measured.append(_measured(guard, known, models, merged, plan.get(guard.task, ())))
    notes = tuple(f"{guard.task}: no release to hold it against yet" for guard in guards if guard not in judged)
    is_suite = _is_suite(judged, rule)
    suites: list[SuiteVerdict] = []
    verdicts: list[GuardVerdict] = []
    for is_anchor, confidence in ((False, rule.confidence), (True, anchor_confidence or rule.confidence)):
        if some := [one for one in measured if (one.guard.guarded_by == ANCHOR) == is_anchor]:
            suites += [judge_suite(some, confidence)] if is_suite and not waiting else []
            others = sum((guard.guarded_by == ANCHOR) == is_anchor for guard in unasked)
            verdicts += judge_guards(some, confidence, as_suite=is_suite, unasked=others)
    lost = next((one.task for one in verdicts if one.outcome == "fail"), "")
    if waiting and not lost:
        raise ValueError(f"{', '.join(waiting)} not asked although nothing is decided")
    not_run = tuple(_not_run(guard, lost, plan, is_suite=is_suite) for guard in unasked)
    return gate_verdict(verdicts, drifted, rule.on_inconclusive, notes, suites, not_run)


def cannot_pass(
    task: str,
    guards: tuple[Guard, ...],
    scores: Mapping[str, Sequence[Artifact[Scores]]],
    rule: GateRule,
    merged: str = "merge",
    schedule: Mapping[str, tuple[int, ...]] | None = None,
    first_release: bool = False,
    parents: tuple[str, ...] | None = None,
    anchor_confidence: float | None = None,
) -> bool:
    """Whether a guard on ``task`` has failed whatever all others come to, so that the merge is not published.

    It is asked as one among as many as there are, before anybody knows which others will show a drop; when ``gate``
    asks again with them, it is asked no more strictly. So what ends here would have ended as well at the end of the
    look, and in whatever order tasks are asked.

    Args:
        scores: By model, on this task at least. Other arguments as of ``gate``.
    """
    judged = [guard for guard in guards if not (first_release and guard.guarded_by == CHAMPION)]
    known = {(model, task): each[task] for model, parts in scores.items() if task in (each := by_task(model, parts))}
    for is_anchor, confidence in ((False, rule.confidence), (True, anchor_confidence or rule.confidence)):
        some = [guard for guard in judged if (guard.guarded_by == ANCHOR) == is_anchor]
        measured = [
            _measured(
                guard,
                known,
                reference_models(guard, scores, merged, parents) or (guard.guarded_by,),
                merged,
                (schedule or {}).get(task, ()),
            )
            for guard in some
            if guard.task == task
        ]
        verdicts = judge_guards(
            measured, confidence, as_suite=_is_suite(judged, rule), unasked=len(some) - len(measured)
        )
        if any(verdict.outcome == "fail" for verdict in verdicts):
            return True
    return False


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
    """Tasks of which more documents would serve: a guard is undecided, some are left that may decide it, and nothing
    has failed yet. Of a suite that is all of them: they are extended together."""
    if verdict.outcome == "fail":
        return ()  # whatever they said, it would not be published
    chances = [*(suite.chance_left for suite in verdict.suites), *(guard.chance_left for guard in verdict.guards)]
    if any(chance is not None and chance < FUTILE for chance in chances):
        return ()  # what is left of tonight's documents would not decide it
    undecided = [guard for guard in verdict.guards if guard.outcome == "inconclusive"]
    if (undecided and verdict.suites) or any(suite.outcome == "inconclusive" for suite in verdict.suites):
        undecided = list(verdict.guards)
    return tuple(dict.fromkeys(guard.task for guard in undecided if guard.documents_left))


def gate_verdict(
    guards: Sequence[GuardVerdict],
    drift: DriftVerdict | None,
    on_inconclusive: OnInconclusive,
    notes: tuple[str, ...] = (),
    suites: Sequence[SuiteVerdict] = (),
    not_run: tuple[SkippedGuard, ...] = (),
) -> GateVerdict:
    """The decision about a merge: the worst of all its guards, and what follows from it."""
    # A task that has fallen says more than the mean that it drags down.
    parts = [*((guard.outcome, guard.reason) for guard in guards), *((suite.outcome, suite.reason) for suite in suites)]
    if drift is not None:
        parts.insert(0, (drift.outcome, drift.reason))
    outcome = worst_verdict(part for part, _ in parts)
    bad = [(part, reason) for part, reason in parts if part != "pass"]
    bad.sort(key=lambda part: -severity(part[0]))  # stable: drift first, then in the order of the profile
    drop, low, high = (suites[0].drop, suites[0].low, suites[0].high) if suites else _overall(guards)
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
    )


def _is_suite(judged: Sequence[Guard], rule: GateRule) -> bool:
    """Whether the mean over all tasks is judged: one task alone is its own suite."""
    return rule.rule == "suite" and len({guard.task for guard in judged}) > 1


def _not_run(guard: Guard, decided_by: str, plan: Mapping[str, tuple[int, ...]], *, is_suite: bool) -> SkippedGuard:
    return SkippedGuard(
        task=guard.task,
        reference=guard.guarded_by,
        limit=guard.catastrophe if is_suite else guard.max_drop,
        decided_by=decided_by,
        documents=plan[guard.task][-1] if guard.task in plan else 0,
    )


def _measured(
    guard: Guard,
    known: Mapping[tuple[str, str], TaskScores],
    models: Sequence[str],
    merged: str,
    schedule: Sequence[int],
) -> GuardEvidence:
    where = f"{guard.task}: {merged} against {guard.guarded_by}"
    sides = {name: _scores_on(guard.task, name, known, where) for name in models}
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
    """Mean drop over tasks with its interval, points. A distance at an early look is taken at the higher confidence of
    that look, which makes the interval wider than it need be, never narrower."""
    if not guards:
        return None, None, None
    return mean_drop([TaskDrop(one.task, one.weight, one.drop, one.low, one.high) for one in guards])

"""Assessing a merge: perplexity, then the tasks, then more of those tasks that are not decided, and the verdict.

The same for a release and for a comparison of any two models: nothing here knows where they come from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from merge_core.store import Artifact, StoredValue
from tasks.checkpoints import Model, PinnedCheckpoint
from tasks.evaluation import EvalTask, Scores, document_count, evaluate_to, looks
from tasks.gate import (
    ANCHOR,
    RELEASES,
    GateVerdict,
    anchor_confidence,
    anchor_refused,
    comparable_parents,
    gate,
    needs_champion,
    note_refusal,
    perplexity_drift,
    refused_by,
    undecided_tasks,
)
from tasks.perplexity import Likelihoods, ensemble_likelihoods, perplexity
from tasks.preflight import Evidence
from tasks.stage import runtime


class Assessment(NamedTuple):
    """A verdict with the evidence that led to it."""

    scores: dict[str, list[Artifact[Scores]]]  # by model; of a task as many parts as were evaluated
    likelihoods: dict[str, Artifact[Likelihoods]]  # by model
    verdict: StoredValue[GateVerdict]


def assess_merge(
    merge: Model, parents: Sequence[Model], champion: Model | None, evidence: Evidence, anchor: Model | None = None
) -> Assessment:
    """Measure all models as far as it takes to decide about the merge, and decide.

    Args:
        champion: The release that is published today; None before the first one.
        anchor: The release that the profile anchors the champion's guards to; None where that is the champion.
    """
    rule, limits = evidence.rule, evidence.limits
    guards = tuple(guard for guard in evidence.guards if anchor or guard.guarded_by != ANCHOR)
    refusals = refused_by(anchor.digest, but=merge.digest) if anchor else 0
    stricter = anchor_confidence(rule.confidence, refusals) if anchor else None
    # Perplexity takes seconds and sees a broken merge at once; then the costly tasks are not worth running.
    likelihoods = measure_perplexity((*parents, merge), evidence)
    compared = (
        {name: likelihoods[name] for name in (*_parents_for(limits.reference, parents), merge.name) if likelihoods}
        if limits
        else {}
    )
    broken = limits and perplexity_drift(compared, limits, rule.confidence, merge.name).broken
    plan = {} if broken else {task.name: planned_looks(task, evidence) for task in evidence.tasks}
    models = (*parents, *(release for release in (champion, anchor) if release), merge)
    seen = {task: planned[0] for task, planned in plan.items()}
    while True:
        scores = run_tasks(models, evidence, seen)
        verdict = gate(
            guards,
            scores,
            compared,
            limits,
            rule,
            merged=merge.name,
            schedule=plan,
            first_release=champion is None and needs_champion(guards),
            parents=_parents_for(rule.reference, parents),
            anchor_confidence=stricter,
        )
        if not (tasks := undecided_tasks(verdict.value)):
            if anchor and anchor_refused(verdict.value):
                note_refusal(anchor.digest, merge.digest)
            return Assessment(scores, likelihoods, verdict)
        seen |= {task: next(look for look in plan[task] if look > seen[task]) for task in tasks}


def ensemble_of(parents: Sequence[PinnedCheckpoint], evidence: Evidence) -> Artifact[Likelihoods] | None:
    """The held-out text under all parents together; None where the profile does not ask, or there is one only."""
    members = tuple(parent for parent in parents if not parent.is_base)
    if not evidence.ensemble or evidence.documents is None or evidence.windows is None or len(members) < 2:
        return None
    return ensemble_likelihoods(members, evidence.documents, evidence.windows, runtime())


def planned_looks(task: EvalTask, evidence: Evidence) -> tuple[int, ...]:
    """Documents of the task after each look; only the first look where the profile wants no extension."""
    planned = looks(document_count(task, evidence.scoring.time_limit), evidence.scoring.first_look)
    return planned if evidence.rule.extend else planned[:1]


def measure_perplexity(models: Sequence[Model], evidence: Evidence) -> dict[str, Artifact[Likelihoods]]:
    """Likelihoods of the held-out text by model; empty when the profile names no text."""
    documents, windows = evidence.documents, evidence.windows
    if documents is None or windows is None:
        return {}
    return {model.name: perplexity(model, documents, windows, runtime()) for model in models}


def run_tasks(
    models: Sequence[Model], evidence: Evidence, seen: Mapping[str, int]
) -> dict[str, list[Artifact[Scores]]]:
    """Scores by model, of each task as many documents as ``seen`` says; what was scored before comes from the store.

    A release is scored only where a guard asks for it.
    """
    asked_of = {
        release: {guard.task for guard in evidence.guards if guard.guarded_by == release} for release in RELEASES
    }
    return {
        model.name: [
            part
            for task in evidence.tasks
            if task.name in seen and task.name in asked_of.get(model.name, seen)
            for part in evaluate_to(model, task, evidence.scoring, seen[task.name], runtime())
        ]
        for model in models
    }


def _parents_for(reference: str | tuple[str, ...], parents: Sequence[Model]) -> tuple[str, ...]:
    """Names of the parents that the best one is chosen from."""
    merged = {parent.name for parent in parents if not isinstance(parent, PinnedCheckpoint) or parent.is_merged}
    return comparable_parents(reference, [parent.name for parent in parents], merged, "reference")

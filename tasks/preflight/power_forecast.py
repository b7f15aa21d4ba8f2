"""Forecast the statistical power of a run: the documents of each guard, and the share on which answers will differ.

The forecast uses the most recent runs and the scores in the store. It evaluates no model, loads no data and reads no
weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from mergegate.merge_core.errors import Finding
from mergegate.tasks.base.stage import runtime, store
from mergegate.tasks.models.checkpoints import Model, ResolvedCheckpoint, find_applied_adapters, find_pinned_checkpoints
from mergegate.tasks.preflight.evidence import Evidence
from mergegate.tasks.quality.evaluation import EvalTask, interim_looks, known_scores
from mergegate.tasks.quality.gate import (
    ANCHOR,
    UNLIKELY,
    GatePower,
    Guard,
    PastGuardOutcome,
    PlannedTask,
    estimate_discordance,
    find_past_discordance,
    gate_power,
    known_reference_strength,
    reference_models,
    undecidable_finding,
)

# Share of answers that differ between a merge and its 4-bit variant: 7.2 % for Q4_K_M, 2.2 % for Q8_0.
VARIANT_DISCORDANCE = 0.08


def plan_interim_looks(task: EvalTask, evidence: Evidence) -> tuple[int, ...]:
    """Return the number of documents after each interim look at a task with pinned data.

    If the profile turns off extension, or if all guards of the task are advisory, only the first look is returned.
    """
    planned = interim_looks(task.documents or 0, task.first_look(evidence.scoring))
    guards = [guard for guard in evidence.guards if guard.task == task.name]
    is_advisory = bool(guards) and all(guard.advisory for guard in guards)
    return planned if evidence.rule.extend and not is_advisory else planned[:1]


def _pinned_guards(evidence: Evidence) -> Iterator[tuple[Guard, EvalTask, tuple[int, ...]]]:
    """Yield each guard on a task with pinned data, the task, and its interim looks."""
    tasks = {task.name: task for task in evidence.tasks if task.documents}
    for guard in evidence.guards:
        if task := tasks.get(guard.task):
            yield guard, task, plan_interim_looks(task, evidence)


def planned_tasks(
    evidence: Evidence, parents: Sequence[Model], past: Sequence[PastGuardOutcome] = ()
) -> list[PlannedTask]:
    """Return the guards on pinned data, with their interim looks and the discordance that an equal merge would have.

    ``past`` holds the guards of earlier runs of the profile, oldest first. Without them, the discordance comes from
    stored scores of the parents.
    """
    planned = []
    for guard, task, looks in _pinned_guards(evidence):
        if (discordance := find_past_discordance(guard, past)) is None:
            scores = {model.name: known_scores(model, task, evidence.scoring_of(model), runtime()) for model in parents}
            discordance = estimate_discordance(guard, scores, evidence.rule.discordance)
        planned.append(PlannedTask(guard, looks, discordance.share, str(discordance)))
    return planned


def forecast_undecidable(evidence: Evidence, attempts: int) -> Finding | None:
    """Return a warning if the documents of this run can never decide for a merge. Reads no scores."""
    planned = [
        PlannedTask(guard, plan_interim_looks(task, evidence), evidence.rule.discordance)
        for task in evidence.tasks
        for guard in evidence.guards
        if task.documents and guard.task == task.name and guard.guarded_by != ANCHOR and not guard.advisory
    ]
    return undecidable_finding(planned, evidence.rule.for_attempt(1, attempts))


def forecast_power(
    evidence: Evidence, parents: Sequence[ResolvedCheckpoint], attempts: int, past: Sequence[PastGuardOutcome] = ()
) -> GatePower | None:
    """Return the power of this run's first attempt, or None if no guard has a known number of documents.

    Scores are looked up only for parents whose files were hashed before. The run may make ``attempts`` attempts. For
    ``past``, see ``planned_tasks``.
    """
    models = find_applied_adapters(find_pinned_checkpoints(parents, store().hashes))
    planned = [
        entry
        for entry in planned_tasks(evidence, models, past)
        if entry.guard.guarded_by != ANCHOR and not entry.guard.advisory
    ]
    return gate_power(planned, evidence.rule.for_attempt(1, attempts)) if planned else None


class VariantPower(NamedTuple):
    """Chance that a variant passes if it is as good as the merge. ``documents`` is the most that may be evaluated."""

    power: GatePower

    def sentence(self) -> str:
        """Return the forecast as a sentence."""
        typical = f"{100 * VARIANT_DISCORDANCE:.0f} % of answers differ (typical of 4 bits)"
        return (
            f"a variant as good as the merge passes {100 * self.power.chance:.0f} % of the time with up to "
            f"{self.power.documents:,} documents, if {typical}"
        )

    def findings(self, location: str) -> Iterator[Finding]:
        """Yield a warning if such a variant has less than an even chance to pass."""
        if self.power.chance < UNLIKELY:
            wanted = self.power.documents_wanted
            yield Finding(
                "warn",
                location,
                found=self.sentence(),
                expected=f"documents with which such a variant passes at least {100 * UNLIKELY:.0f} % of the time",
                remedy=f"use {f'about {wanted:,}' if wanted else 'far more'} documents, or widen margin of the variant",
            )


def forecast_variant_power(evidence: Evidence) -> VariantPower | None:
    """Return the power of the gate for a variant, or None without guards on pinned data.

    ``evidence`` is that of the variant (see ``evidence_for_variant``).
    """
    planned = [PlannedTask(guard, looks, VARIANT_DISCORDANCE) for guard, _, looks in _pinned_guards(evidence)]
    return VariantPower(gate_power(planned, evidence.rule)) if planned else None


def sensitivity_findings(evidence: Evidence, parents: Sequence[ResolvedCheckpoint]) -> Iterator[Finding]:
    """Yield a warning for each guard whose reference is not above chance by the margin, by its stored scores.

    Without scores of the reference in the store, nothing is known. No model is evaluated.
    """
    models = find_applied_adapters(find_pinned_checkpoints(parents, store().hashes))
    for guard, task, looks in _pinned_guards(evidence):
        documents = looks[-1]
        names = reference_models(guard, [model.name for model in models], "")
        strengths = {}
        for model in models:
            parts = known_scores(model, task, evidence.scoring_of(model), runtime()) if model.name in names else ()
            if strength := known_reference_strength(guard, parts, evidence.rule.confidence, documents):
                strengths[model.name] = strength
        if not strengths:
            continue
        reference = max(strengths, key=lambda name: strengths[name].score)
        strength = strengths[reference]
        if strength.low < guard.upper_limit:
            prompts = ", or check the chat template, the number of few-shot examples and evaluate.max_length"
            yield Finding(
                "warn",
                f"evaluate.tasks: {guard.task}",
                found=f"{strength.comparison(reference)}, so a loss could not show and the guard will be inconclusive",
                expected=f"a reference that is {strength.better_than} by at least the margin "
                f"({guard.upper_limit:g}), with {documents:,} documents",
                remedy=f"use a task that {reference} can do{prompts if strength.form == 'text' else ''}",
            )

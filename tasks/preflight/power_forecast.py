"""What is known before a night: how many documents each guard may use, and on how many of them answers will differ.

From the last nights, and from tables of scores that lie in the store; no model is asked, no data are loaded, no weight
is read.
"""

from __future__ import annotations

from collections.abc import Sequence

from mergegate.tasks.checkpoints import Model, ResolvedCheckpoint, find_applied_adapters, find_pinned_checkpoints
from mergegate.tasks.evaluation import EvalTask, interim_looks, known_scores
from mergegate.tasks.gate import (
    ANCHOR,
    GatePower,
    PastGuardOutcome,
    PlannedTask,
    find_past_discordance,
    gate_power,
    known_discordance,
)
from mergegate.tasks.preflight.evidence import Evidence
from mergegate.tasks.stage import runtime, store


def plan_interim_looks(task: EvalTask, evidence: Evidence) -> tuple[int, ...]:
    """Documents of the task, whose data are pinned, after each look; only the first look where the profile wants no
    extension."""
    planned = interim_looks(task.documents or 0, evidence.scoring.first_look)
    return planned if evidence.rule.extend else planned[:1]


def planned_tasks(
    evidence: Evidence, parents: Sequence[Model], past: Sequence[PastGuardOutcome] = ()
) -> list[PlannedTask]:
    """Each guard of a task whose data are pinned, with its looks, and the discordance that an equal merge will have.

    Args:
        parents: Of the merge. Where nothing is known of past nights, those that were scored before tell how answers
            differ.
        past: Guards of earlier nights of the profile, in their order.
    """
    tasks = {task.name: task for task in evidence.tasks if task.documents}
    planned = []
    for guard in evidence.guards:
        if (task := tasks.get(guard.task)) is None:
            continue
        if (found := find_past_discordance(guard, past)) is None:
            scores = {model.name: known_scores(model, task, evidence.scoring, runtime()) for model in parents}
            found = known_discordance(guard, scores, evidence.rule.discordance)
        planned.append(PlannedTask(guard, plan_interim_looks(task, evidence), found.share, str(found)))
    return planned


def forecast_power(
    evidence: Evidence, parents: Sequence[ResolvedCheckpoint], attempts: int, past: Sequence[PastGuardOutcome] = ()
) -> GatePower | None:
    """What the first of so many attempts can tell tonight; None where no guard's documents are counted.

    Args:
        parents: Of the merge. Scores are looked up of those whose files were hashed before.
        past: As of :func:`planned_tasks`.
    """
    known = find_applied_adapters(find_pinned_checkpoints(parents, store().hashes))
    planned = [one for one in planned_tasks(evidence, known, past) if one.guard.guarded_by != ANCHOR]
    return gate_power(planned, evidence.rule.for_attempt(1, attempts)) if planned else None

"""Assess a merge: measure perplexity, evaluate the tasks, extend undecided tasks, and return the verdict.

The tasks of an interim look run one after another, and the task that decides most per second runs first. As soon as one
task can no longer pass, mergegate skips the remaining ones. Work that cannot be skipped (several models, and
tasks without a guard) goes to a runner in parallel. The runner returns the same results as a sequential run, so no
decision depends on it.

A release and a comparison of any two models share this module. It does not depend on where the models come from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

from mergegate.tasks.checkpoints import Model, PinnedCheckpoint
from mergegate.tasks.evaluation import (
    EvalTask,
    Scores,
    count_missing_documents,
    document_seconds,
    evaluate_documents,
    find_backend,
    known_scores,
    pin_data,
)
from mergegate.tasks.gate import (
    ANCHOR,
    RELEASES,
    GatePlan,
    GateVerdict,
    anchor_confidence,
    cannot_pass,
    comparable_parents,
    count_refusals,
    gate,
    is_refused_by_anchor,
    needs_champion,
    order_by_information,
    perplexity_drift,
    record_refusal,
    undecided_tasks,
)
from mergegate.tasks.perplexity import Likelihoods, ensemble_likelihoods, perplexity
from mergegate.tasks.preflight import Evidence, plan_interim_looks, planned_tasks
from mergegate.tasks.runners import Runner, local_runner
from mergegate.tasks.stage import runtime
from mergegate.tasks.store import Artifact, StoredValue

# The parts of each task, by model name.
AllScores = dict[str, list[Artifact[Scores]]]

I = TypeVar("I")  # noqa: E741  # item of a runner; R is its result
R = TypeVar("R")


class Assessment(NamedTuple):
    """A verdict and the evidence that led to it."""

    scores: AllScores  # by model; a task has as many parts as were evaluated
    likelihoods: dict[str, Artifact[Likelihoods]]  # by model
    verdict: StoredValue[GateVerdict]
    evidence: Evidence  # inputs and settings of the measurement


def assess_merge(
    merge: Model,
    parents: Sequence[Model],
    champion: Model | None,
    evidence: Evidence,
    anchor: Model | None = None,
    runner: Runner | None = None,
) -> Assessment:
    """Measure all models until the evidence decides about the merge, then decide.

    Args:
        champion: Release that is published today. None before the first release.
        anchor: Release that the profile anchors the champion's guards to. None if that is the champion itself.
        runner: Runner that measures. Default: this process, one model after another.
    """
    runner = runner or local_runner()
    rule, limits = evidence.rule, evidence.limits
    guards = tuple(guard for guard in evidence.guards if anchor or guard.guarded_by != ANCHOR)
    refusals = count_refusals(anchor.digest, except_merge=merge.digest) if anchor else 0
    stricter = anchor_confidence(rule.confidence, refusals) if anchor else None
    # Perplexity takes seconds and exposes a broken merge immediately. The expensive tasks are then not worth running.
    likelihoods = measure_perplexity((*parents, merge), evidence, runner)
    compared = (
        {name: likelihoods[name] for name in (*_parents_for(limits.reference, parents), merge.name) if likelihoods}
        if limits
        else {}
    )
    broken = limits and perplexity_drift(compared, limits, rule.confidence, merge.name).broken
    tasks = () if broken else tuple(pin_data(task, evidence.scoring.time_limit) for task in evidence.tasks)
    evidence = evidence._replace(tasks=tasks)
    plan = {task.name: plan_interim_looks(task, evidence) for task in tasks}
    models = (*parents, *(release for release in (champion, anchor) if release), merge)
    gate_plan = GatePlan(
        rule,
        merged=merge.name,
        schedule=plan,
        first_release=champion is None and needs_champion(guards),
        parents=_parents_for(rule.reference, parents),
        anchor_confidence=stricter,
    )

    def is_lost(task: str, scores: AllScores) -> bool:
        return cannot_pass(task, guards, scores, gate_plan)

    scores: AllScores = {model.name: [] for model in models}
    look = {task: planned[0] for task, planned in plan.items()}
    undecided = tuple(plan)
    while True:
        scores, waiting = run_look(models, undecided, evidence, look, scores, is_lost, runner)
        verdict = gate(guards, scores, compared, limits, gate_plan, waiting)
        if not (undecided := undecided_tasks(verdict.value)):
            if anchor and is_refused_by_anchor(verdict.value):
                record_refusal(anchor.digest, merge.digest)
            return Assessment(scores, likelihoods, verdict, evidence)
        look |= {task: next(end for end in plan[task] if end > look[task]) for task in undecided}


def measure_ensemble(parents: Sequence[PinnedCheckpoint], evidence: Evidence) -> Artifact[Likelihoods] | None:
    """Return the likelihoods of the held-out text under an ensemble of all parents.

    Returns:
        None if the profile does not request it, or if there are fewer than two parents.
    """
    members = tuple(parent for parent in parents if not parent.is_base)
    if not evidence.ensemble or evidence.documents is None or evidence.windows is None or len(members) < 2:
        return None
    return ensemble_likelihoods(members, evidence.documents, evidence.windows, runtime())


def measure_perplexity(models: Sequence[Model], evidence: Evidence, runner: Runner) -> dict[str, Artifact[Likelihoods]]:
    """Return the likelihoods of the held-out text by model, or an empty dict if the profile names no text."""
    if evidence.documents is None or evidence.windows is None:
        return {}
    readings = [_Reading(model, evidence) for model in models]
    return {
        reading.model.name: likelihoods
        for reading, likelihoods in zip(readings, _all(runner, _read, readings), strict=True)
    }


def run_look(
    models: Sequence[Model],
    names: Sequence[str],
    evidence: Evidence,
    look: Mapping[str, int],
    before: AllScores,
    is_lost: Callable[[str, AllScores], bool],
    runner: Runner,
) -> tuple[AllScores, tuple[str, ...]]:
    """Evaluate one interim look.

    Cached results are always used and come first. A run that was killed or repeated therefore reaches the same verdict.

    Args:
        models: All models, the merge last. A release is scored only if a guard compares with it.
        names: Names of the tasks to evaluate.
        look: Number of documents per task after this look.
        before: Scores after the previous look.
        is_lost: Whether the guards of a task can no longer pass, given the current scores.
        runner: Runner that scores.

    Returns:
        Scores of all models, and the names of the tasks that were skipped because another task can no longer pass. Both
        are in profile order, not in the order of execution.
    """
    tasks = [task for task in evidence.tasks if task.name in names]
    order = _in_order(tasks, models, evidence, look)

    def scoring(model: Model, task: EvalTask) -> _Scoring:
        return _Scoring(model, task, evidence, look[task.name])

    if not find_backend(evidence.scoring.backend).frees_memory:
        # Each model has its own process and takes minutes to load, so run all tasks of the references together.
        references = [scoring(model, task) for model in models[:-1] for task, _ in order]
        _all(runner, _score, [item for item in references if _is_scored(item.model, item.task, evidence)])
    scores, unchecked = before, list[str]()
    for together in _side_by_side(order, evidence) if runner.is_parallel else ([item] for item in order):
        missing = any(count for _, count in together)
        if missing and any(is_lost(name, scores) for name in unchecked):
            left_out = {skipped.name for skipped, _ in order[order.index(together[0]) :]}
            return scores, tuple(task.name for task in tasks if task.name in left_out)
        scorings = [
            scoring(model, task) for task, _ in together for model in models if _is_scored(model, task, evidence)
        ]
        results = _all(runner if missing else local_runner(), _score, scorings)
        for task, count in together:
            unchecked = [task.name] if count else [*unchecked, task.name]
            new = {item.model.name: parts for item, parts in zip(scorings, results, strict=True) if item.task is task}
            scores = {
                name: _with(parts, task.name, new.get(name, ()), evidence.tasks) for name, parts in scores.items()
            }
    return scores, ()


def _side_by_side(order: Sequence[tuple[EvalTask, int]], evidence: Evidence) -> Iterator[list[tuple[EvalTask, int]]]:
    """Yield groups of tasks that can run in parallel: no result in a group can skip a later task of that group."""
    guarded = {guard.task for guard in evidence.guards}
    group: list[tuple[EvalTask, int]] = []
    for task, missing in order:
        if group and (not missing or any(not count or previous.name in guarded for previous, count in group)):
            yield group
            group = []
        group.append((task, missing))
    if group:
        yield group


class _Reading(NamedTuple):
    """The held-out text, to be read by one model."""

    model: Model
    evidence: Evidence


class _Scoring(NamedTuple):
    """The first documents of one task, to be scored with one model."""

    model: Model
    task: EvalTask
    evidence: Evidence
    documents: int


# The functions below are at module level so that other processes can import them.


def _read(reading: _Reading) -> Artifact[Likelihoods]:
    documents, windows = reading.evidence.documents, reading.evidence.windows
    assert documents is not None
    assert windows is not None  # otherwise there is no text to read
    return perplexity(reading.model, documents, windows, runtime())


def _score(scoring: _Scoring) -> list[Artifact[Scores]]:
    return evaluate_documents(scoring.model, scoring.task, scoring.evidence.scoring, scoring.documents, runtime())


def _all(runner: Runner, function: Callable[[I], R], items: Sequence[I]) -> list[R]:
    """Return the results in the order of ``items``.

    If items fail, raise the error of the first failed item in that order. Items that were still running store their
    results.
    """
    results: dict[int, R] = {}
    failures: dict[int, Exception] = {}
    for index, result in runner.each(function, items):
        if isinstance(result, Exception):
            failures[index] = result
            if all(earlier in results for earlier in range(index)):
                break  # no remaining item could take precedence over this error
        else:
            results[index] = result
            if failures and all(earlier in results for earlier in range(min(failures))):
                break
    if failures:
        raise failures[min(failures)]
    return [results[index] for index in range(len(items))]


def _with(
    parts: Sequence[Artifact[Scores]], name: str, new: Sequence[Artifact[Scores]], tasks: Sequence[EvalTask]
) -> list[Artifact[Scores]]:
    """Return the parts of one model with those of one task replaced, in the order of ``tasks``."""
    position = {task.name: index for index, task in enumerate(tasks)}
    others = [part for part in parts if _task_of(part) != name]
    # A stable sort keeps the parts of a task in order.
    return sorted((*others, *new), key=lambda part: position[_task_of(part)])


def _task_of(part: Artifact[Scores]) -> str:
    return part.value.tasks[0].task


def _in_order(
    tasks: Sequence[EvalTask], models: Sequence[Model], evidence: Evidence, look: Mapping[str, int]
) -> list[tuple[EvalTask, int]]:
    """Return the tasks in execution order, with the number of documents still to be evaluated."""
    missing, reference_scores = {}, {}
    for task in tasks:
        scored = [model for model in models if _is_scored(model, task, evidence)]
        parts = {model.name: known_scores(model, task, evidence.scoring, runtime()) for model in scored}
        counts = (
            count_missing_documents(task, evidence.scoring, look[task.name], parts_of_model)
            for parts_of_model in parts.values()
        )
        missing[task.name] = sum(counts)
        reference_scores[task.name] = [part for model in models[:-1] for part in parts.get(model.name, ())]
    if not any(missing.values()):
        return [(task, 0) for task in tasks]  # nothing runs, so the order does not matter
    seconds_per_document = document_seconds(tasks, reference_scores)
    seconds = {name: count * seconds_per_document[name] for name, count in missing.items()}
    planned = [
        planned_task for planned_task in planned_tasks(evidence, models[:-1]) if planned_task.guard.task in missing
    ]
    by_name = {task.name: task for task in tasks}
    return [(by_name[name], missing[name]) for name in order_by_information(planned, look, seconds)]


def _is_scored(model: Model, task: EvalTask, evidence: Evidence) -> bool:
    """Return whether a model is scored on a task. A release is scored only if a guard compares with it."""
    return model.name not in RELEASES or any(
        guard.task == task.name and guard.guarded_by == model.name for guard in evidence.guards
    )


def _parents_for(reference: str | tuple[str, ...], parents: Sequence[Model]) -> tuple[str, ...]:
    """Return the names of the parents from which the best one is chosen."""
    merged = {parent.name for parent in parents if not isinstance(parent, PinnedCheckpoint) or parent.is_merged}
    return comparable_parents(reference, [parent.name for parent in parents], merged, "reference")

"""Assessing a merge: perplexity, then the tasks, then more of those tasks that are not decided, and the verdict.

The tasks of a look are run one after another, what decides most per second first; when one is lost for good, those that
have not been run are left out. What cannot be left out goes to a runner together (models side by side, and tasks that
nothing guards): it is asked what would have been asked one by one, so nothing that is decided here depends on it.

The same for a release and for a comparison of any two models: nothing here knows where they come from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

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

# By model, the parts of each task.
AllScores = dict[str, list[Artifact[Scores]]]

I = TypeVar("I")  # noqa: E741  # an item of a runner; R its result
R = TypeVar("R")


class Assessment(NamedTuple):
    """A verdict with the evidence that led to it."""

    scores: AllScores  # of a task as many parts as were evaluated
    likelihoods: dict[str, Artifact[Likelihoods]]  # by model
    verdict: StoredValue[GateVerdict]
    evidence: Evidence  # on what, and how, all of it was measured


def assess_merge(
    merge: Model,
    parents: Sequence[Model],
    champion: Model | None,
    evidence: Evidence,
    anchor: Model | None = None,
    runner: Runner | None = None,
) -> Assessment:
    """Measure all models as far as it takes to decide about the merge, and decide.

    Args:
        champion: The release that is published today; None before the first one.
        anchor: The release that the profile anchors the champion's guards to; None where that is the champion.
        runner: Who measures; None: this process, one model after another.
    """
    runner = runner or local_runner()
    rule, limits = evidence.rule, evidence.limits
    guards = tuple(guard for guard in evidence.guards if anchor or guard.guarded_by != ANCHOR)
    refusals = count_refusals(anchor.digest, but=merge.digest) if anchor else 0
    stricter = anchor_confidence(rule.confidence, refusals) if anchor else None
    # Perplexity takes seconds and sees a broken merge at once; then the costly tasks are not worth running.
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
    judging: dict[str, Any] = {
        "merged": merge.name,
        "schedule": plan,
        "first_release": champion is None and needs_champion(guards),
        "parents": _parents_for(rule.reference, parents),
        "anchor_confidence": stricter,
    }

    def is_lost(task: str, scores: AllScores) -> bool:
        return cannot_pass(task, guards, scores, rule, **judging)

    scores: AllScores = {model.name: [] for model in models}
    look = {task: planned[0] for task, planned in plan.items()}
    looked_at = tuple(plan)
    while True:
        scores, waiting = run_look(models, looked_at, evidence, look, scores, is_lost, runner)
        verdict = gate(guards, scores, compared, limits, rule, waiting=waiting, **judging)
        if not (looked_at := undecided_tasks(verdict.value)):
            if anchor and is_refused_by_anchor(verdict.value):
                record_refusal(anchor.digest, merge.digest)
            return Assessment(scores, likelihoods, verdict, evidence)
        look |= {task: next(end for end in plan[task] if end > look[task]) for task in looked_at}


def measure_ensemble(parents: Sequence[PinnedCheckpoint], evidence: Evidence) -> Artifact[Likelihoods] | None:
    """The held-out text under all parents together; None where the profile does not ask, or there is one only."""
    members = tuple(parent for parent in parents if not parent.is_base)
    if not evidence.ensemble or evidence.documents is None or evidence.windows is None or len(members) < 2:
        return None
    return ensemble_likelihoods(members, evidence.documents, evidence.windows, runtime())


def measure_perplexity(models: Sequence[Model], evidence: Evidence, runner: Runner) -> dict[str, Artifact[Likelihoods]]:
    """Likelihoods of the held-out text by model; empty when the profile names no text."""
    if evidence.documents is None or evidence.windows is None:
        return {}
    asked = [_Reading(model, evidence) for model in models]
    return {one.model.name: found for one, found in zip(asked, _all(runner, _read, asked), strict=True)}


def run_look(
    models: Sequence[Model],
    names: Sequence[str],
    evidence: Evidence,
    look: Mapping[str, int],
    before: AllScores,
    is_lost: Callable[[str, AllScores], bool],
    runner: Runner,
) -> tuple[AllScores, tuple[str, ...]]:
    """Scores of all models after a look, and the tasks that were not run because another is lost; both in the order of
    the profile, in whatever order they were run.

    What the store has already is never left out, and comes first: so a run that was killed, or is made again, comes to
    the verdict that it would have come to.

    Args:
        models: The merge last. A release is scored only where a guard asks for it.
        names: Of the tasks that are looked at.
        look: Documents of each after it.
        before: Scores after the look before.
        is_lost: Whether the guards on a task have failed for good, with scores that are known so far.
        runner: Who scores.
    """
    tasks = [task for task in evidence.tasks if task.name in names]
    order = _in_order(tasks, models, evidence, look)

    def asked(model: Model, task: EvalTask) -> _Scoring:
        return _Scoring(model, task, evidence, look[task.name])

    if not find_backend(evidence.scoring.backend).frees_memory:
        # Each model has a process of its own and takes minutes to load: references are asked all their tasks at once.
        references = [asked(model, task) for model in models[:-1] for task, _ in order]
        _all(runner, _score, [one for one in references if _is_asked(one.model, one.task, evidence)])
    scores, unchecked = before, list[str]()
    for together in _side_by_side(order, evidence) if runner.side_by_side else ([one] for one in order):
        missing = any(count for _, count in together)
        if missing and any(is_lost(one, scores) for one in unchecked):
            left_out = {other.name for other, _ in order[order.index(together[0]) :]}
            return scores, tuple(task.name for task in tasks if task.name in left_out)
        each = [asked(model, task) for task, _ in together for model in models if _is_asked(model, task, evidence)]
        found = _all(runner if missing else local_runner(), _score, each)
        for task, count in together:
            unchecked = [task.name] if count else [*unchecked, task.name]
            new = {one.model.name: parts for one, parts in zip(each, found, strict=True) if one.task is task}
            scores = {
                name: _with(parts, task.name, new.get(name, ()), evidence.tasks) for name, parts in scores.items()
            }
    return scores, ()


def _side_by_side(order: Sequence[tuple[EvalTask, int]], evidence: Evidence) -> Iterator[list[tuple[EvalTask, int]]]:
    """Tasks that can be asked together: whatever those before come to, the next would be asked as well."""
    guarded = {guard.task for guard in evidence.guards}
    group: list[tuple[EvalTask, int]] = []
    for task, missing in order:
        if group and (not missing or any(not count or other.name in guarded for other, count in group)):
            yield group
            group = []
        group.append((task, missing))
    if group:
        yield group


class _Reading(NamedTuple):
    """The held-out text under one model, to be read."""

    model: Model
    evidence: Evidence


class _Scoring(NamedTuple):
    """One model on the first documents of one task, to be scored."""

    model: Model
    task: EvalTask
    evidence: Evidence
    documents: int


# Of this module, so that other processes find them.


def _read(one: _Reading) -> Artifact[Likelihoods]:
    documents, windows = one.evidence.documents, one.evidence.windows
    assert documents is not None
    assert windows is not None  # or there was nothing to read
    return perplexity(one.model, documents, windows, runtime())


def _score(one: _Scoring) -> list[Artifact[Scores]]:
    return evaluate_documents(one.model, one.task, one.evidence.scoring, one.documents, runtime())


def _all(runner: Runner, function: Callable[[I], R], items: Sequence[I]) -> list[R]:
    """Results in the order of ``items``. Raises what the first of them raises that fails; the others go on until then,
    and what they have done is in the store."""
    results: dict[int, R] = {}
    failures: dict[int, Exception] = {}
    for at, result in runner.each(function, items):
        if isinstance(result, Exception):
            failures[at] = result
            if all(before in results for before in range(at)):
                break  # nothing that is still to come is raised in its place
        else:
            results[at] = result
            if failures and all(before in results for before in range(min(failures))):
                break
    if failures:
        raise failures[min(failures)]
    return [results[at] for at in range(len(items))]


def _with(
    parts: Sequence[Artifact[Scores]], name: str, new: Sequence[Artifact[Scores]], tasks: Sequence[EvalTask]
) -> list[Artifact[Scores]]:
    """The parts of one model with those of one task replaced, in the order of ``tasks``."""
    place = {task.name: at for at, task in enumerate(tasks)}
    others = [part for part in parts if _task_of(part) != name]
    return sorted((*others, *new), key=lambda part: place[_task_of(part)])  # stable: parts of a task stay in order


def _task_of(part: Artifact[Scores]) -> str:
    return part.value.tasks[0].task


def _in_order(
    tasks: Sequence[EvalTask], models: Sequence[Model], evidence: Evidence, look: Mapping[str, int]
) -> list[tuple[EvalTask, int]]:
    """The tasks in the order in which they are run, with the documents that models have to be asked."""
    missing, known = {}, {}
    for task in tasks:
        asked = [model for model in models if _is_asked(model, task, evidence)]
        parts = {model.name: known_scores(model, task, evidence.scoring, runtime()) for model in asked}
        counts = (count_missing_documents(task, evidence.scoring, look[task.name], each) for each in parts.values())
        missing[task.name] = sum(counts)
        known[task.name] = [part for model in models[:-1] for part in parts.get(model.name, ())]
    if not any(missing.values()):
        return [(task, 0) for task in tasks]  # nothing is run: the order is nobody's business
    each_takes = document_seconds(tasks, known)
    seconds = {name: count * each_takes[name] for name, count in missing.items()}
    planned = [one for one in planned_tasks(evidence, models[:-1]) if one.guard.task in missing]
    by_name = {task.name: task for task in tasks}
    return [(by_name[name], missing[name]) for name in order_by_information(planned, look, seconds)]


def _is_asked(model: Model, task: EvalTask, evidence: Evidence) -> bool:
    """A release is scored only where a guard asks for it."""
    return model.name not in RELEASES or any(
        guard.task == task.name and guard.guarded_by == model.name for guard in evidence.guards
    )


def _parents_for(reference: str | tuple[str, ...], parents: Sequence[Model]) -> tuple[str, ...]:
    """Names of the parents that the best one is chosen from."""
    merged = {parent.name for parent in parents if not isinstance(parent, PinnedCheckpoint) or parent.is_merged}
    return comparable_parents(reference, [parent.name for parent in parents], merged, "reference")

"""Measure a merge and its references, and return the gate's verdict.

Perplexity comes first, then the tasks, then more documents of each undecided task. In an interim look, tasks run one
after another, ordered by the information that they give per second. As soon as one task can no longer pass, mergegate
skips the remaining ones. Work that is never skipped (several models on one task, and tasks without a guard) runs in
parallel on a runner, with the same results as in sequence.

Releases and comparisons of two models share this module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

from mergegate.merge_core.architecture import kind_of_directory
from mergegate.tasks.base.runners import Runner, local_runner
from mergegate.tasks.base.stage import runtime
from mergegate.tasks.base.store import Artifact, StoredValue
from mergegate.tasks.merge import find_copied_parent
from mergegate.tasks.models.checkpoints import Model, PinnedCheckpoint, QuantizedModel
from mergegate.tasks.preflight import Evidence, plan_interim_looks, planned_tasks
from mergegate.tasks.quality.evaluation import (
    EvalTask,
    Scores,
    count_missing_documents,
    document_seconds,
    evaluate_documents,
    find_backend,
    known_scores,
    lengthen_answers,
    pin_data,
)
from mergegate.tasks.quality.gate import (
    ANCHOR,
    RELEASES,
    GateInputs,
    GatePlan,
    GateVerdict,
    anchor_confidence,
    cannot_pass,
    comparable_parents,
    count_refusals,
    describe_untested,
    gate,
    needs_champion,
    order_by_information,
    perplexity_drift,
    record_refusal,
    tasks_with_short_answers,
    undecided_tasks,
)
from mergegate.tasks.quality.perplexity import Likelihoods, perplexity

# Scores by model name: one artifact for each part of a task that was evaluated.
AllScores = dict[str, list[Artifact[Scores]]]

I = TypeVar("I")  # noqa: E741  # item of a runner; R is its result
R = TypeVar("R")


class Assessment(NamedTuple):
    """A verdict and the evidence that led to it."""

    scores: AllScores  # by model; a task has as many parts as were evaluated
    likelihoods: dict[str, Artifact[Likelihoods]]  # by model
    verdict: StoredValue[GateVerdict]
    evidence: Evidence  # inputs and settings of the measurement
    gate_inputs: GateInputs  # everything that the verdict follows from


def assess_merge(
    merge: Model,
    parents: Sequence[Model],
    champion: Model | None,
    evidence: Evidence,
    anchor: Model | None = None,
    runner: Runner | None = None,
) -> Assessment:
    """Measure all models until the gate can decide about the merge. Return its verdict and the evidence.

    Args:
        merge: Merge to judge.
        parents: Models that were merged. The parents in ``evidence.unmeasured`` are not evaluated.
        champion: Current release. None before the first release.
        evidence: Pinned tasks and texts to measure, with the guards, drift limits and rule of the gate.
        anchor: Release that the profile anchors the champion's guards to. None if that is the champion itself.
        runner: Runner that measures. Default: this process, one model after another.
    """
    runner = runner or local_runner()
    rule, limits = evidence.rule, evidence.limits
    guards = tuple(guard for guard in evidence.guards if anchor or guard.guarded_by != ANCHOR)
    refusals = count_refusals(anchor.digest, except_merge=merge.digest) if anchor else 0
    stricter = anchor_confidence(rule.confidence, refusals) if anchor else None
    # Compare the weights first, because this is cheap and a copy needs no evaluation. Variants are meant to be copies.
    is_variant = isinstance(merge, QuantizedModel)
    copied = None if is_variant else find_copied_parent.build(merge, tuple(parents)).value.parent
    copy_of = parents[copied].name if copied is not None else ""
    parents = [
        parent for parent in parents if not (isinstance(parent, PinnedCheckpoint) and parent.ref in evidence.unmeasured)
    ]
    is_refused_copy = bool(copy_of) and copy_of not in evidence.accepted_copies
    # Perplexity takes seconds and exposes a broken merge immediately. The expensive tasks are then not worth running.
    likelihoods: dict[str, Artifact[Likelihoods]] = {}
    if evidence.documents is not None and not is_refused_copy and evidence.windows is not None:
        texts = [_TextOfModel(model, evidence) for model in (*parents, merge)]
        results = _run_all(runner, _measure_perplexity, texts)
        likelihoods = {text.model.name: result for text, result in zip(texts, results, strict=True)}
    compared = (
        {name: likelihoods[name] for name in (*_parents_for(limits.reference, parents), merge.name) if likelihoods}
        if limits and not is_refused_copy
        else {}
    )
    broken = compared and limits and perplexity_drift(compared, limits, rule.confidence, merge.name).broken
    tasks = (
        ()
        if broken or is_refused_copy
        else tuple(pin_data(task, evidence.scoring.time_limit) for task in evidence.tasks)
    )
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
        copy_of=copy_of,
        accepted_copies=evidence.accepted_copies,
        untested=describe_untested(kind_of_directory(merge.tokenizer_directory), (task.form for task in tasks)),
    )

    def is_lost(task: str, scores: AllScores) -> bool:
        return cannot_pass(task, guards, scores, gate_plan)

    scores: AllScores = {model.name: [] for model in models}
    documents = {task: planned[0] for task, planned in plan.items()}
    undecided = tuple(plan)
    doublings: dict[str, int] = {}
    while True:
        look = _InterimLook(models, evidence, undecided, documents, doublings, is_lost)
        scores, waiting = _run_look(look, scores, runner)
        gate_inputs = GateInputs(guards, scores, compared, limits, gate_plan, waiting)
        verdict = gate(*gate_inputs)
        while short := tasks_with_short_answers(verdict.value):
            doublings |= {task: doublings.get(task, 0) + 1 for task in short}
            scores = _lengthen(look._replace(tasks=short), scores, runner)
            gate_inputs = gate_inputs._replace(scores=scores)
            verdict = gate(*gate_inputs)
        if not (undecided := undecided_tasks(verdict.value)):
            with_anchor = [suite.outcome for suite in verdict.value.suites if suite.reference == ANCHOR]
            with_anchor += [guard.outcome for guard in verdict.value.guards if guard.reference == ANCHOR]
            if anchor and any(outcome != "pass" for outcome in with_anchor):
                record_refusal(anchor.digest, merge.digest)
            return Assessment(scores, likelihoods, verdict, evidence, gate_inputs)
        documents = documents | {task: next(end for end in plan[task] if end > documents[task]) for task in undecided}


class _InterimLook(NamedTuple):
    """One interim look.

    ``models`` ends with the merge. A release among them is scored only if a guard compares with it. ``documents`` is
    the number of documents of each task that are evaluated when the look ends. ``doublings`` is how often the token
    budget of each task has been doubled for answers that were cut off. ``is_lost`` tells whether the guards of
    a task can no longer pass, given the current scores.
    """

    models: Sequence[Model]
    evidence: Evidence
    tasks: Sequence[str]
    documents: Mapping[str, int]
    doublings: Mapping[str, int]
    is_lost: Callable[[str, AllScores], bool]


def _run_look(look: _InterimLook, before: AllScores, runner: Runner) -> tuple[AllScores, tuple[str, ...]]:
    """Evaluate one interim look, and add its scores to those ``before`` it.

    Cached results come first, so that a repeated run reaches the same verdict.

    Returns:
        Scores of all models, and the names of the tasks that were skipped because another task can no longer pass. Both
        are in profile order, not in the order of execution.
    """
    models, evidence = look.models, look.evidence
    tasks = [task for task in evidence.tasks if task.name in look.tasks]
    order = _in_order(tasks, look)

    def scorings_of(models: Sequence[Model], tasks: Sequence[EvalTask]) -> list[_Scoring]:
        return [
            _Scoring(model, task, evidence, look.documents[task.name], look.doublings.get(task.name, 0))
            for task in tasks
            for model in models
            if _is_scored(model, task, evidence)
        ]

    # A model with a process of its own takes minutes to load, so run all tasks of such a reference together.
    if apart := [model for model in models[:-1] if not find_backend(evidence.scoring_of(model).backend).frees_memory]:
        for_each_model = [scorings_of([model], [task for task, _ in order]) for model in apart]
        _run_all(runner, _score, [scoring for scorings in for_each_model for scoring in scorings])
    scores, unchecked = before, list[str]()
    for group in _independent_groups(order, evidence) if runner.is_parallel else ([item] for item in order):
        has_missing = any(count for _, count in group)
        if has_missing and any(look.is_lost(name, scores) for name in unchecked):
            left_out = {skipped.name for skipped, _ in order[order.index(group[0]) :]}
            return scores, tuple(task.name for task in tasks if task.name in left_out)
        scorings = scorings_of(models, [task for task, _ in group])
        results = _run_all(runner if has_missing else local_runner(), _score, scorings)
        for task, count in group:
            unchecked = [task.name] if count else [*unchecked, task.name]
        scores = _replace_scores(scores, scorings, results)
    return scores, ()


def _replace_scores(
    before: AllScores, scorings: Sequence[_Scoring], results: Sequence[list[Artifact[Scores]]]
) -> AllScores:
    """Return the scores with those of each task and model in ``scorings`` replaced, in profile order."""
    position = {task.name: index for index, task in enumerate(scorings[0].evidence.tasks)} if scorings else {}
    scores = dict(before)
    for scoring, parts in zip(scorings, results, strict=True):
        known = scores[scoring.model.name]
        kept = [part for part in known if part not in _parts_of(scoring.task, known)]
        # A stable sort keeps the parts of a task in order.
        scores[scoring.model.name] = sorted((*kept, *parts), key=lambda part: position[part.value.tasks[0].task])
    return scores


def _parts_of(task: EvalTask, scores: Sequence[Artifact[Scores]]) -> list[Artifact[Scores]]:
    return [part for part in scores if part.value.tasks[0].task == task.name]


def _lengthen(look: _InterimLook, before: AllScores, runner: Runner) -> AllScores:
    """Generate the cut-off answers of the look's tasks again, for all models, with the doubled budget."""
    evidence = look.evidence
    # All tasks of a model follow one another, because some backends load each model in a process of its own.
    scorings = [
        _Scoring(model, task, evidence, look.documents[task.name], 1, tuple(_parts_of(task, before[model.name])))
        for model in look.models
        for task in evidence.tasks
        if task.name in look.tasks and _is_scored(model, task, evidence)
    ]
    return _replace_scores(before, scorings, _run_all(runner, _score, scorings))


def _independent_groups(
    order: Sequence[tuple[EvalTask, int]], evidence: Evidence
) -> Iterator[list[tuple[EvalTask, int]]]:
    """Yield groups of tasks that can run in parallel: no result in a group can make a later task of it unnecessary."""
    guarded = {guard.task for guard in evidence.guards}
    group: list[tuple[EvalTask, int]] = []
    for task, missing in order:
        if group and (not missing or any(not count or previous.name in guarded for previous, count in group)):
            yield group
            group = []
        group.append((task, missing))
    if group:
        yield group


class _TextOfModel(NamedTuple):
    """The held-out text, with the model that reads it."""

    model: Model
    evidence: Evidence


class _Scoring(NamedTuple):
    """The first ``documents`` of one task, with the model to score on them.

    ``doublings`` is how often the token budget of cut-off answers is doubled. ``known`` holds the scores whose answers
    are lengthened. Empty: the documents are evaluated first.
    """

    model: Model
    task: EvalTask
    evidence: Evidence
    documents: int
    doublings: int = 0
    known: tuple[Artifact[Scores], ...] = ()


# The functions below are at module level so that other processes can import them.


def _measure_perplexity(text: _TextOfModel) -> Artifact[Likelihoods]:
    documents, windows = text.evidence.documents, text.evidence.windows
    assert documents is not None
    assert windows is not None  # otherwise there is no text to read
    return perplexity(text.model, documents, windows, runtime())


def _score(scoring: _Scoring) -> list[Artifact[Scores]]:
    model, task, settings = scoring.model, scoring.task, scoring.evidence.scoring_of(scoring.model)
    parts = list(scoring.known) or evaluate_documents(model, task, settings, scoring.documents, runtime())
    if not scoring.doublings:
        return parts
    limit = scoring.evidence.rule.max_answer_tokens
    return lengthen_answers(model, task, settings, parts, scoring.doublings, limit, runtime())


def _run_all(runner: Runner, function: Callable[[I], R], items: Sequence[I]) -> list[R]:
    """Run ``function`` on all items, and return the results in the order of ``items``.

    If items fail, raise the error of the first failed one. Items that are still running store their results.
    """
    results: dict[int, R] = {}
    failures: dict[int, Exception] = {}
    for index, result in runner.run_each(function, items):
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


def _in_order(tasks: Sequence[EvalTask], look: _InterimLook) -> list[tuple[EvalTask, int]]:
    """Return the tasks in execution order, with the number of documents still to be evaluated."""
    evidence, references = look.evidence, look.models[:-1]
    missing, reference_scores = {}, {}
    for task in tasks:
        parts = {
            model.name: known_scores(model, task, evidence.scoring_of(model), runtime())
            for model in look.models
            if _is_scored(model, task, evidence)
        }
        # Backends divide documents into the same parts.
        missing[task.name] = sum(
            count_missing_documents(task, evidence.scoring, look.documents[task.name], parts_of_model)
            for parts_of_model in parts.values()
        )
        reference_scores[task.name] = [part for model in references for part in parts.get(model.name, ())]
    if not any(missing.values()):
        return [(task, 0) for task in tasks]  # nothing runs, so the order does not matter
    seconds_per_document = document_seconds(tasks, reference_scores)
    seconds = {name: count * seconds_per_document[name] for name, count in missing.items()}
    planned = [
        planned_task for planned_task in planned_tasks(evidence, references) if planned_task.guard.task in missing
    ]
    by_name = {task.name: task for task in tasks}
    return [(by_name[name], missing[name]) for name in order_by_information(planned, look.documents, seconds)]


def _is_scored(model: Model, task: EvalTask, evidence: Evidence) -> bool:
    """Return whether a model is scored on a task. A release is scored only if a guard of the task compares with it."""
    return model.name not in RELEASES or any(
        guard.task == task.name and guard.guarded_by == model.name for guard in evidence.guards
    )


def _parents_for(reference: str | tuple[str, ...], parents: Sequence[Model]) -> tuple[str, ...]:
    """Return the names of the parents from which the best one is chosen."""
    merged = {parent.name for parent in parents if not isinstance(parent, PinnedCheckpoint) or parent.is_merged}
    return comparable_parents(reference, [parent.name for parent in parents], merged, "reference")

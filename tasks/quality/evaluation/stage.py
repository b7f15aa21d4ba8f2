"""Score one model on one task, as cached stages that store a score for every document.

The unit of caching is one model and one part of the documents of one task. Adding a task to a profile costs only that
task, each parent is evaluated once, and a larger sample costs only the additional documents. All artifacts for one
model, task and scoring form a family in the store, from which interim looks are assembled::

    tasks = pin_sound_tasks(names, root, hashes, None)
    parts = evaluate_documents(model, tasks["gsm8k"], scoring, 500, runtime())      # first look
    parts = evaluate_documents(model, tasks["gsm8k"], scoring, 1000, runtime())     # second look: 500 more documents
    scores = join_parts(parts)

Answers that were cut off are generated again with twice the budget (``lengthen_answers``). The scores of all other
documents stay. The key is that of the earlier scores and the new budget, so a later run, and other interim looks, reuse
the longer answers.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple
from uuid import uuid4

from mergegate.merge_core.errors import InvalidInput
from mergegate.merge_core.files import JOURNAL, JournalLocation, keep_only_journal
from mergegate.tasks.base.stage import Runtime, StageValue, advance, join_progress, stage, value_stage, versions
from mergegate.tasks.base.store import Artifact
from mergegate.tasks.models.checkpoints import Model, files_fingerprint
from mergegate.tasks.quality.evaluation.backends import DEFAULT_BUDGET, find_backend
from mergegate.tasks.quality.evaluation.definitions.task import EvalTask
from mergegate.tasks.quality.evaluation.document_order import (
    DataSource,
    DocumentRange,
    Piece,
    cover_documents,
    document_ranges,
    document_sort_key,
    sample_ranges,
)
from mergegate.tasks.quality.evaluation.scoring import harness, loading
from mergegate.tasks.quality.evaluation.scoring.document_scores import (
    SCORES_FILE,
    DocumentScore,
    read_document_scores,
    write_document_scores,
)
from mergegate.tasks.quality.evaluation.scoring.harness import LongerAnswers, ScoringJob
from mergegate.tasks.quality.evaluation.scoring.lm_eval_tasks import BUDGET_NAMES
from mergegate.tasks.quality.evaluation.scoring.loading import CountLimit, TaskSize, revision_now
from mergegate.tasks.quality.evaluation.scoring.metrics import documents_of
from mergegate.tasks.quality.evaluation.scoring.scores import Scores, join_parts, prompt_cuts, summarize
from mergegate.tasks.quality.evaluation.settings import Scoring

# Modules of the packages that prepare pictures, by distribution.
_PICTURE_LIBRARIES = {"pillow": "PIL", "torchvision": "torchvision"}
_CHOICES = 4.0  # default number of choices of a document
GENERATED = 30.0  # cost of a generated answer relative to a choice, from GSM8K and MMLU on one CPU


class TaskSources(StageValue):
    """Datasets from which a task is loaded, unless all of its data is local."""

    sources: tuple[DataSource, ...]

    def summary(self) -> str:
        return ", ".join(dict.fromkeys(source.path for source in self.sources))


@stage("evaluate", version=7, subject="model", resumable=True, apart="part")
def evaluate(
    out: Path, model: Model, task: EvalTask, scoring: Scoring, part: DocumentRange, runtime: Runtime
) -> Scores:
    """Score ``model`` on one part of ``task`` under every metric, and write all scores to ``outcomes.parquet``.

    The score of a group such as ``mmlu`` is the mean over all of its documents. An interrupted run resumes from its
    journal, with the same batches as an uninterrupted run.

    Raises:
        InvalidInput: If the model or the task's data cannot be loaded, the task has no per-document score, or the
            scoring process died.
        Refused: If scoring takes longer than ``scoring.time_limit``.
    """
    began = time.monotonic()
    key = evaluate.key(model, task, scoring, part, runtime)
    job = ScoringJob(model, task, scoring, part, runtime.device, _journal(out, key, model, scoring))
    rows = harness.score_in_child(job, lambda done, total: advance(done, total, f"requests of {task.name}"))
    write_document_scores(out / SCORES_FILE, rows)
    return Scores(
        model=model.name,
        lm_eval_version=versions("lm_eval")["lm_eval"],
        part=part,
        seed=scoring.seed,
        seconds=time.monotonic() - began,
        data={task.name: task.data} if task.data else {},
        prompts=prompt_cuts(task.name, rows),
        **summarize(task.name, rows),
    )


def _journal(out: Path, key: str, model: Model, scoring: Scoring) -> JournalLocation:
    """Keep only the journal in ``out``, and return its location."""
    keep_only_journal(out)
    # The server is not part of the key, but a run must not resume answers that another server gave.
    endpoint = scoring.server.at(model.name) if scoring.server else None
    return JournalLocation(out / JOURNAL, f"{key} {endpoint!r} {files_fingerprint([model])}")


@stage("excerpt", version=3)
def excerpt(out: Path, scores: Artifact[Scores], part: DocumentRange) -> Scores:
    """Extract the scores for ``part``, a range within that of the artifact, as if only it had been evaluated."""
    value, rows = scores.value, read_document_scores(scores.directory / SCORES_FILE)
    documents = sorted(documents_of(rows), key=lambda document: document_sort_key(document[0], document[1], value.seed))
    if value.part is None or len(documents) != len(value.part):
        raise InvalidInput(
            f"{value.tasks[0].task}: scores of {value.model}",
            found=f"{len(documents):,} scored documents",
            expected=f"a score for each of {value.part}",
            remedy="delete 'evaluate' from the store and run again",
        )
    selected = set(documents[part.first - value.part.first : part.last - value.part.first])
    selected_rows = [row for row in rows if (row.task, row.doc_id) in selected]
    write_document_scores(out / SCORES_FILE, selected_rows)
    task = value.tasks[0].task
    update = {**summarize(task, selected_rows), "prompts": prompt_cuts(task, selected_rows)}
    return value.model_copy(update={**update, "part": part, "seconds": None})


def evaluate_documents(
    model: Model, task: EvalTask, scoring: Scoring, documents: int | None, runtime: Runtime
) -> list[Artifact[Scores]]:
    """Score ``model`` on the first ``documents`` documents of ``task``, and return the artifacts, one per part.

    ``documents`` counts from the start of the task's sample. None, or a number larger than the task has, means all
    documents. The artifacts are in the order of the sample.
    Documents with stored scores are not evaluated again, even if they were divided into other parts (see
    ``cover_documents``). A stored part that extends beyond ``documents`` contributes an excerpt. Raises
    the same errors as ``evaluate``.
    """
    task = pin_data(task, scoring.time_limit)
    runtime = _with_libraries(task, scoring, runtime)
    # Hold the family: two concurrent runs with different looks would otherwise score some documents twice.
    with evaluate.hold_family(model=model, task=task, scoring=scoring, runtime=runtime):
        pieces = _pieces(task, scoring, documents, known_scores(model, task, scoring, runtime))
        with join_progress(evaluate.name, model.name, [len(piece.scored) for piece in pieces]) as report:
            artifacts = []
            for piece in pieces:
                artifact = evaluate(model, task, scoring, piece.scored, runtime)
                artifacts.append(artifact if piece.counted == piece.scored else excerpt(artifact, piece.counted))
            report.summary = join_parts(artifacts).summary()
    return artifacts


def known_scores(model: Model, task: EvalTask, scoring: Scoring, runtime: Runtime) -> tuple[Artifact[Scores], ...]:
    """Return all stored scores of ``model`` on ``task``, whose data is pinned, for any range of documents."""
    runtime = _with_libraries(task, scoring, runtime)
    return evaluate.family(model=model, task=task, scoring=scoring, runtime=runtime)


def count_missing_documents(
    task: EvalTask, scoring: Scoring, documents: int | None, scores: Sequence[Artifact[Scores]]
) -> int:
    """Return how many of the first ``documents`` documents have no score in ``scores`` (from ``known_scores``)."""
    ranges = {part.value.part for part in scores}
    return sum(len(piece.scored) for piece in _pieces(task, scoring, documents, scores) if piece.scored not in ranges)


def _pieces(
    task: EvalTask, scoring: Scoring, documents: int | None, scores: Sequence[Artifact[Scores]]
) -> tuple[Piece, ...]:
    total = task.documents or 0
    limit = total if documents is None else min(documents, total)
    ranges = [part.value.part for part in scores if part.value.part]
    start = task.sample_start
    sample = sample_ranges(total, start, limit)
    return cover_documents(sample, document_ranges(total, task.first_look(scoring), start), ranges)


def with_backend(scoring: Scoring, runtime: Runtime) -> Runtime:
    """Add the library versions of the backend to ``runtime``."""
    if not (library_versions := find_backend(scoring.backend).library_versions()):
        return runtime
    return runtime.model_copy(update={"libraries": {**runtime.libraries, **library_versions}})


def _with_libraries(task: EvalTask, scoring: Scoring, runtime: Runtime) -> Runtime:
    """Add to ``runtime`` the versions of the libraries that score ``task``: those of its own, or of the backend."""
    if task.built_in is None:
        runtime = with_backend(scoring, runtime)
        if task.form != "pictures":
            return runtime
        names = (name for name, module in _PICTURE_LIBRARIES.items() if find_spec(module))
        return runtime.model_copy(update={"libraries": {**runtime.libraries, **versions(*names)}})
    return runtime.model_copy(update={"libraries": {**runtime.libraries, **versions(*task.built_in.libraries)}})


@value_stage("sources", version=1, subject="task")
def find_sources(task: EvalTask, limit: CountLimit) -> TaskSources:
    """Load ``task`` once to find the datasets to which its definition refers."""
    sources = loading.inspect_in_child(task, limit.seconds).data.sources
    return TaskSources(sources=tuple(source.model_copy(update={"revision": ""}) for source in sources))


@value_stage("documents", version=4, subject="task")
def count_task(task: EvalTask, revisions: tuple[str, ...], limit: CountLimit) -> TaskSize:
    """Load the data of ``task`` in the model process, count its documents, and compute the digest that pins them.

    ``revisions`` (see ``data_revisions``) makes the stage run again when the datasets change.

    Raises:
        InvalidInput: If the data cannot be loaded.
        Refused: If loading takes longer than ``limit``.
    """
    return loading.inspect_in_child(task, limit.seconds)


def data_revisions(task: EvalTask, limit: CountLimit) -> tuple[str, ...]:
    """Return the current revisions of the datasets of ``task``; only the first call for a task is slow.

    The result is empty for local data, whose content is in the task's digest. If a revision is unknown, the result is a
    unique text, so that the data is loaded again. Raises the same errors as ``find_sources``.
    """
    if task.is_local:
        return ()
    revisions = [revision_now(source) for source in find_sources.build(task, limit).value.sources]
    resolved = [revision for revision in revisions if revision is not None]
    return tuple(resolved) if revisions and len(resolved) == len(revisions) else (f"unknown {uuid4().hex}",)


def pin_data(task: EvalTask, time_limit: float | None = None) -> EvalTask:
    """Return ``task`` with its current data pinned, or unchanged if it is already pinned.

    Raises the same errors as ``count_task``.
    """
    if task.data is not None:
        return task
    limit = CountLimit(seconds=time_limit)
    return count_task.build(task, data_revisions(task, limit), limit).value.pin(task)


def find_pinned_data(task: EvalTask) -> EvalTask | None:
    """Return ``task`` with its current data pinned, or None if the data would have to be loaded first."""
    limit = CountLimit()
    if task.data is not None:
        return task
    if not task.is_local and find_sources.find(task, limit) is None:
        return None
    size = count_task.find(task, data_revisions(task, limit), limit)
    return size.value.pin(task) if size else None


@stage("regenerate", version=1, subject="model", resumable=True)
def regenerate(
    out: Path,
    model: Model,
    task: EvalTask,
    scoring: Scoring,
    scores: Artifact[Scores],
    budgets: Mapping[str, int],
    runtime: Runtime,
) -> Scores:
    """Generate the cut-off answers in ``scores`` again, with the token budget of each leaf in ``budgets``.

    The result has the scores of all documents. An interrupted run resumes from its journal.

    Raises:
        InvalidInput: See ``evaluate``; also if a prompt differs from that of the first answer.
        Refused: If scoring takes longer than ``scoring.time_limit``.
    """
    value, rows = scores.value, read_document_scores(scores.directory / SCORES_FILE)
    assert value.part is not None  # mergegate scored these documents itself
    before = {
        (row.task, row.doc_id): row
        for row in rows
        if row.is_cut_off and "context" not in row.ended and row.budgets[-1] < budgets.get(row.task, 0)
    }
    documents = {leaf: sorted(doc_id for task_name, doc_id in before if task_name == leaf) for leaf, _ in before}
    began = time.monotonic()
    journal = _journal(out, regenerate.key(model, task, scoring, scores, budgets, runtime), model, scoring)
    longer_answers = LongerAnswers(documents, budgets)
    job = ScoringJob(model, task, scoring, value.part, runtime.device, journal, longer_answers)
    longer: dict[tuple[str, int, str], DocumentScore] = {}
    for row in harness.score_in_child(job, lambda done, total: advance(done, total, f"answers of {task.name}")):
        old = before[row.task, row.doc_id]
        if row.prompt_hash != old.prompt_hash:
            raise InvalidInput(
                f"{task.name}: longer answers of {model.name}",
                found=f"another prompt for document {row.doc_id} of {row.task}",
                expected="the prompt of the first answer",
                remedy="delete 'evaluate' from the store and run again",
            )
        longer[row.task, row.doc_id, row.metric] = row._replace(budgets=(*old.budgets, *row.budgets))
    joined = [longer.get((row.task, row.doc_id, row.metric), row) for row in rows]
    write_document_scores(out / SCORES_FILE, joined)
    update = {"model": model.name, "seconds": time.monotonic() - began, **summarize(task.name, joined)}
    return value.model_copy(update=update)


def lengthen_answers(
    model: Model,
    task: EvalTask,
    scoring: Scoring,
    artifacts: Sequence[Artifact[Scores]],
    doublings: int,
    limit: int | None,
    runtime: Runtime,
) -> list[Artifact[Scores]]:
    """Return the artifacts with their cut-off answers generated again, with a budget that doubles ``doublings`` times.

    ``limit`` is the largest budget (see ``DocumentScore.next_budget``). An artifact without answers that may be longer
    is returned unchanged. Raises the same errors as ``regenerate``.
    """
    runtime = with_backend(scoring, runtime)
    lengthened = list(artifacts)
    for index in range(len(lengthened)):
        for _ in range(doublings):
            artifact = lengthened[index]
            if not any(ends.counts.get("length") for ends in artifact.value.ends.values()):
                break
            rows = read_document_scores(artifact.directory / SCORES_FILE)
            budgets = {row.task: budget for row in rows if (budget := row.next_budget(limit)) is not None}
            if not budgets:
                break
            lengthened[index] = regenerate(model, task, scoring, artifact, budgets, runtime)
    return lengthened


class DocumentCost(NamedTuple):
    """Average cost of one document of a task for a model."""

    readings: float  # number of times that the model reads the prompt, each time with a different answer
    written: float  # number of tokens that the model generates


def estimate_document_cost(task: EvalTask) -> DocumentCost:
    """Estimate the cost of a document from its task's definition and prompt settings, with defaults for the rest."""
    own_settings = (task.prompt_settings.gen_kwargs if task.prompt_settings else None) or {}
    costs = []
    for leaf in () if task.built_in else task.tree.leaves:
        choices, settings = leaf.config.get("doc_to_choice"), leaf.config.get("generation_kwargs")
        if leaf.output_type == "multiple_choice":
            costs.append(DocumentCost(len(choices) if isinstance(choices, list) else _CHOICES, 0))
        elif leaf.output_type == "generate_until":
            # The settings of the guard take precedence over those of the task.
            sources = (own_settings, settings if isinstance(settings, Mapping) else {})
            values = [source.get(name) for source in sources for name in BUDGET_NAMES]
            limits = [value for value in values if isinstance(value, int)]
            limit = limits[0] if limits else DEFAULT_BUDGET
            costs.append(DocumentCost(1, limit / 2))  # most answers are shorter
        else:
            costs.append(DocumentCost(1, 0))
    costs = costs or [DocumentCost(_CHOICES, 0)]
    return DocumentCost(*(sum(part) / len(costs) for part in zip(*costs, strict=True)))


def document_seconds(
    tasks: Sequence[EvalTask], scores_by_task: Mapping[str, Sequence[Artifact[Scores]]]
) -> dict[str, float]:
    """Return the cost of one document of each task.

    The unit is seconds if all tasks were measured, else documents of a choice task. Measurements and guesses are never
    mixed, so that a run that is interrupted before everything is measured resumes in the same order. A guess depends
    only on whether a task generates answers; a task that lm-eval ships counts as a choice task, as most of them are.
    """
    measured = {task.name: measured_seconds(scores_by_task.get(task.name, ())) for task in tasks}
    if all(measured.values()):
        return {name: 2.0 ** round(math.log2(seconds)) for name, seconds in measured.items() if seconds}
    costs = {}
    for task in tasks:
        leaves = task.tree.leaves if task.definition else ()
        generates = [leaf.output_type == "generate_until" for leaf in leaves]
        costs[task.name] = sum(GENERATED if flag else 1.0 for flag in generates) / len(generates) if generates else 1.0
    return costs


def measured_seconds(measurements: Sequence[Artifact[Scores]]) -> float | None:
    """Return the seconds per document, or None without measurements.

    This is the smallest measurement, because the first one includes the time to load a model.
    """
    values = [scores.value for scores in measurements]
    return min((value.seconds / len(value.part) for value in values if value.seconds and value.part), default=None)

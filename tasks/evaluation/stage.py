"""Evaluation: lm-eval scores of one model on one task, document by document, as a cached stage.

The unit of caching is one model and one part of one task's documents: a task added to a profile costs only itself,
parents are evaluated once, ever, and more documents cost only those that are new::

    guards, tasks = pin_tasks(settings.tasks, root, hashes)
    parts = evaluate_to(model, tasks[0], settings.scoring, 500, runtime())      # the first look
    parts = evaluate_to(model, tasks[0], settings.scoring, 1000, runtime())     # the second: 500 more
    scores = join_parts(parts)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict

from merge_core.errors import InvalidInput
from merge_core.store import JOURNAL, Artifact, JournalPlace, NotInKey
from tasks.checkpoints import Model
from tasks.evaluation.backends import find_backend
from tasks.evaluation.document_scores import SCORES_FILE, DocumentScore, read_document_scores, write_document_scores
from tasks.evaluation.scoring import DocumentRange, Scoring, document_ranges
from tasks.evaluation.task_definition import EvalTask
from tasks.stage import Runtime, StageValue, advance, report_together, stage, value_stage, versions


class TaskScore(BaseModel):
    """Score of one task under one metric, in [0, 1] for accuracies, with the standard error of its mean."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    task: str
    metric: str  # lm-eval's 'acc,none', 'exact_match,flexible-extract'
    n: int  # documents
    score: float
    stderr: float
    higher_is_better: bool


class Scores(StageValue):
    """Scores of one model. The artifact holds ``outcomes.parquet``, one row a document, task and metric:
    ``task, metric, doc_id, doc_hash, prompt_hash, target_hash, outcome``."""

    model: Annotated[str, NotInKey]
    tasks: tuple[TaskScore, ...]
    lm_eval_version: str
    part: DocumentRange | None = None  # of the task's documents; None for scores joined of several

    def summary(self) -> str:
        return " · ".join(f"{score.task} {100 * score.score:.1f}" for score in self.tasks)


class TaskSize(StageValue):
    """How many documents a task has."""

    documents: int

    def summary(self) -> str:
        return f"{self.documents:,}"


class CountLimit(BaseModel):
    """How long the data of a task may take to load."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    seconds: Annotated[float | None, NotInKey] = None


@stage("evaluate", version=2, subject="model", resumable=True)
def evaluate(
    out: Path, model: Model, task: EvalTask, scoring: Scoring, part: DocumentRange, runtime: Runtime
) -> Scores:
    """Score ``model`` on one part of ``task``: each metric, and ``outcomes.parquet`` with every document's.

    A group (``mmlu``) is scored as the mean over all of its documents. Goes on from the journal of a killed run, batch
    for batch as if nothing had happened.

    Raises:
        InvalidInput: when the model or the task's data cannot be loaded, the task has no score by document, or the
            process that scores died.
        Refused: when it takes longer than ``scoring.time_limit``.
    """
    from tasks.evaluation.process import score_in_child

    asked = scoring.server.at(model.name) if scoring.server else None
    scored = score_in_child(
        model,
        task,
        scoring,
        part,
        runtime.device,
        lambda done, total: advance(done, total, "requests"),
        # A server is not in the key; but what one has half answered is not for another to go on with.
        JournalPlace(out / JOURNAL, f"{evaluate.key(model, task, scoring, part, runtime)} {asked!r}"),
    )
    write_document_scores(out / SCORES_FILE, scored.outcomes)
    return Scores(
        model=model.name,
        tasks=score_table(task.name, scored.outcomes, scored.higher_is_better),
        lm_eval_version=versions("lm_eval")["lm_eval"],
        part=part,
    )


def evaluate_to(
    model: Model, task: EvalTask, scoring: Scoring, documents: int | None, runtime: Runtime
) -> list[Artifact[Scores]]:
    """Scores of ``model`` on the first ``documents`` documents of ``task``, by part; what is missing is computed now.

    Where parts end is decided by ``scoring.documents`` and the size of the task alone (see
    ``tasks.evaluation.scoring.document_ranges``).

    Args:
        documents: At least so many: one of ``tasks.evaluation.scoring.looks``, or whatever the part it falls into ends
        with.
            None: all.

    Raises:
        InvalidInput, Refused: as ``evaluate``.
    """
    total = document_count(task, scoring.time_limit)
    wanted = total if documents is None else min(documents, total)
    asked = [part for part in document_ranges(total, scoring.documents) if part.first < wanted]
    if own := find_backend(scoring.backend).library_versions():
        runtime = runtime.model_copy(update={"libraries": {**runtime.libraries, **own}})
    artifacts: list[Artifact[Scores]] = []
    with report_together(evaluate.name, model.name, [part.last - part.first for part in asked]) as report:
        artifacts += (evaluate(model, task, scoring, part, runtime) for part in asked)
        report.summary = join_parts(artifacts).summary()
    return artifacts


@value_stage("documents", version=2, subject="task")
def count_task(task: EvalTask, limit: CountLimit) -> TaskSize:
    """Load the data of ``task`` in the process that scores, and count its documents.

    Raises:
        InvalidInput: when the data cannot be loaded.
        Refused: when the time is over.
    """
    from tasks.evaluation.process import count_in_child

    return TaskSize(documents=count_in_child(task, limit.seconds))


def document_count(task: EvalTask, time_limit: float | None = None) -> int:
    """Documents that ``task`` has; counted once, and kept in the store. Raises as ``count_task``."""
    return count_task.build(task, CountLimit(seconds=time_limit)).value.documents


@dataclass(frozen=True)
class TaskScores:
    """What one model scored on one task: all of its parts together.

    Args:
        where: What messages call them: ``'gsm8k: scores of merge'``.
        parts: In the order in which they were given. Their tables are read when ``rows`` is first asked for.
    """

    where: str
    task: str
    parts: tuple[Artifact[Scores], ...]

    @cached_property
    def rows(self) -> tuple[DocumentScore, ...]:
        """The score of every document under every metric.

        Raises:
            InvalidInput: when two parts hold the same document.
        """
        together = tuple(row for part in self.parts for row in read_document_scores(part.directory / SCORES_FILE))
        if len({(row.task, row.doc_id, row.metric) for row in together}) < len(together):
            raise InvalidInput(self.where, found="parts that hold the same documents", expected="every document once")
        return together

    @cached_property
    def higher_is_better(self) -> Mapping[str, bool]:
        """By metric, ``acc,none``, in the order in which the parts name them."""
        return {score.metric: score.higher_is_better for part in self.parts for score in part.value.tasks}

    @property
    def lm_eval_version(self) -> str:
        """Of all parts: ``by_task`` joins no others."""
        return self.parts[0].value.lm_eval_version

    @property
    def documents(self) -> int:
        """How many were scored; of a group of tasks, in all of them."""
        return len({(row.task, row.doc_id) for row in self.rows})

    def table(self) -> tuple[TaskScore, ...]:
        """Mean and standard error under each metric. Of a single part they stand in the artifact."""
        if len(self.parts) == 1:
            return self.parts[0].value.tasks
        return score_table(self.task, self.rows, self.higher_is_better)

    def by_document(self, metric: str) -> dict[tuple[str, int], DocumentScore]:
        """The scores under one metric, by task (of a group: the one below it) and position in its data."""
        return {(row.task, row.doc_id): row for row in self.rows if row.metric == metric}


def by_task(model: str, parts: Sequence[Artifact[Scores]]) -> dict[str, TaskScores]:
    """Scores of one model with the parts of each task joined, in the order in which tasks are first met.

    Args:
        model: What messages call it; an artifact may have been made when it went by another name.

    Raises:
        InvalidInput: when the parts of a task are of different versions of lm-eval.
    """
    grouped: dict[str, list[Artifact[Scores]]] = {}
    for part in parts:
        grouped.setdefault(part.value.tasks[0].task, []).append(part)
    found = {}
    for task, group in grouped.items():
        found[task] = TaskScores(f"{task}: scores of {model}", task, tuple(group))
        _check_one_version(found[task].where, group)
    return found


def join_parts(artifacts: Sequence[Artifact[Scores]]) -> Scores:
    """Scores of one model over all parts of each task: one table, in the order in which tasks are first met.

    Raises:
        InvalidInput: when the parts are of different versions of lm-eval.
    """
    value = artifacts[0].value
    _check_one_version(f"scores of {value.model}", artifacts)
    scores = tuple(score for joined in by_task(value.model, artifacts).values() for score in joined.table())
    return value.model_copy(update={"tasks": scores, "part": value.part if len(artifacts) == 1 else None})


def score_table(
    task: str, rows: Sequence[DocumentScore], higher_is_better: Mapping[str, bool]
) -> tuple[TaskScore, ...]:
    """Mean and standard error of every metric over the documents in ``rows``, whatever parts they were scored in."""
    return tuple(
        _task_score(task, metric, [row.outcome for row in rows if row.metric == metric], better)
        for metric, better in higher_is_better.items()
    )


def default_metric(metrics: Sequence[str]) -> str:
    """The metric that is judged when a guard names none: ``acc,none``; else what is leniently extracted from free
    answers (strict patterns measure format: a good model can score near zero); else the first."""
    if "acc,none" in metrics:
        return "acc,none"
    return next((metric for metric in metrics if metric.endswith(",flexible-extract")), metrics[0])


def _check_one_version(where: str, parts: Sequence[Artifact[Scores]]) -> None:
    versions_found = sorted({part.value.lm_eval_version for part in parts})
    if len(versions_found) > 1:
        raise InvalidInput(where, found=f"parts by lm-eval {' and '.join(versions_found)}", expected="one version")


def _task_score(task: str, metric: str, values: Sequence[float], higher_is_better: bool) -> TaskScore:
    n = len(values)
    mean = sum(values) / n
    variance = sum((value - mean) ** 2 for value in values) / (n - 1) if n > 1 else 0.0
    return TaskScore(
        task=task,
        metric=metric,
        n=n,
        score=mean,
        stderr=(variance / n) ** 0.5,
        higher_is_better=higher_is_better,
    )

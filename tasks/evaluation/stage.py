"""Evaluation: lm-eval scores of one model on one task, document by document, as a cached stage.

The unit of caching is one model and one part of one task's documents: a task added to a profile costs only itself,
parents are evaluated once, ever, and other documents cost only those that are new: what is known of a model, a task
and a scoring is one family in the store, and a look is put together from it::

    guards, tasks = pin_tasks(settings.tasks, root, hashes)
    parts = evaluate_to(model, tasks[0], settings.scoring, 500, runtime())      # the first look
    parts = evaluate_to(model, tasks[0], settings.scoring, 1000, runtime())     # the second: 500 more
    scores = join_parts(parts)
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated
from uuid import uuid4

from pydantic import BaseModel, ConfigDict, Field

from mergegate.merge_core.errors import InvalidInput
from mergegate.merge_core.files import JOURNAL, JournalPlace, keep_only_journal
from mergegate.tasks.checkpoints import Model, files_fingerprint
from mergegate.tasks.evaluation.backends import CUT_OFF, find_backend
from mergegate.tasks.evaluation.choice_probability import PROBABILITY
from mergegate.tasks.evaluation.document_scores import (
    SCORES_FILE,
    DocumentScore,
    read_document_scores,
    write_document_scores,
)
from mergegate.tasks.evaluation.metrics import (
    JudgedMetrics,
    MetricSetting,
    choose_metrics,
    documents_of,
    metrics_by_leaf,
)
from mergegate.tasks.evaluation.scoring import DocumentRange, Piece, Scoring, cover, document_ranges, mixed
from mergegate.tasks.evaluation.task_data import DataSource, LoadedData, TaskData, revision_now
from mergegate.tasks.evaluation.task_definition import EvalTask
from mergegate.tasks.stage import Runtime, StageValue, advance, join_progress, stage, value_stage, versions
from mergegate.tasks.store import Artifact, NotInKey


class TaskScore(BaseModel):
    """Score of one task under one metric, in [0, 1] for accuracies, with the standard error of its mean."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    task: str
    metric: str  # lm-eval's 'acc,none', 'exact_match,flexible-extract'
    n: int  # documents
    score: float
    stderr: float
    higher_is_better: bool


class AnswerEnds(BaseModel):
    """How the generated answers of one task ended."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    counts: dict[str, int]  # answers by ``AnswerEnd.reason``
    budgets: tuple[int, ...] = ()  # tokens that answers had when they reached the most that they may have, ascending

    @property
    def answers(self) -> int:
        """Number of answers whose end is known."""
        return sum(count for reason, count in self.counts.items() if reason)

    @property
    def cut_off(self) -> int:
        """Number of answers that did not end by themselves."""
        return sum(self.counts.get(reason, 0) for reason in CUT_OFF)

    def described(self) -> str:
        """Return ``58 of 60 answers reached max_gen_toks (24)``; empty if none was cut off."""
        if not self.cut_off:
            return ""
        budget = (
            f" ({' to '.join(map(str, dict.fromkeys((self.budgets[0], self.budgets[-1]))))})" if self.budgets else ""
        )
        limit = "max_gen_toks" + budget if "length" in self.counts else ""
        context = "the end of the context" if "context" in self.counts else ""
        return f"{self.cut_off:,} of {self.answers:,} answers reached {' or '.join(filter(None, (limit, context)))}"


class Scores(StageValue):
    """Scores of one model. The artifact holds ``outcomes.parquet``, one row a document, task and metric:
    ``task, metric, doc_id, doc_hash, prompt_hash, target_hash, outcome, ended, answer_tokens``."""

    model: Annotated[str, NotInKey]
    tasks: tuple[TaskScore, ...]
    lm_eval_version: str
    part: DocumentRange | None = None  # of the task's documents; None for scores joined of several
    seed: int = 0  # of the order in which the documents were taken
    seconds: Annotated[float | None, NotInKey] = None  # that scoring took here, loading included; None: not measured
    data: dict[str, TaskData] = Field(default_factory=dict)  # by task: what was asked; of lm-eval's own results none
    ends: dict[str, AnswerEnds] = Field(default_factory=dict)  # by task; of tasks with generated answers

    def summary(self) -> str:
        own = [score for score in self.tasks if score.metric != f"{PROBABILITY},none"]  # what is right, not how surely
        scores = [f"{score.task} {100 * score.score:.1f}" for score in own]
        return " · ".join([*scores, *(text for ends in self.ends.values() if (text := ends.described()))])


class TaskSize(StageValue):
    """How many documents a task has, and what pins them."""

    documents: int
    data: TaskData
    metrics: dict[str, dict[str, bool]]  # by leaf: labels that can judge it, and whether more of each is better

    def summary(self) -> str:
        return f"{self.documents:,}"

    def of(self, task: EvalTask) -> EvalTask:
        """``task`` with its data pinned."""
        return task.loaded(LoadedData(self.documents, self.data))


class TaskSources(StageValue):
    """The datasets that a task by name, or one whose data lie on the Hub, is loaded from."""

    sources: tuple[DataSource, ...]

    def summary(self) -> str:
        return ", ".join(dict.fromkeys(source.path for source in self.sources))


class CountLimit(BaseModel):
    """How long the data of a task may take to load."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    seconds: Annotated[float | None, NotInKey] = None


@stage("evaluate", version=6, subject="model", resumable=True, apart="part")
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
    from mergegate.tasks.evaluation.process import score_in_child

    keep_only_journal(out)
    asked = scoring.server.at(model.name) if scoring.server else None
    began = time.monotonic()
    scored = score_in_child(
        model,
        task,
        scoring,
        part,
        runtime.device,
        lambda done, total: advance(done, total, f"requests of {task.name}"),
        # A server is not in the key; but what one has half answered is not for another to go on with.
        JournalPlace(
            out / JOURNAL, f"{evaluate.key(model, task, scoring, part, runtime)} {asked!r} {files_fingerprint([model])}"
        ),
    )
    write_document_scores(out / SCORES_FILE, scored.outcomes)
    return Scores(
        model=model.name,
        tasks=score_table(task.name, scored.outcomes),
        lm_eval_version=versions("lm_eval")["lm_eval"],
        part=part,
        seed=scoring.seed,
        seconds=time.monotonic() - began,
        data={task.name: task.data} if task.data else {},
        ends=answer_ends(task.name, scored.outcomes),
    )


@stage("excerpt", version=2)
def excerpt(out: Path, scores: Artifact[Scores], part: DocumentRange) -> Scores:
    """Scores of some of the documents of an artifact, as if they alone had been asked.

    Args:
        part: Within the artifact's own.

    Raises:
        InvalidInput: when the artifact has not all documents of its part, so that nobody knows which are these.
    """
    known, rows = scores.value, read_document_scores(scores.directory / SCORES_FILE)
    documents = sorted(documents_of(rows), key=lambda at: mixed(at[0], at[1], known.seed))
    if known.part is None or len(documents) != len(known.part):
        raise InvalidInput(
            f"{known.tasks[0].task}: scores of {known.model}",
            found=f"{len(documents):,} documents scored",
            expected=f"all of {known.part}",
            remedy="delete 'evaluate' from the store and run again",
        )
    wanted = set(documents[part.first - known.part.first : part.last - known.part.first])
    kept = [row for row in rows if (row.task, row.doc_id) in wanted]
    write_document_scores(out / SCORES_FILE, kept)
    task = known.tasks[0].task
    update = {"tasks": score_table(task, kept), "ends": answer_ends(task, kept), "part": part, "seconds": None}
    return known.model_copy(update=update)


def evaluate_documents(
    model: Model, task: EvalTask, scoring: Scoring, documents: int | None, runtime: Runtime
) -> list[Artifact[Scores]]:
    """Scores of ``model`` on the first ``documents`` documents of ``task``, by part; what is missing is computed now.

    No document is asked again that the store knows of, in whatever parts: those are taken, longest first, and of one
    that has more documents than are wanted only the first (see ``tasks.evaluation.scoring.cover``).

    Args:
        documents: In the task's fixed order; more than it has, or None: all.

    Raises:
        InvalidInput, Refused: as ``evaluate``.
    """
    task = pin_data(task, scoring.time_limit)
    runtime = _with_backend(scoring, runtime)
    # Two runs at once with different looks would ask some documents twice.
    with evaluate.hold_family(model=model, task=task, scoring=scoring, runtime=runtime):
        pieces = _pieces(task, scoring, documents, known_scores(model, task, scoring, runtime))
        with join_progress(evaluate.name, model.name, [len(piece.scored) for piece in pieces]) as report:
            artifacts = [_counted(evaluate(model, task, scoring, piece.scored, runtime), piece) for piece in pieces]
            report.summary = join_parts(artifacts).summary()
    return artifacts


def known_scores(model: Model, task: EvalTask, scoring: Scoring, runtime: Runtime) -> tuple[Artifact[Scores], ...]:
    """What the store has of ``model`` on ``task`` scored so, whatever range of documents it is of. Asks nothing.

    Args:
        task: With its data pinned.
    """
    runtime = _with_backend(scoring, runtime)
    return evaluate.family(model=model, task=task, scoring=scoring, runtime=runtime)


def count_missing_documents(
    task: EvalTask, scoring: Scoring, documents: int | None, known: Sequence[Artifact[Scores]]
) -> int:
    """How many of the first ``documents`` documents would have to be asked. Arguments as of ``evaluate_documents``,
    and what
    ``known_scores`` found."""
    ranges = {part.value.part for part in known}
    return sum(len(piece.scored) for piece in _pieces(task, scoring, documents, known) if piece.scored not in ranges)


def _pieces(
    task: EvalTask, scoring: Scoring, documents: int | None, known: Sequence[Artifact[Scores]]
) -> tuple[Piece, ...]:
    total = task.documents or 0
    wanted = total if documents is None else min(documents, total)
    ranges = [part.value.part for part in known if part.value.part]
    return cover(wanted, document_ranges(total, scoring.first_look), ranges)


def _counted(scored: Artifact[Scores], piece: Piece) -> Artifact[Scores]:
    return scored if piece.counted == piece.scored else excerpt(scored, piece.counted)


def _with_backend(scoring: Scoring, runtime: Runtime) -> Runtime:
    """``runtime`` with the libraries that the backend computes with."""
    own = find_backend(scoring.backend).library_versions()
    return runtime.model_copy(update={"libraries": {**runtime.libraries, **own}}) if own else runtime


@value_stage("sources", version=1, subject="task")
def find_sources(task: EvalTask, limit: CountLimit) -> TaskSources:
    """Which datasets ``task`` is loaded from: that follows from its definition, and is found out by loading it once.

    Raises:
        InvalidInput: when the data cannot be loaded.
        Refused: when the time is over.
    """
    from mergegate.tasks.evaluation.process import look_in_child

    found = look_in_child(task, limit.seconds).data.sources
    return TaskSources(sources=tuple(source.model_copy(update={"revision": ""}) for source in found))


@value_stage("documents", version=4, subject="task")
def count_task(task: EvalTask, revisions: tuple[str, ...], limit: CountLimit) -> TaskSize:
    """Load the data of ``task`` in the process that scores, count its documents and pin them.

    Args:
        revisions: What the datasets are that it is loaded from (see ``data_revisions``): other ones, other data.

    Raises:
        InvalidInput: when the data cannot be loaded.
        Refused: when the time is over.
    """
    from mergegate.tasks.evaluation.process import look_in_child

    found = look_in_child(task, limit.seconds)
    metrics = {leaf: dict(labels) for leaf, labels in found.metrics.items()}
    return TaskSize(documents=found.documents, data=found.data, metrics=metrics)


def data_revisions(task: EvalTask, limit: CountLimit) -> tuple[str, ...]:
    """What decides, beside its definition, which documents ``task`` has at this moment. Cheap, but for the first time.

    Nothing for data beside the definition, which are in its digest. A text as there never was one, so that the data are
    loaded anew, where nothing tells whether they changed.

    Raises:
        InvalidInput, Refused: as ``find_sources``.
    """
    if task.is_local:
        return ()
    known = [revision_now(source) for source in find_sources.build(task, limit).value.sources]
    sure = [revision for revision in known if revision is not None]
    return tuple(sure) if known and len(sure) == len(known) else (f"looked at by {uuid4().hex}",)


def pin_data(task: EvalTask, time_limit: float | None = None) -> EvalTask:
    """``task`` with its data as they are now; as it is where somebody has looked already. Raises as ``count_task``."""
    if task.data is not None:
        return task
    limit = CountLimit(seconds=time_limit)
    return count_task.build(task, data_revisions(task, limit), limit).value.of(task)


def find_pinned_data(task: EvalTask) -> EvalTask | None:
    """``task`` with its data as they are now, where somebody has looked at those before; None where they would have to
    be loaded."""
    limit = CountLimit()
    if task.data is not None:
        return task
    if not task.is_local and find_sources.find(task, limit) is None:
        return None
    size = count_task.find(task, data_revisions(task, limit), limit)
    return size.value.of(task) if size else None


def document_count(task: EvalTask, time_limit: float | None = None) -> int:
    """Documents that ``task`` has; counted once, and kept in the store. Raises as ``count_task``."""
    return pin_data(task, time_limit).documents or 0


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
        """The score of every document under every metric, in the order in which documents were scored.

        Parts come one after another, as they lie in the task's order, and so do the documents of a part: the same order
        whatever the parts are. Bounds of graded scores bet on documents one by one: theirs must be an order that has
        nothing to do with the scores, and in which the documents of one look come before those of the next.

        Raises:
            InvalidInput: when two parts hold the same document.
        """
        parts = sorted(self.parts, key=lambda part: part.value.part.first if part.value.part else 0)
        together = tuple(
            row
            for part in parts
            for row in sorted(
                read_document_scores(part.directory / SCORES_FILE),
                key=lambda row: mixed(row.task, row.doc_id, part.value.seed),
            )
        )
        if len({(row.task, row.doc_id, row.metric) for row in together}) < len(together):
            raise InvalidInput(self.where, found="parts that hold the same documents", expected="every document once")
        return together

    @property
    def lm_eval_version(self) -> str:
        """Of all parts: ``by_task`` joins no others."""
        return self.parts[0].value.lm_eval_version

    @property
    def data(self) -> TaskData | None:
        """What was asked; None for results that lm-eval wrote. ``by_task`` joins only parts of the same."""
        return self.parts[0].value.data.get(self.task)

    @property
    def documents(self) -> int:
        """How many were scored; of a group of tasks, in all of them."""
        return len({(row.task, row.doc_id) for row in self.rows})

    def table(self) -> tuple[TaskScore, ...]:
        """Mean and standard error under each metric. Of a single part they stand in the artifact."""
        if len(self.parts) == 1:
            return self.parts[0].value.tasks
        return score_table(self.task, self.rows)

    @property
    def documents_asked(self) -> int:
        """How many were to be scored; of results that lm-eval wrote, those that it scored."""
        asked = [part.value.part for part in self.parts]
        return sum(len(part) for part in asked if part) if all(asked) else self.documents

    def metrics(self, setting: MetricSetting = None) -> JudgedMetrics:
        """The metric that judges each leaf, where a guard says ``setting``. Raises as ``choose_metrics``."""
        return choose_metrics(self.rows, setting, self.task)

    def judged(self, metrics: JudgedMetrics) -> tuple[DocumentScore, ...]:
        """One score for each document that was asked, under the metric of its leaf.

        Raises:
            InvalidInput: when a document has none.
        """
        if self.documents != self.documents_asked:
            raise InvalidInput(
                self.where,
                found=f"{self.documents:,} documents scored",
                expected=f"{self.documents_asked:,}, as were asked",
                remedy="delete 'evaluate' from the store and run again",
            )
        return metrics.judged(self.rows, self.where)


def by_task(model: str, parts: Sequence[Artifact[Scores]]) -> dict[str, TaskScores]:
    """Scores of one model with the parts of each task joined, in the order in which tasks are first met.

    Args:
        model: What messages call it; an artifact may have been made when it went by another name.

    Raises:
        InvalidInput: when the parts of a task are of different versions of lm-eval, or of different data.
    """
    grouped: dict[str, list[Artifact[Scores]]] = {}
    for part in parts:
        grouped.setdefault(part.value.tasks[0].task, []).append(part)
    found = {}
    for task, group in grouped.items():
        found[task] = TaskScores(f"{task}: scores of {model}", task, tuple(group))
        _check_one_version(found[task].where, group)
        _check_one_benchmark(found[task])
    return found


def join_parts(artifacts: Sequence[Artifact[Scores]]) -> Scores:
    """Scores of one model over all parts of each task: one table, in the order in which tasks are first met.

    Raises:
        InvalidInput: when the parts are of different versions of lm-eval.
    """
    value = artifacts[0].value
    _check_one_version(f"scores of {value.model}", artifacts)
    joined = by_task(value.model, artifacts)
    scores = tuple(score for each in joined.values() for score in each.table())
    data = {task: each.data for task, each in joined.items() if each.data}
    part = value.part if len(artifacts) == 1 else None
    ends: dict[str, AnswerEnds] = {}
    for task, new in (item for artifact in artifacts for item in artifact.value.ends.items()):
        old = ends.get(task, AnswerEnds(counts={}))
        counts = Counter(old.counts) + Counter(new.counts)
        ends[task] = AnswerEnds(counts=counts, budgets=tuple(sorted({*old.budgets, *new.budgets})))
    return value.model_copy(update={"tasks": scores, "data": data, "part": part, "seconds": None, "ends": ends})


def answer_ends(task: str, rows: Sequence[DocumentScore]) -> dict[str, AnswerEnds]:
    """Return how the generated answers in ``rows`` ended, under the name of their task; empty if there are none."""
    documents = {(row.task, row.doc_id): row for row in rows}.values()  # a document has a row for each metric
    every = [end for row in documents for end in zip(row.ended, row.answer_tokens, strict=True)]
    if not every:
        return {}
    budgets = sorted({tokens for reason, tokens in every if reason == "length" and tokens is not None})
    counts = Counter(reason for reason, _ in every)
    return {task: AnswerEnds(counts=dict(sorted(counts.items())), budgets=tuple(budgets))}


def score_table(task: str, rows: Sequence[DocumentScore]) -> tuple[TaskScore, ...]:
    """Mean and standard error of every metric over the documents in ``rows`` that have it, whatever parts they were
    scored in. Of a group whose leaves are judged by several, first that of all documents, each under its leaf's own.
    """
    table = []
    own = choose_metrics(rows, None, task)
    if own.differing and len(whole := own.chosen(rows)) == len(documents_of(rows)):
        table.append(_task_score(task, own.label, [row.outcome for row in whole], own.higher_is_better))
    known = metrics_by_leaf(rows)
    for metric in dict.fromkeys(name for metrics in known.values() for name in metrics):
        of_leaves = JudgedMetrics({leaf: (metric, each[metric]) for leaf, each in known.items() if metric in each})
        scores = [row.outcome for row in of_leaves.chosen(rows)]
        table.append(_task_score(task, metric, scores, of_leaves.higher_is_better))
    return tuple(table)


def _check_one_version(where: str, parts: Sequence[Artifact[Scores]]) -> None:
    versions_found = sorted({part.value.lm_eval_version for part in parts})
    if len(versions_found) > 1:
        raise InvalidInput(where, found=f"parts by lm-eval {' and '.join(versions_found)}", expected="one version")


def _check_one_benchmark(joined: TaskScores) -> None:
    digests = {data.digest for part in joined.parts if (data := part.value.data.get(joined.task))}
    if len(digests) > 1:
        raise InvalidInput(
            joined.where,
            found="parts measured on different data",
            expected="the same documents, examples and templates",
            remedy="the task's dataset was exchanged: evaluate again",
        )


def _task_score(task: str, metric: str, values: Sequence[float], higher_is_better: bool) -> TaskScore:
    n = len(values)
    # Summed exactly: to the last bit the same, in whatever parts the documents came.
    mean = math.fsum(values) / n
    variance = math.fsum((value - mean) ** 2 for value in values) / (n - 1) if n > 1 else 0.0
    return TaskScore(
        task=task,
        metric=metric,
        n=n,
        score=mean,
        stderr=(variance / n) ** 0.5,
        higher_is_better=higher_is_better,
    )

"""Score one model on one task, as a cached stage that stores a score for every document.

The unit of caching is one model and one part of the documents of one task. Adding a task to a profile costs only that
task, each parent is evaluated once, and a larger sample costs only the additional documents. All artifacts for one
model, task and scoring form a family in the store, from which interim looks are assembled::

    tasks = pin_sound_tasks(names, root, hashes, None)
    parts = evaluate_documents(model, tasks["gsm8k"], scoring, 500, runtime())      # first look
    parts = evaluate_documents(model, tasks["gsm8k"], scoring, 1000, runtime())     # second look: 500 more documents
    scores = join_parts(parts)
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from itertools import zip_longest
from pathlib import Path
from typing import Annotated
from uuid import uuid4

from pydantic import BaseModel, ConfigDict, Field

from mergegate.merge_core.errors import InvalidInput
from mergegate.merge_core.files import JOURNAL, JournalLocation, keep_only_journal
from mergegate.merge_core.wording import format_count
from mergegate.tasks.checkpoints import Model, files_fingerprint
from mergegate.tasks.evaluation import process
from mergegate.tasks.evaluation.backends import CUT_OFF, AnswerEnd, find_backend
from mergegate.tasks.evaluation.choice_probability import PROBABILITY
from mergegate.tasks.evaluation.document_order import (
    DocumentRange,
    Piece,
    cover_documents,
    document_ranges,
    document_sort_key,
    sample_ranges,
)
from mergegate.tasks.evaluation.document_scores import (
    SCORES_FILE,
    DocumentScore,
    read_document_scores,
    write_document_scores,
)
from mergegate.tasks.evaluation.harness import ScoringJob
from mergegate.tasks.evaluation.metrics import (
    JudgedMetrics,
    MetricSetting,
    choose_metrics,
    documents_of,
    metrics_by_leaf,
)
from mergegate.tasks.evaluation.settings import Scoring
from mergegate.tasks.evaluation.task_data import DataSource, TaskData, revision_now
from mergegate.tasks.evaluation.task_definition import EvalTask
from mergegate.tasks.stage import Runtime, StageValue, advance, join_progress, stage, value_stage, versions
from mergegate.tasks.store import Artifact, NotInKey

# Modules of the packages that prepare pictures, by distribution.
_PICTURE_LIBRARIES = {"pillow": "PIL", "torchvision": "torchvision"}


class TaskScore(BaseModel):
    """Score of one task under one metric, in [0, 1] for accuracies, with the standard error of the mean."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    task: str
    metric: str  # lm-eval's label, such as 'acc,none' or 'exact_match,flexible-extract'
    n: int  # number of documents
    score: float
    stderr: float
    higher_is_better: bool


class AnswerEnds(BaseModel):
    """How the generated answers of one task ended."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    counts: dict[str, int]  # number of answers by ``AnswerEnd.reason``
    budgets: tuple[int, ...] = ()  # token limits that answers reached, ascending
    measured: int = 0  # number of answers of known length
    tokens: int = 0  # their length in tokens
    thinking: int | None = None  # tokens of their thoughts; None: no setting tells what a thought is
    unfinished_thoughts: int = 0  # number of answers that were cut off before a thought ended
    regenerated: int = 0  # number of answers that were generated again with a larger budget
    largest_budget: int | None = None  # largest budget of these answers; None: there are none

    @property
    def answers(self) -> int:
        """Number of answers with a known end."""
        return sum(count for reason, count in self.counts.items() if reason)

    @property
    def cut_off(self) -> int:
        """Number of answers that a token limit or the end of the context cut off."""
        return sum(self.counts.get(reason, 0) for reason in CUT_OFF)

    @property
    def mean_tokens(self) -> float | None:
        """Mean length of an answer in tokens, thought included; None if no length is known."""
        return self.tokens / self.measured if self.measured else None

    def describe_length(self) -> str:
        """Return ``33 tokens per answer, 84 % of them thoughts``, or an empty text if no length is known."""
        if (mean := self.mean_tokens) is None:
            return ""
        thinking = f", {100 * self.thinking / self.tokens:.0f} % of them thoughts" if self.thinking else ""
        unfinished = (
            f"; {self.unfinished_thoughts:,} of {self.answers:,} answers end within a thought and count as no answer"
            if self.unfinished_thoughts
            else ""
        )
        return f"{mean:,.0f} tokens per answer{thinking}{unfinished}"

    def describe(self) -> str:
        """Return ``58 of 60 answers reached max_gen_toks (24)``, or an empty text if no answer was cut off."""
        if not self.cut_off:
            return ""
        limits = []
        if "length" in self.counts:
            budgets = " to ".join(map(str, dict.fromkeys(self.budgets[:1] + self.budgets[-1:])))
            limits.append(f"max_gen_toks ({budgets})" if budgets else "max_gen_toks")
        if "context" in self.counts:
            limits.append("the end of the context")
        return f"{self.cut_off:,} of {self.answers:,} answers reached {' or '.join(limits)}"

    def describe_regeneration(self) -> str:
        """Return ``97 answers generated again with up to 80 tokens``, or an empty text if there are none."""
        if self.largest_budget is None:
            return ""
        answers = format_count(self.regenerated, "answer")
        return f"{answers} generated again with up to {self.largest_budget:,} tokens"


class PromptCuts(BaseModel):
    """Number of documents of one task whose prompt was truncated to fit into the context of the model."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    documents: int  # number of documents for which this is known
    cut: int  # number of documents with a truncated prompt
    largest: int  # largest number of tokens that were removed from a prompt

    def describe(self) -> str:
        """Return ``58 of 400 prompts were truncated, by up to 12 tokens``, or an empty text if all prompts fit."""
        if not self.cut:
            return ""
        return f"{self.cut:,} of {self.documents:,} prompts were truncated, by up to {self.largest:,} tokens"


class Scores(StageValue):
    """Scores of one model.

    The artifact contains ``outcomes.parquet`` with one row per document and metric and the columns of
    ``DocumentScore``.
    """

    model: Annotated[str, NotInKey]
    tasks: tuple[TaskScore, ...]
    lm_eval_version: str
    part: DocumentRange | None = None  # range of the task's documents; None for scores joined from several parts
    seed: int = 0  # seed of the order in which the documents were scored
    seconds: Annotated[float | None, NotInKey] = None  # time to load the model and score the part; None: not measured
    data: dict[str, TaskData] = Field(default_factory=dict)  # data by task; empty for results that lm-eval wrote
    ends: dict[str, AnswerEnds] = Field(default_factory=dict)  # by task, for tasks with generated answers
    prompts: dict[str, PromptCuts] = Field(default_factory=dict)  # by task, if the backend counts truncated prompts

    def summary(self) -> str:
        own = [score for score in self.tasks if score.metric != f"{PROBABILITY},none"]  # accuracy, not confidence
        names = [score.task for score in own]
        scores = [
            f"{score.task} {score.metric.partition(',')[0]} {100 * score.score:.1f}"
            if names.count(score.task) > 1
            else f"{score.task} {100 * score.score:.1f}"
            for score in own
        ]
        ends = [
            text
            for ends in self.ends.values()
            for text in (
                ends.describe_length() if ends.thinking else "",
                ends.describe_regeneration(),
                ends.describe(),
            )
        ]
        prompts = [cuts.describe() for cuts in self.prompts.values()]
        return " · ".join([*scores, *(text for text in (*ends, *prompts) if text)])


class TaskSize(StageValue):
    """Number of documents in a task, its metrics, and the digest that pins the documents."""

    documents: int
    data: TaskData
    metrics: dict[str, dict[str, bool]]  # by leaf: metrics that can judge it, and whether higher is better

    def summary(self) -> str:
        return f"{self.documents:,}"

    def pin(self, task: EvalTask) -> EvalTask:
        """Return ``task`` with its data pinned."""
        data = {"data_digest": self.data.digest, "sources": self.data.sources, "documents": self.documents}
        return task.model_copy(update=data)


class TaskSources(StageValue):
    """Datasets from which a task is loaded, unless all of its data is local."""

    sources: tuple[DataSource, ...]

    def summary(self) -> str:
        return ", ".join(dict.fromkeys(source.path for source in self.sources))


class CountLimit(BaseModel):
    """Time limit for loading the data of a task."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    seconds: Annotated[float | None, NotInKey] = None


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
    keep_only_journal(out)
    endpoint = scoring.server.at(model.name) if scoring.server else None
    began = time.monotonic()
    # The server is not part of the key, but a run must not resume answers that another server gave.
    key = f"{evaluate.key(model, task, scoring, part, runtime)} {endpoint!r} {files_fingerprint([model])}"
    job = ScoringJob(model, task, scoring, part, runtime.device, JournalLocation(out / JOURNAL, key))
    rows = process.score_in_child(job, lambda done, total: advance(done, total, f"requests of {task.name}"))
    write_document_scores(out / SCORES_FILE, rows)
    return Scores(
        model=model.name,
        tasks=score_table(task.name, rows),
        lm_eval_version=versions("lm_eval")["lm_eval"],
        part=part,
        seed=scoring.seed,
        seconds=time.monotonic() - began,
        data={task.name: task.data} if task.data else {},
        ends=answer_ends(task.name, rows),
        prompts=prompt_cuts(task.name, rows),
    )


@stage("excerpt", version=3)
def excerpt(out: Path, scores: Artifact[Scores], part: DocumentRange) -> Scores:
    """Extract the scores for ``part``, a range within that of the artifact, as if only it had been evaluated.

    Raises:
        InvalidInput: If the artifact lacks documents, because the positions of the others are then unknown.
    """
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
    update = {
        "tasks": score_table(task, selected_rows),
        "ends": answer_ends(task, selected_rows),
        "prompts": prompt_cuts(task, selected_rows),
        "part": part,
        "seconds": None,
    }
    return value.model_copy(update=update)


def evaluate_documents(
    model: Model, task: EvalTask, scoring: Scoring, documents: int | None, runtime: Runtime
) -> list[Artifact[Scores]]:
    """Score ``model`` on the first ``documents`` documents of ``task``, and return the artifacts, one per part.

    ``documents`` counts from the start of the task's sample. None, or a number larger than the task has, means all
    documents. The artifacts are in the order of the sample.
    Documents with stored scores are not evaluated again, even if they were divided into other parts (see
    ``document_order.cover_documents``). A stored part that extends beyond ``documents`` contributes an excerpt. Raises
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
    """Load ``task`` once to find the datasets to which its definition refers.

    Raises:
        InvalidInput: If the data cannot be loaded.
        Refused: If loading takes longer than ``limit``.
    """
    sources = process.inspect_in_child(task, limit.seconds).data.sources
    return TaskSources(sources=tuple(source.model_copy(update={"revision": ""}) for source in sources))


@value_stage("documents", version=4, subject="task")
def count_task(task: EvalTask, revisions: tuple[str, ...], limit: CountLimit) -> TaskSize:
    """Load the data of ``task`` in the model process, count its documents, and compute the digest that pins them.

    ``revisions`` (see ``data_revisions``) makes the stage run again when the datasets change.

    Raises:
        InvalidInput: If the data cannot be loaded.
        Refused: If loading takes longer than ``limit``.
    """
    loaded = process.inspect_in_child(task, limit.seconds)
    metrics = {leaf: dict(labels) for leaf, labels in loaded.metrics.items()}
    return TaskSize(documents=loaded.documents, data=loaded.data, metrics=metrics)


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


@dataclass(frozen=True)
class TaskScores:
    """Scores of one model on one task, joined from all parts.

    ``location`` names the scores in messages, such as ``'gsm8k: scores of merge'``. ``parts`` are in the order of the
    sample (see ``evaluate_documents``).
    """

    location: str
    task: str
    parts: tuple[Artifact[Scores], ...]

    @cached_property
    def rows(self) -> tuple[DocumentScore, ...]:
        """Score of every document under every metric, in scoring order.

        The order does not depend on how the documents were divided into parts. The bounds for graded scores process
        documents one by one: their order must be unrelated to the scores, and one look must precede the next.

        Raises:
            InvalidInput: If two parts contain the same document.
        """
        together = tuple(
            row
            for part in self.parts
            for row in sorted(
                read_document_scores(part.directory / SCORES_FILE),
                key=lambda row: document_sort_key(row.task, row.doc_id, part.value.seed),
            )
        )
        if len({(row.task, row.doc_id, row.metric) for row in together}) < len(together):
            raise InvalidInput(self.location, found="parts with the same documents", expected="each document once")
        return together

    @property
    def lm_eval_version(self) -> str:
        """Version of lm-eval, which is the same for all parts (see ``by_task``)."""
        return self.parts[0].value.lm_eval_version

    @property
    def data(self) -> TaskData | None:
        """Data of the evaluated task, the same for all parts; None for results that lm-eval wrote."""
        return self.parts[0].value.data.get(self.task)

    @property
    def documents(self) -> int:
        """Number of scored documents, over all tasks of a group."""
        return len({(row.task, row.doc_id) for row in self.rows})

    def table(self) -> tuple[TaskScore, ...]:
        """Return the mean and standard error under each metric."""
        if len(self.parts) == 1:
            return self.parts[0].value.tasks
        return score_table(self.task, self.rows)

    @property
    def sample_start(self) -> int:
        """Position in the task's order at which the scored sample starts."""
        part = self.parts[0].value.part
        return part.first if part else 0

    @property
    def requested_documents(self) -> int:
        """Number of documents that should have scores; for results that lm-eval wrote, those that have them."""
        ranges = [part.value.part for part in self.parts]
        return sum(len(part) for part in ranges if part) if all(ranges) else self.documents

    def metrics(self, setting: MetricSetting = None) -> JudgedMetrics:
        """Return the metric that judges each leaf under the ``metric`` setting of a guard. See ``choose_metrics``."""
        return choose_metrics(self.rows, setting, self.task)

    def judge(self, metrics: JudgedMetrics) -> tuple[DocumentScore, ...]:
        """Return one score per evaluated document, under the metric of its leaf.

        Raises:
            InvalidInput: If a document has no score.
        """
        if self.documents != self.requested_documents:
            raise InvalidInput(
                self.location,
                found=f"{self.documents:,} scored documents",
                expected=f"{self.requested_documents:,}, the number of evaluated documents",
                remedy="delete 'evaluate' from the store and run again",
            )
        return metrics.judge(self.rows, self.location)


def by_task(model: str, parts: Sequence[Artifact[Scores]]) -> dict[str, TaskScores]:
    """Join the parts of each task, and return the scores of one model by task, in order of first occurrence.

    ``model`` is the model's name in messages, because an artifact may have been created under a different name.

    Raises:
        InvalidInput: If the parts of a task come from different versions of lm-eval or from different data.
    """
    grouped: dict[str, list[Artifact[Scores]]] = {}
    for part in parts:
        grouped.setdefault(part.value.tasks[0].task, []).append(part)
    joined = {}
    for task, group in grouped.items():
        location = f"{task}: scores of {model}"
        _check_one_version(location, group)
        if len({data.digest for part in group if (data := part.value.data.get(task))}) > 1:
            raise InvalidInput(
                location,
                found="parts measured on different data",
                expected="the same documents, examples and templates in all parts",
                remedy="the dataset of the task was replaced: evaluate again",
            )
        joined[task] = TaskScores(location, task, tuple(group))
    return joined


def join_parts(artifacts: Sequence[Artifact[Scores]]) -> Scores:
    """Combine all parts of each task into the scores of one model, in order of first occurrence.

    Raises:
        InvalidInput: If the parts come from different versions of lm-eval.
    """
    value = artifacts[0].value
    _check_one_version(f"scores of {value.model}", artifacts)
    joined = by_task(value.model, artifacts)
    scores = tuple(score for task_scores in joined.values() for score in task_scores.table())
    data = {task: task_scores.data for task, task_scores in joined.items() if task_scores.data}
    part = value.part if len(artifacts) == 1 else None
    ends: dict[str, AnswerEnds] = {}
    for task, new in (item for artifact in artifacts for item in artifact.value.ends.items()):
        old = ends.get(task, AnswerEnds(counts={}))
        thoughts = [part.thinking for part in (old, new) if part.thinking is not None]
        ends[task] = AnswerEnds(
            counts=Counter(old.counts) + Counter(new.counts),
            budgets=tuple(sorted({*old.budgets, *new.budgets})),
            measured=old.measured + new.measured,
            tokens=old.tokens + new.tokens,
            thinking=sum(thoughts) if thoughts else None,
            unfinished_thoughts=old.unfinished_thoughts + new.unfinished_thoughts,
            regenerated=old.regenerated + new.regenerated,
            largest_budget=max(filter(None, (old.largest_budget, new.largest_budget)), default=None),
        )
    prompts: dict[str, PromptCuts] = {}
    for task, cuts in (item for artifact in artifacts for item in artifact.value.prompts.items()):
        known = prompts.get(task, PromptCuts(documents=0, cut=0, largest=0))
        prompts[task] = PromptCuts(
            documents=known.documents + cuts.documents,
            cut=known.cut + cuts.cut,
            largest=max(known.largest, cuts.largest),
        )
    update = {"tasks": scores, "data": data, "part": part, "seconds": None, "ends": ends, "prompts": prompts}
    return value.model_copy(update=update)


def answer_ends(task: str, rows: Sequence[DocumentScore]) -> dict[str, AnswerEnds]:
    """Return how the generated answers in ``rows`` ended, keyed by ``task``; empty if there are none."""
    documents = {(row.task, row.doc_id): row for row in rows}.values()  # a document has one row per metric
    endings = [
        AnswerEnd(reason, tokens, thinking)  # type: ignore[arg-type]  # the table stores texts
        for row in documents
        for reason, tokens, thinking in zip_longest(row.ended, row.answer_tokens, row.thinking_tokens)
    ]
    if not endings:
        return {}
    budgets = {
        budget
        for row in documents
        for reason, tokens in zip(row.ended, row.answer_tokens, strict=True)
        if reason == "length" and (budget := row.budgets[-1] if row.budgets else tokens) is not None
    }
    again = [row for row in documents if len(row.budgets) > 1]
    lengths = [end.tokens for end in endings if end.tokens is not None]
    thoughts = [end.thinking for end in endings if end.thinking is not None]
    ends = AnswerEnds(
        counts=dict(sorted(Counter(end.reason for end in endings).items())),
        budgets=tuple(sorted(budgets)),
        regenerated=sum(len(row.ended) for row in again),
        largest_budget=max((row.budgets[-1] for row in again), default=None),
        measured=len(lengths),
        tokens=sum(lengths),
        thinking=sum(thoughts) if thoughts else None,
        unfinished_thoughts=sum(end.is_unfinished_thought for end in endings),
    )
    return {task: ends}


def prompt_cuts(task: str, rows: Sequence[DocumentScore]) -> dict[str, PromptCuts]:
    """Return how many prompts in ``rows`` were truncated, keyed by ``task``; empty if that is unknown."""
    documents = {(row.task, row.doc_id): row for row in rows}.values()
    cuts = [row.prompt_cut for row in documents if row.prompt_cut is not None]
    if not cuts:
        return {}
    return {task: PromptCuts(documents=len(cuts), cut=sum(cut > 0 for cut in cuts), largest=max(cuts))}


def score_table(task: str, rows: Sequence[DocumentScore]) -> tuple[TaskScore, ...]:
    """Return the mean and standard error of every metric over the documents that have it.

    The result does not depend on the division of documents into parts. If the leaves of a group are judged by different
    metrics, the first entry covers all documents, each under the metric of its leaf.
    """
    table = []
    judging = choose_metrics(rows, None, task)
    if judging.by_leaf_if_different and len(judged_rows := judging.select(rows)) == len(documents_of(rows)):
        table.append(_task_score(task, judging.label, [row.outcome for row in judged_rows], judging.higher_is_better))
    labels = metrics_by_leaf(rows)
    for metric in dict.fromkeys(name for metrics in labels.values() for name in metrics):
        leaf_metrics = JudgedMetrics(
            {leaf: (metric, leaf_labels[metric]) for leaf, leaf_labels in labels.items() if metric in leaf_labels}
        )
        scores = [row.outcome for row in leaf_metrics.select(rows)]
        table.append(_task_score(task, metric, scores, leaf_metrics.higher_is_better))
    return tuple(table)


def _check_one_version(location: str, parts: Sequence[Artifact[Scores]]) -> None:
    versions_found = sorted({part.value.lm_eval_version for part in parts})
    if len(versions_found) > 1:
        raise InvalidInput(
            location, found=f"parts from lm-eval {' and '.join(versions_found)}", expected="one version of lm-eval"
        )


def _task_score(task: str, metric: str, values: Sequence[float], higher_is_better: bool) -> TaskScore:
    n = len(values)
    # fsum is exact, so the result has the same bits however the documents were divided into parts.
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

"""Join the scores of one model on a task from all scored parts, and describe them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from mergegate.merge_core.errors import InvalidInput
from mergegate.merge_core.wording import format_count
from mergegate.tasks.base.stage import StageValue
from mergegate.tasks.base.store import Artifact, NotInKey
from mergegate.tasks.quality.evaluation.backends import CUT_OFF, AnswerEnd
from mergegate.tasks.quality.evaluation.document_order import DocumentRange, TaskData, document_sort_key
from mergegate.tasks.quality.evaluation.scoring.document_scores import SCORES_FILE, DocumentScore, read_document_scores
from mergegate.tasks.quality.evaluation.scoring.metrics import (
    PROBABILITY,
    JudgedMetrics,
    MetricSetting,
    choose_metrics,
    documents_of,
    metrics_by_leaf,
)


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
            for text in (ends.describe_length() if ends.thinking else "", ends.describe_regeneration(), ends.describe())
        ]
        prompts = [cuts.describe() for cuts in self.prompts.values()]
        return " · ".join([*scores, *(text for text in (*ends, *prompts) if text)])


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
        """Return one score per evaluated document, under the metric of its leaf."""
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
    """Combine all parts of each task into the scores of one model, in order of first occurrence."""
    value = artifacts[0].value
    if len(artifacts) == 1:
        return value.model_copy(update={"seconds": None})
    _check_one_version(f"scores of {value.model}", artifacts)
    joined = by_task(value.model, artifacts)
    ends: dict[str, AnswerEnds] = {}
    prompts: dict[str, PromptCuts] = {}
    for task, scores in joined.items():
        ends |= answer_ends(task, scores.rows) if any(task in part.value.ends for part in scores.parts) else {}
        prompts |= prompt_cuts(task, scores.rows) if any(task in part.value.prompts for part in scores.parts) else {}
    update = {
        "tasks": tuple(score for scores in joined.values() for score in scores.table()),
        "data": {task: scores.data for task, scores in joined.items() if scores.data},
        "ends": ends,
        "prompts": prompts,
        "part": None,
        "seconds": None,
    }
    return value.model_copy(update=update)


def summarize(task: str, rows: Sequence[DocumentScore]) -> dict[str, Any]:
    """Return the fields of ``Scores`` that follow from all scores of a task."""
    return {"tasks": score_table(task, rows), "ends": answer_ends(task, rows)}


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
        task=task, metric=metric, n=n, score=mean, stderr=(variance / n) ** 0.5, higher_is_better=higher_is_better
    )

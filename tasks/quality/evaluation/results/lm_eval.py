"""Read the scores of each document from the output files of lm-eval, without running any model.

``lm_eval run --output_path DIR --log_samples`` writes ``results_DATE.json`` and, next to it, one
``samples_TASK_DATE.jsonl`` per task into a directory below ``DIR`` that is named after the model. lm-eval 0.5 writes
the same files with additional keys.

These files are untrusted, so every value that a gate reads has a type here; all other values are ignored. The shapes
follow ``lm_eval.result_schema``. Keys that some versions of lm-eval omit have a default.

A samples file is accepted only if it belongs to its results file. The results file contains a hash over all samples,
the number of documents and the means of their scores; this module recomputes and compares each of them.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import Field

from mergegate.merge_core.errors import InvalidInput, suggest
from mergegate.merge_core.parsing import JsonBounds, format_value, line_location, parse_json, read_lines, read_plain
from mergegate.tasks.quality.evaluation.definitions.support import registered_metric
from mergegate.tasks.quality.evaluation.results.contract import (
    LM_EVAL,
    MAX_SAMPLES,
    Logged,
    LoggedResults,
    TaskResults,
    parse_logged,
)
from mergegate.tasks.quality.evaluation.scoring.document_scores import DocumentScore
from mergegate.tasks.quality.evaluation.scoring.metrics import (
    PROBABILITY,
    AnsweredChoice,
    chance_level,
    check_all_scored,
    checked_score,
    choice_from_log,
    probabilities,
)

MAX_SAMPLE_BYTES = 16 << 20
MAX_RESULTS_BYTES = 64 << 20
_BOUNDS = JsonBounds(size=MAX_RESULTS_BYTES)
_LINE_BOUNDS = JsonBounds(size=MAX_SAMPLE_BYTES, values=200_000)
_AGAIN = "copy the file again, or run lm-eval again with --output_path and --log_samples"

RESULTS_NAME = re.compile(r"_(\d{4}-\d\d-\d\dT\d\d-\d\d-\d\d(?:\.\d+)?)\.json$")
_ALTERED = "one of the two files was altered: copy both again, or run lm-eval again"
LOGGED = "run lm-eval with --output_path and --log_samples"
# Metrics of lm-eval whose score of a document is a fraction between 0 and 1.
SHARES = frozenset(("acc", "acc_norm", "acc_bytes", "acc_mutual_info", "acc_all", "em", "exact_match", "exact", "f1"))

_Hash = Annotated[str, Field(max_length=128)]


class ListedMetric(Logged):
    """One entry of a task's ``metric_list``."""

    metric: str
    aggregation: str | None = None  # None: lm-eval's default for the metric


class WrittenTask(Logged):
    """Configuration of one task."""

    output_type: str | None = None
    process_results: str | None = None  # source of a function
    metric_list: list[ListedMetric] | None = None
    doc_to_target: str | int | list[Any] | None = None
    repeats: int | None = None


class SampleCount(Logged):
    """Number of documents in one task, and number of scored ones."""

    original: int  # documents in the task
    effective: int  # documents that were scored


class WrittenConfig(Logged):
    """Settings with which lm-eval was started."""

    gen_kwargs: dict[str, Any] | str | None = None
    model_dtype: str | None = None
    batch_size: int | str | None = None


class WrittenResults(Logged):
    """Content of a results file."""

    results: dict[str, dict[str, Any]]  # by task and 'acc,none'; checked when a number is read
    configs: dict[str, WrittenTask]
    lm_eval_version: str
    group_subtasks: dict[str, list[str]] = Field(default_factory=dict)
    versions: dict[str, str | int | float | None] = Field(default_factory=dict)
    higher_is_better: dict[str, dict[str, bool | None]] = Field(default_factory=dict)
    n_samples: dict[str, SampleCount] = Field(default_factory=dict, alias="n-samples")
    task_hashes: dict[str, str] = Field(default_factory=dict)
    config: WrittenConfig = WrittenConfig()
    transformers_version: str | None = None
    max_length: int | None = None
    model_source: str | None = None
    model_name: str | None = None
    system_instruction_sha: str | None = None
    fewshot_as_multiturn: bool | None = None
    chat_template_sha: str | None = None


class WrittenSample(Logged):
    """One line of a samples file: one document under one filter. ``metrics`` lists the keys of its scores."""

    doc_id: Annotated[int, Field(ge=0, lt=1 << 53)]
    filter: str
    metrics: Annotated[list[str], Field(max_length=64)]
    doc_hash: _Hash
    prompt_hash: _Hash
    target_hash: _Hash


def read_results(path: Path, date: str) -> ResultsFile:
    """Read a results file, but not its samples. Raise InvalidInput if it is not valid."""
    content = parse_json(read_plain(path, MAX_RESULTS_BYTES), str(path), bounds=_BOUNDS, expected="a complete file")
    return ResultsFile(
        path, date, parse_logged(WrittenResults, content, str(path), "a results file of lm-eval", _AGAIN)
    )


@dataclass(frozen=True)
class ResultsFile(LoggedResults):
    """A results file of lm-eval, with the date in its name, which its samples files share."""

    path: Path
    date: str
    content: WrittenResults

    @property
    def model(self) -> str:
        return f"{self.path.parent}: {self.content.model_name}"

    @property
    def task_names(self) -> tuple[str, ...]:
        return (*self.content.configs, *self.content.group_subtasks)

    def has(self, task: str) -> bool:
        return bool(self.leaves(task))

    def read(self, task: str, cluster_field: str | None) -> TaskResults:
        leaves = self.leaves(task)
        outcomes: list[DocumentScore] = []
        count = 0
        for leaf in leaves:
            samples = _read_samples(self, leaf, cluster_field, MAX_SAMPLES - count)
            count += len(samples)
            directions = self.content.higher_is_better.get(leaf, {})
            leaf_scores: list[DocumentScore] = []
            for metric, key in _means(self, leaf, samples):
                if (higher_is_better := directions.get(metric)) is not None:
                    leaf_scores += [
                        _outcome(leaf, key, higher_is_better, sample, sample.score(metric))
                        for sample in samples
                        if metric in sample.metrics and key == f"{metric},{sample.filter}"
                    ]
            if not leaf_scores:
                metric_names = sorted({metric for sample in samples for metric in sample.metrics})
                raise InvalidInput(
                    f"{self.path}: task {leaf}",
                    found="no metric that is a mean over documents with a direction, only "
                    + (", ".join(metric_names) or "none at all"),
                    expected="a score per document whose mean is the score of the task",
                    remedy="guard the other tasks of the group individually" if leaf != task else "",
                )
            check_all_scored(f"{self.path}: task {task}", ((leaf, sample.doc_id) for sample in samples), leaf_scores)
            outcomes += leaf_scores
            if PROBABILITY not in directions:
                values = probabilities([each.score("acc") for each in samples], [each.choice for each in samples])
                outcomes += [
                    _outcome(leaf, f"{PROBABILITY},{sample.filter}", True, sample, probability)
                    for sample, probability in zip(samples, values or [None] * len(samples), strict=True)
                    if probability is not None
                ]
        content = self.content
        conditions = {
            "lm_eval_version": content.lm_eval_version,
            "task_versions": json.dumps({leaf: str(content.versions.get(leaf)) for leaf in leaves}),
            "model_source": str(content.model_source),
            "chat_template_sha": str(content.chat_template_sha),
            # Matters only with a chat template. Without one, lm-eval's library and command line differ in it.
            "fewshot_as_multiturn": str(bool(content.chat_template_sha and content.fewshot_as_multiturn)),
            "system_instruction_sha": str(content.system_instruction_sha),
            "gen_kwargs": json.dumps(content.config.gen_kwargs or {}, sort_keys=True),
            "repeats": json.dumps([content.configs[leaf].repeats for leaf in leaves]),
            "higher_is_better": json.dumps([content.higher_is_better.get(leaf) for leaf in leaves], sort_keys=True),
        }
        precision = {
            "model_dtype": str(content.config.model_dtype),
            "batch_size": str(content.config.batch_size),
            "max_length": str(content.max_length),
            "transformers_version": str(content.transformers_version),
        }
        return TaskResults(task, tuple(outcomes), LM_EVAL, content.lm_eval_version, conditions, precision, self.path)

    def leaves(self, task: str) -> tuple[str, ...]:
        """Return the tasks below a group, or the task itself; empty if the file contains neither."""
        leaves: dict[str, None] = {}
        visited: set[str] = set()
        # lm-eval 0.5 names a task below a group 'group::task'.
        qualified = [name for name in self.content.configs if name.rpartition("::")[2] == task]
        queue = qualified if len(qualified) == 1 else [task]
        while queue:  # visit each name once, because groups in a file from elsewhere may be circular
            name = queue.pop()
            if name in visited:
                continue
            visited.add(name)
            if children := self.content.group_subtasks.get(name):
                queue += reversed(children)
            elif name in self.content.configs:
                leaves[name] = None
        return tuple(leaves)


class _Sample(NamedTuple):
    """The values of a line that a gate needs. The text and the answers, most of the line, are dropped."""

    doc_id: int
    filter: str
    hashes: tuple[str, str, str]
    metrics: tuple[str, ...]
    scores: tuple[float | None, ...]  # None: not a number
    cluster: str
    choice: AnsweredChoice | None  # None: not a choice task
    chance: float  # score of a random choice, see ``DocumentScore``

    def score(self, metric: str) -> float | None:
        """Return the score under ``metric``, or None if there is none or it is not a number."""
        return self.scores[self.metrics.index(metric)] if metric in self.metrics else None


def _read_samples(file: ResultsFile, task: str, cluster_field: str | None, most: int) -> tuple[_Sample, ...]:
    """Read a samples file and check that it belongs to its results file and has each document once."""
    stated, totals = file.content.task_hashes.get(task), file.content.n_samples.get(task)
    if totals is None:
        raise InvalidInput(
            f"{file.path}: n-samples", found=f"no key {task}", expected="its number of documents", remedy=_ALTERED
        )
    path = file.path.with_name(f"samples_{task}_{file.date}.jsonl" if not {"/", "\0"} & set(task) else "samples_…")
    if stated is None or not os.path.exists(path):  # noqa: PTH110  # Path.exists raises for a name that is too long
        raise InvalidInput(str(path), found="no such file", expected=f"the samples of {file.path.name}", remedy=LOGGED)
    config = file.content.configs[task].model_dump()
    hasher, samples = hashlib.sha256(), []
    interned: dict[Any, Any] = {}  # texts that are equal in every line, to store each only once
    lines: dict[tuple[int, str], int] = {}
    for number, line in read_lines(path, longest=MAX_SAMPLE_BYTES, most=most):
        location = line_location(path, number)
        content: Any = parse_json(
            line, location, bounds=_LINE_BOUNDS, expected="one sample per line; the file may be cut off"
        )
        written = parse_logged(WrittenSample, content, location, "a sample of lm-eval", _AGAIN)
        cluster, document = "", content.get("doc")
        if cluster_field is not None:
            if not isinstance(document, dict) or cluster_field not in document:
                raise InvalidInput(
                    f"{location}: document {written.doc_id}",
                    found=f"no field {cluster_field!r}",
                    expected="the field of cluster_by in every document",
                    remedy=suggest(cluster_field, document) if isinstance(document, dict) else "",
                )
            cluster = str(document[cluster_field])
        scores = [content.get(metric) for metric in written.metrics]
        metrics = tuple(written.metrics)
        both = (content.get(key) for key in ("arguments", "filtered_resps"))
        requests, responses = (len(each) if isinstance(each, (dict, list)) else 0 for each in both)
        # Only choices have several requests. Altered settings must not turn them into free answers.
        output_type = "multiple_choice" if requests > 1 else config.get("output_type")
        if output_type == "multiple_choice" and (requests != responses or not requests):
            raise InvalidInput(
                f"{location}: document {written.doc_id}",
                found=f"{requests} arguments and {responses} filtered_resps",
                expected="one response for each choice",
                remedy=_ALTERED,
            )
        choice = choice_from_log(config, content)
        known = (len(choice.likelihoods), len(choice.right)) if choice else None
        sample = _Sample(
            written.doc_id,
            interned.setdefault(written.filter, written.filter),
            (written.doc_hash, written.prompt_hash, written.target_hash),
            interned.setdefault(metrics, metrics),
            tuple(float(score) if isinstance(score, (bool, int, float)) else None for score in scores),
            interned.setdefault(cluster, cluster),
            choice,
            chance_level(output_type, content, known),
        )
        if first := lines.get((sample.doc_id, sample.filter)):
            raise InvalidInput(
                location,
                found=f"document {sample.doc_id} again under the filter {sample.filter}, first in line {first}",
                expected="each document once",
                remedy=_ALTERED,
            )
        if sample.doc_id >= totals.original:
            raise InvalidInput(
                f"{location}: doc_id",
                found=str(sample.doc_id),
                expected=f"less than the {totals.original} documents in {file.path.name}",
                remedy=_ALTERED,
            )
        lines[sample.doc_id, sample.filter] = number
        hasher.update("".join(sample.hashes).encode())
        samples.append(sample)
    if hasher.hexdigest() != stated:
        raise InvalidInput(
            str(path),
            found=f"other samples than those of {file.path.name}: {len({sample.doc_id for sample in samples})} "
            f"documents, {totals.effective} were scored",
            expected="the unchanged file of lm-eval",
            remedy="the file is truncated, altered or from another run: copy it again, or run lm-eval again",
        )
    for name, documents in Counter(sample.filter for sample in samples).items():
        if documents != totals.effective:
            raise InvalidInput(
                str(path),
                found=f"{documents} documents under the filter {name}",
                expected=f"the {totals.effective} of {totals.original} documents in {file.path.name}",
                remedy=_ALTERED,
            )
    return tuple(samples)


def _means(file: ResultsFile, task: str, samples: Sequence[_Sample]) -> Iterator[tuple[str, str]]:
    """Yield ``('acc', 'acc,none')`` for every metric that the results file reports as the mean of its samples' scores.

    A metric is a mean if the task declares so, or if the task declares no aggregation and lm-eval averages the metric.
    A metric that lm-eval does not know is a mean if its reported value equals the mean of the samples.
    """
    location = f"{file.path}: task {task}"
    reported = file.content.results.get(task, {})
    declared = {entry.metric: entry.aggregation for entry in file.content.configs[task].metric_list or ()}
    values: dict[tuple[str, str], list[tuple[int, float | None]]] = {}
    for sample in samples:
        for metric, score in zip(sample.metrics, sample.scores, strict=True):
            values.setdefault((metric, f"{metric},{sample.filter}"), []).append((sample.doc_id, score))
    for (metric, key), scores in values.items():
        aggregation = declared.get(metric)
        if aggregation is None and key in reported and (averaged := registered_metric(metric)[0]) is not None:
            aggregation = "mean" if averaged else "not a mean"
        if aggregation not in (None, "mean"):
            continue
        numbers = []
        for document, score in scores:
            if score is None:
                if aggregation is None:
                    break
                raise InvalidInput(
                    location,
                    found=f"{metric} of document {document} is not a number",
                    expected="a score per document whose mean is the score of the task",
                    remedy=_ALTERED,
                )
            numbers.append(checked_score(location, key, document, score))
            if metric in SHARES and not 0 <= score <= 1:
                raise InvalidInput(
                    location,
                    found=f"{metric} of document {document} is {score:g}",
                    expected="a fraction from 0 to 1",
                    remedy="the results were altered, or belong to another metric with this name: run lm-eval again",
                )
        total = reported.get(key)
        stated = float(total) if isinstance(total, (int, float)) and not isinstance(total, bool) else None
        if key in reported and stated is None and len(numbers) == len(scores):
            raise InvalidInput(
                f"{file.path}: results.{task}.{key}", found=format_value(total), expected="a number", remedy=_ALTERED
            )
        if (
            stated is not None
            and len(numbers) == len(scores)
            and math.isclose(math.fsum(numbers) / len(numbers), stated, rel_tol=1e-9, abs_tol=1e-9)
        ):
            yield metric, key
        elif aggregation == "mean":
            raise InvalidInput(
                location,
                found=f"{key} is {total!r:.40}, which is not the mean of its samples",
                expected="the unchanged samples of lm-eval",
                remedy=_ALTERED,
            )


def _outcome(task: str, key: str, higher_is_better: bool, sample: _Sample, score: float | None) -> DocumentScore:
    # If a metric is a mean, every score is a number: see _means.
    return DocumentScore(
        task,
        key,
        sample.doc_id,
        *sample.hashes,
        outcome=math.nan if score is None else score,
        cluster=sample.cluster,
        higher_is_better=higher_is_better,
        chance=sample.chance,
    )

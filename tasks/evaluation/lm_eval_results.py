"""Read the scores of each document from the output files of lm-eval, without running any model.

``lm_eval run --output_path DIR --log_samples`` writes ``results_DATE.json`` and, next to it, one
``samples_TASK_DATE.jsonl`` per task into a directory below ``DIR`` that is named after the model. lm-eval 0.5 writes
the same files with additional keys.

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
from typing import Any, NamedTuple

from mergegate.merge_core.errors import InvalidInput, suggest
from mergegate.merge_core.parsing import format_value, line_location, read_lines
from mergegate.tasks.evaluation.definitions.support import registered_metric
from mergegate.tasks.evaluation.lm_eval_files import (
    MAX_SAMPLE_BYTES,
    MAX_SAMPLES,
    WrittenResults,
    WrittenSample,
    parse_written,
)
from mergegate.tasks.evaluation.logged_results import LM_EVAL, LoggedResults, TaskResults
from mergegate.tasks.evaluation.scoring.document_scores import DocumentScore
from mergegate.tasks.evaluation.scoring.metrics import (
    PROBABILITY,
    AnsweredChoice,
    chance_level,
    check_all_scored,
    checked_score,
    choice_from_log,
    probabilities,
)

RESULTS_NAME = re.compile(r"_(\d{4}-\d\d-\d\dT\d\d-\d\d-\d\d(?:\.\d+)?)\.json$")
_ALTERED = "one of the two files was altered: copy both again, or run lm-eval again"
LOGGED = "run lm-eval with --output_path and --log_samples"
# Metrics of lm-eval whose score of a document is a fraction between 0 and 1.
SHARES = frozenset(("acc", "acc_norm", "acc_bytes", "acc_mutual_info", "acc_all", "em", "exact_match", "exact", "f1"))


@dataclass(frozen=True)
class ResultsFile(LoggedResults):
    """A results file of lm-eval, with the date in its name, which its samples files share."""

    path: Path
    date: str
    content: WrittenResults

    @property
    def model(self) -> str:
        """Directory and name of the model."""
        return f"{self.path.parent}: {self.content.model_name}"

    @property
    def task_names(self) -> tuple[str, ...]:
        """Names of all tasks and groups in the file."""
        return (*self.content.configs, *self.content.group_subtasks)

    def has(self, task: str) -> bool:
        """Return whether the file has results of a task or a group of tasks."""
        return bool(self.leaves(task))

    def read(self, task: str, cluster_field: str | None) -> TaskResults:
        """Read the results of a task or a group of tasks, from the samples files."""
        return _read(self, task, cluster_field)

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


def _read(file: ResultsFile, task: str, cluster_field: str | None) -> TaskResults:
    leaves = file.leaves(task)
    outcomes: list[DocumentScore] = []
    count = 0
    for leaf in leaves:
        samples = _read_samples(file, leaf, cluster_field, MAX_SAMPLES - count)
        count += len(samples)
        directions = file.content.higher_is_better.get(leaf, {})
        leaf_scores: list[DocumentScore] = []
        for metric, key in _means(file, leaf, samples):
            if (higher_is_better := directions.get(metric)) is not None:
                leaf_scores += [
                    _outcome(leaf, key, higher_is_better, sample, sample.score(metric))
                    for sample in samples
                    if metric in sample.metrics and key == f"{metric},{sample.filter}"
                ]
        if not leaf_scores:
            metric_names = sorted({metric for sample in samples for metric in sample.metrics})
            raise InvalidInput(
                f"{file.path}: task {leaf}",
                found="no metric that is a mean over documents with a direction, only "
                + (", ".join(metric_names) or "none at all"),
                expected="a score per document whose mean is the score of the task",
                remedy="guard the other tasks of the group individually" if leaf != task else "",
            )
        check_all_scored(f"{file.path}: task {task}", ((leaf, sample.doc_id) for sample in samples), leaf_scores)
        outcomes += leaf_scores
        if PROBABILITY not in directions:
            values = probabilities([each.score("acc") for each in samples], [each.choice for each in samples])
            outcomes += [
                _outcome(leaf, f"{PROBABILITY},{sample.filter}", True, sample, probability)
                for sample, probability in zip(samples, values or [None] * len(samples), strict=True)
                if probability is not None
            ]
    content = file.content
    conditions = {
        "lm_eval_version": content.lm_eval_version,
        "task_versions": json.dumps({leaf: str(content.versions.get(leaf)) for leaf in leaves}),
        "model_source": str(content.model_source),
        "chat_template_sha": str(content.chat_template_sha),
        # Matters only with a chat template; without one, lm-eval's library and command line record different values.
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
    return TaskResults(task, tuple(outcomes), LM_EVAL, content.lm_eval_version, conditions, precision, file.path)


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
        raise InvalidInput(
            str(path),
            found="no such file",
            expected=f"the samples of {file.path.name}",
            remedy=LOGGED,
        )
    config = file.content.configs[task].model_dump()
    hasher, samples = hashlib.sha256(), []
    interned: dict[Any, Any] = {}  # texts that are equal in every line, to store each only once
    lines: dict[tuple[int, str], int] = {}
    for number, line in read_lines(path, longest=MAX_SAMPLE_BYTES, most=most):
        written, content = parse_written(WrittenSample, line, line_location(path, number))
        cluster, document = "", content.get("doc")
        if cluster_field is not None:
            if not isinstance(document, dict) or cluster_field not in document:
                raise InvalidInput(
                    f"{line_location(path, number)}: document {written.doc_id}",
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
                f"{line_location(path, number)}: document {written.doc_id}",
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
                line_location(path, number),
                found=f"document {sample.doc_id} again under the filter {sample.filter}, first in line {first}",
                expected="each document once",
                remedy=_ALTERED,
            )
        if sample.doc_id >= totals.original:
            raise InvalidInput(
                f"{line_location(path, number)}: doc_id",
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

    Raises:
        InvalidInput: If a reported mean is not that of the samples, or a score is out of the metric's range.
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

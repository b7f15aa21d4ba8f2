"""lm-eval's own output files, read as evidence: what a model scored on each document, without running any model.

``lm_eval run --output_path DIR --log_samples`` writes ``results_DATE.json`` and, for each task, one
``samples_TASK_DATE.jsonl`` beside it, in a directory named after the model below ``DIR``::

    found = find_results(Path("DIR"))
    results = read_task(found, "gsm8k")          # of a group (mmlu): the documents of all tasks below it
    check_alike(reference, results, "gsm8k: merge against reverser")

A samples file is believed only where it is the one that its results file speaks of: lm-eval writes a hash over all of
its documents, their number, and the means of their scores, and each is computed again here.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from mergegate.merge_core.errors import InvalidInput, suggest
from mergegate.merge_core.parsing import format_value, line_location, read_lines
from mergegate.tasks.evaluation.choice_probability import PROBABILITY, AnsweredChoice, answered_then, probabilities
from mergegate.tasks.evaluation.declared_metrics import is_registered_mean
from mergegate.tasks.evaluation.document_scores import DocumentScore
from mergegate.tasks.evaluation.lm_eval_files import (
    MAX_SAMPLE_BYTES,
    MAX_SAMPLES,
    WrittenResults,
    parse_sample,
    read_results_file,
)
from mergegate.tasks.evaluation.metrics import check_all_scored, checked_score

_DATE = re.compile(r"_(\d{4}-\d\d-\d\dT\d\d-\d\d-\d\d(?:\.\d+)?)\.json$")
_ALTERED = "one of the two files was altered: copy both again, or run lm-eval again"
_LOGGED = "run lm-eval with --output_path and --log_samples"
# Metrics of lm-eval whose score of a document is a share of what could be right.
SHARES = frozenset(("acc", "acc_norm", "acc_bytes", "acc_mutual_info", "acc_all", "em", "exact_match", "exact", "f1"))


@dataclass(frozen=True)
class ResultsFile:
    """A results file of lm-eval, with the date that it shares with its samples files."""

    path: Path
    date: str
    content: WrittenResults

    def leaves(self, task: str) -> tuple[str, ...]:
        """Return the tasks below a group, or the task itself; empty if this file has neither."""
        leaves: dict[str, None] = {}
        seen: set[str] = set()
        waiting = [task]
        while waiting:  # each name once: groups in a file from elsewhere may be circular
            name = waiting.pop()
            if name in seen:
                continue
            seen.add(name)
            if children := self.content.group_subtasks.get(name):
                waiting += reversed(children)
            elif name in self.content.configs:
                leaves[name] = None
        return tuple(leaves)


class Conditions(NamedTuple):
    """Conditions under which a model was evaluated. Scores compare only if all of them are equal."""

    lm_eval_version: str
    task_versions: tuple[tuple[str, str], ...]
    model_source: str  # 'hf', 'vllm'
    chat_template_sha: str
    fewshot_as_multiturn: str
    system_instruction_sha: str
    gen_kwargs: str
    higher_is_better: str


class Precision(NamedTuple):
    """What moves scores by tenths of a point: worth a word where it differs."""

    model_dtype: str
    batch_size: str
    max_length: str
    transformers_version: str


@dataclass(frozen=True)
class TaskResults:
    """What lm-eval wrote about one task, or one group of tasks."""

    task: str
    outcomes: tuple[DocumentScore, ...]  # of metrics that are means over documents
    conditions: Conditions
    precision: Precision
    file: Path


def find_results(place: Path) -> tuple[ResultsFile, ...]:
    """The results files of one model, newest first.

    Args:
        place: What ``--output_path`` said, the directory of the model below it, or one results file.

    Raises:
        InvalidInput: when there is none, one cannot be read, or there are those of several models.
    """
    if place.is_file():
        paths = [place]
    elif place.is_dir():
        paths = [path for pattern in ("*.json", "*/*.json") for path in sorted(place.glob(pattern))]
    else:
        raise InvalidInput(str(place), found="no such directory", expected="lm-eval's output", remedy=_LOGGED)
    dated = [(match.group(1), path) for path in paths if (match := _DATE.search(path.name))]
    if not dated:
        raise InvalidInput(str(place), found="no results_DATE.json", expected="lm-eval's output", remedy=_LOGGED)
    files = [ResultsFile(path, date, read_results_file(path)) for date, path in dated]
    models = {(file.path.parent, str(file.content.model_name)): file for file in files}
    if len(models) > 1:
        several = sorted(str(file.path.relative_to(place)) for file in models.values())
        raise InvalidInput(
            str(place),
            found=f"results of {len(models)} models: {', '.join(several)}",
            expected="those of one",
            remedy="name the directory of one model, or one results file",
        )
    return tuple(sorted(files, key=lambda file: file.date, reverse=True))


def read_task(found: Sequence[ResultsFile], task: str, cluster_field: str | None = None) -> TaskResults:
    """The newest results of a task or a group of tasks.

    Only metrics that are means over documents are kept: a gate needs each document's share in the score. Choice tasks
    have one more, the probability of the right answer, where the samples say which answer that is.

    Args:
        cluster_field: Field of the documents that says which of them belong together.

    Raises:
        InvalidInput: when there are none, or its samples files are cut off, altered or of another run.
    """
    file = next((file for file in found if file.leaves(task)), None)
    if file is None:
        known = {name for file in found for name in (*file.content.configs, *file.content.group_subtasks)}
        raise InvalidInput(
            f"{found[0].path.parent}: task {task}", found="no results of it", remedy=suggest(task, known)
        )
    leaves = file.leaves(task)
    outcomes: list[DocumentScore] = []
    read = 0
    for leaf in leaves:
        samples = _read_samples(file, leaf, cluster_field, MAX_SAMPLES - read)
        read += len(samples)
        directions = file.content.higher_is_better.get(leaf, {})
        found_here: list[DocumentScore] = []
        for metric, key in _means(file, leaf, samples):
            if (higher := directions.get(metric)) is not None:
                found_here += [
                    _outcome(leaf, key, higher, sample, sample.score(metric))
                    for sample in samples
                    if metric in sample.metrics and key == f"{metric},{sample.filter}"
                ]
        if not found_here:
            has = sorted({metric for sample in samples for metric in sample.metrics})
            raise InvalidInput(
                f"{file.path}: task {leaf}",
                found="no metric that is a mean over documents with a direction, only "
                + (", ".join(has) or "none at all"),
                expected="a score of each document, of which the task's is the mean",
                remedy="guard the other tasks of the group one by one" if leaf != task else "",
            )
        check_all_scored(f"{file.path}: task {task}", ((leaf, sample.doc_id) for sample in samples), found_here)
        outcomes += found_here
        if PROBABILITY not in directions:
            outcomes += _probabilities(leaf, samples)
    return TaskResults(task, tuple(outcomes), _conditions(file, leaves), _precision(file), file.path)


def require_same_conditions(reference: TaskResults, merge: TaskResults, where: str) -> None:
    """See that two models were asked under the same conditions. Documents and prompts are compared when paired.

    Raises:
        InvalidInput: naming the first condition that differs.
    """
    for name, ours, theirs in zip(Conditions._fields, reference.conditions, merge.conditions, strict=True):
        if ours != theirs:
            raise InvalidInput(
                where,
                found=f"another {name} on each side: {_short(ours)} in {reference.file}, {_short(theirs)} in "
                f"{merge.file}",
                expected="both models asked alike",
                remedy="run lm-eval on both with the same version and settings",
            )


def precision_differences(reference: TaskResults, merge: TaskResults) -> tuple[str, ...]:
    """What does not forbid the comparison but moves scores by tenths of a point, a phrase each."""
    return tuple(
        f"{name} {ours} and {theirs}"
        for name, ours, theirs in zip(Precision._fields, reference.precision, merge.precision, strict=True)
        if ours != theirs
    )


class _Sample(NamedTuple):
    """What a gate needs of a line. The document's text and the answers, most of the line, are dropped at once."""

    doc_id: int
    filter: str
    hashes: tuple[str, str, str]
    metrics: tuple[str, ...]
    scores: tuple[float | None, ...]  # None: not a number
    cluster: str
    answered: AnsweredChoice | None  # None: not a choice task

    def score(self, metric: str) -> float | None:
        """Return the score under ``metric``, None if it has no number there."""
        return self.scores[self.metrics.index(metric)] if metric in self.metrics else None


def _read_samples(file: ResultsFile, task: str, cluster_field: str | None, most: int) -> tuple[_Sample, ...]:
    """Read a samples file, and check that it belongs to its results file and has each document once."""
    stated, counted = file.content.task_hashes.get(task), file.content.n_samples.get(task)
    if counted is None:
        raise InvalidInput(
            f"{file.path}: n-samples", found=f"no {task}", expected="the number of its documents", remedy=_ALTERED
        )
    path = file.path.with_name(f"samples_{task}_{file.date}.jsonl" if not {"/", "\0"} & set(task) else "samples_…")
    if stated is None or not os.path.exists(path):  # noqa: PTH110  # pathlib's own raises for a name that is too long
        raise InvalidInput(
            str(path),
            found="not there",
            expected=f"the samples that {file.path.name} speaks of",
            remedy=_LOGGED,
        )
    config = file.content.configs[task].model_dump()
    running, samples, names = hashlib.sha256(), [], _Names()
    lines: dict[tuple[int, str], int] = {}
    for number, line in read_lines(path, longest=MAX_SAMPLE_BYTES, most=most):
        sample = _sample(line, path, number, cluster_field, config, names)
        if first := lines.get((sample.doc_id, sample.filter)):
            raise InvalidInput(
                line_location(path, number),
                found=f"document {sample.doc_id} twice under the filter {sample.filter}, first in line {first}",
                expected="each document once",
                remedy=_ALTERED,
            )
        if sample.doc_id >= counted.original:
            raise InvalidInput(
                f"{line_location(path, number)}: doc_id",
                found=str(sample.doc_id),
                expected=f"less than the {counted.original} documents that {file.path.name} speaks of",
                remedy=_ALTERED,
            )
        lines[sample.doc_id, sample.filter] = number
        running.update("".join(sample.hashes).encode())
        samples.append(sample)
    if running.hexdigest() != stated:
        raise InvalidInput(
            str(path),
            found=f"other samples than those of {file.path.name}: {len({sample.doc_id for sample in samples})} "
            f"documents, {counted.effective} were scored",
            expected="the file as lm-eval wrote it",
            remedy="it is cut off, altered or of another run: copy it again, or run lm-eval again",
        )
    for name, documents in Counter(sample.filter for sample in samples).items():
        if documents != counted.effective:
            raise InvalidInput(
                str(path),
                found=f"{documents} documents under {name}",
                expected=f"the {counted.effective} of {counted.original} documents that {file.path.name} speaks of",
                remedy=_ALTERED,
            )
    return tuple(samples)


class _Names:
    """Texts that are the same in every line, stored once."""

    def __init__(self) -> None:
        self._known: dict[Any, Any] = {}

    def __call__(self, value: Any) -> Any:
        return self._known.setdefault(value, value)


def _sample(
    line: bytes, path: Path, number: int, cluster_field: str | None, config: Mapping[str, Any], names: _Names
) -> _Sample:
    sample, content = parse_sample(line, path, number)
    scores = [content.get(metric) for metric in sample.metrics]
    return _Sample(
        sample.doc_id,
        names(sample.filter),
        (sample.doc_hash, sample.prompt_hash, sample.target_hash),
        names(tuple(sample.metrics)),
        tuple(float(score) if isinstance(score, (bool, int, float)) else None for score in scores),
        names(_cluster(content, cluster_field, line_location(path, number))),
        answered_then(config, content),
    )


def _cluster(sample: Mapping[str, Any], field: str | None, where: str) -> str:
    if field is None:
        return ""
    document = sample.get("doc")
    if not isinstance(document, dict) or field not in document:
        raise InvalidInput(
            f"{where}: document {sample['doc_id']}",
            found=f"no field {field!r}",
            expected="the field that cluster_by names, in every document",
            remedy=suggest(field, document) if isinstance(document, dict) and document else "",
        )
    return str(document[field])


def _means(file: ResultsFile, task: str, samples: Sequence[_Sample]) -> Iterator[tuple[str, str]]:
    """Yield ``('acc', 'acc,none')`` for every metric that the results file reports as the mean of its samples' scores.

    A metric is a mean if its task declares one, or declares nothing and lm-eval averages it. For a metric that lm-eval
    does not know, the numbers tell.

    Raises:
        InvalidInput: for a mean that is not that of these samples, or a score that its metric cannot have.
    """
    where = f"{file.path}: task {task}"
    reported = file.content.results.get(task, {})
    declared = {entry.metric: entry.aggregation for entry in file.content.configs[task].metric_list or ()}
    values: dict[tuple[str, str], list[tuple[int, float | None]]] = {}
    for sample in samples:
        for metric, score in zip(sample.metrics, sample.scores, strict=True):
            values.setdefault((metric, f"{metric},{sample.filter}"), []).append((sample.doc_id, score))
    for (metric, key), scores in values.items():
        how = declared.get(metric)
        if how is None and key in reported and (averaged := is_registered_mean(metric)) is not None:
            how = "mean" if averaged else "not a mean"
        if how not in (None, "mean"):
            continue
        numbers = []
        for document, score in scores:
            if score is None:
                if how is None:
                    break
                raise InvalidInput(
                    where,
                    found=f"{metric} of document {document} is not a number",
                    expected="a score of each document, of which the task's is the mean",
                    remedy=_ALTERED,
                )
            numbers.append(checked_score(where, key, document, score))
            if metric in SHARES and not 0 <= score <= 1:
                raise InvalidInput(
                    where,
                    found=f"{metric} of document {document} is {score:g}",
                    expected="a share, from 0 to 1",
                    remedy="the results were altered, or are of another metric under this name: run lm-eval again",
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
        elif how == "mean":
            raise InvalidInput(
                where,
                found=f"{key} is {total!r:.40}, which is not the mean of its samples",
                expected="samples as lm-eval wrote them",
                remedy=_ALTERED,
            )


def _outcome(task: str, key: str, higher_is_better: bool, sample: _Sample, score: float | None) -> DocumentScore:
    # Of a metric that is a mean every score is a number: see _means.
    return DocumentScore(
        task, key, sample.doc_id, *sample.hashes, math.nan if score is None else score, sample.cluster, higher_is_better
    )


def _probabilities(task: str, samples: Sequence[_Sample]) -> list[DocumentScore]:
    """The probability of the right answer in each document; none where the samples do not tell."""
    found = probabilities([sample.score("acc") for sample in samples], [sample.answered for sample in samples])
    return [
        _outcome(task, f"{PROBABILITY},{sample.filter}", True, sample, probability)
        for sample, probability in zip(samples, found or [None] * len(samples), strict=True)
        if probability is not None
    ]


def _conditions(file: ResultsFile, leaves: Sequence[str]) -> Conditions:
    content = file.content
    return Conditions(
        lm_eval_version=content.lm_eval_version,
        task_versions=tuple((leaf, str(content.versions.get(leaf))) for leaf in leaves),
        model_source=str(content.model_source),
        chat_template_sha=str(content.chat_template_sha),
        # Says nothing about prompts unless there is a template: lm-eval's library and command line differ there.
        fewshot_as_multiturn=str(bool(content.chat_template_sha and content.fewshot_as_multiturn)),
        system_instruction_sha=str(content.system_instruction_sha),
        gen_kwargs=json.dumps(content.config.gen_kwargs or {}, sort_keys=True),
        higher_is_better=json.dumps([content.higher_is_better.get(leaf) for leaf in leaves], sort_keys=True),
    )


def _precision(file: ResultsFile) -> Precision:
    content = file.content
    return Precision(
        model_dtype=str(content.config.model_dtype),
        batch_size=str(content.config.batch_size),
        max_length=str(content.max_length),
        transformers_version=str(content.transformers_version),
    )


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 40 else f"{text[:12]}…"

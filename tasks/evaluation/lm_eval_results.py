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
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from merge_core.errors import InvalidInput, suggest
from merge_core.parsing import JsonBounds, parse_json, read_lines, read_plain
from tasks.evaluation.choice_probability import PROBABILITY, AnsweredChoice, answered_then, probabilities
from tasks.evaluation.document_scores import DocumentScore
from tasks.evaluation.metrics import check_all_scored, checked_score

_DATE = re.compile(r"_(\d{4}-\d\d-\d\dT\d\d-\d\d-\d\d(?:\.\d+)?)\.json$")
_ALTERED = "one of the two files was altered: copy both again, or run lm-eval again"
_LOGGED = "run lm-eval with --output_path and --log_samples"
_HASHES = ("doc_hash", "prompt_hash", "target_hash")
# Metrics of lm-eval whose score of a document is a share of what could be right.
SHARES = frozenset(("acc", "acc_norm", "acc_bytes", "acc_mutual_info", "acc_all", "em", "exact_match", "exact", "f1"))
# MMLU has 14,042 documents. Each takes 0.6 kB of memory here, and 30 microseconds.
MAX_SAMPLES = 200_000
MAX_SAMPLE_BYTES = 16 << 20
_MOST_METRICS = 64
_BOUNDS = JsonBounds(size=64 << 20)
_LINE_BOUNDS = JsonBounds(size=MAX_SAMPLE_BYTES, values=200_000)


@dataclass(frozen=True)
class ResultsFile:
    """A results file of lm-eval: what stands in it, and the date that its samples files carry too."""

    path: Path
    date: str
    content: Mapping[str, Any]  # as in lm_eval.result_schema.EvalResults

    def of(self, key: str) -> Mapping[str, Any]:
        """A part of it that is a mapping; empty where it is absent."""
        part = self.content.get(key)
        return part if isinstance(part, Mapping) else {}

    def about(self, key: str, task: str) -> Mapping[str, Any]:
        """The mapping that a part has about a task; empty where there is none."""
        found = self.of(key).get(task)
        return found if isinstance(found, Mapping) else {}

    def leaves(self, task: str) -> tuple[str, ...]:
        """The tasks below a group, or the task itself; empty where this file has neither."""
        found: dict[str, None] = {}
        seen: set[str] = set()
        waiting = [task]
        while waiting:  # each name once: a stranger's groups may lie in circles
            name = waiting.pop()
            if name in seen:
                continue
            seen.add(name)
            children = self.of("group_subtasks").get(name)
            if isinstance(children, list) and children:
                waiting += [str(child) for child in reversed(children)]
            elif name in self.of("configs"):
                found[name] = None
        return tuple(found)

    def scored(self, task: str) -> int | None:
        """How many documents of a task it says were scored."""
        counted = self.about("n-samples", task).get("effective")
        return counted if type(counted) is int else None


class Conditions(NamedTuple):
    """Under what a model was asked. Scores compare only where all of it is equal."""

    lm_eval_version: str
    task_versions: tuple[tuple[str, str], ...]
    model_source: str  # 'hf', 'vllm'
    chat_template_sha: str
    fewshot_as_multiturn: str
    system_instruction_sha: str
    gen_kwargs: str


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
    files = [ResultsFile(path, date, _read_results(path)) for date, path in dated]
    models = {(file.path.parent, str(file.content.get("model_name"))): file for file in files}
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
        known = {name for file in found for part in ("configs", "group_subtasks") for name in file.of(part)}
        raise InvalidInput(
            f"{found[0].path.parent}: task {task}", found="no results of it", remedy=suggest(task, known)
        )
    leaves = file.leaves(task)
    outcomes: list[DocumentScore] = []
    read = 0
    for leaf in leaves:
        samples = _read_samples(file, leaf, cluster_field, MAX_SAMPLES - read)
        read += len(samples)
        directions = file.about("higher_is_better", leaf)
        found_here: list[DocumentScore] = []
        for metric, key in _means(file, leaf, samples):
            if (higher := directions.get(metric)) is not None:
                found_here += [
                    _outcome(leaf, key, bool(higher), sample, sample.score(metric))
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


def check_alike(reference: TaskResults, merge: TaskResults, where: str) -> None:
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


def _read_results(path: Path) -> Mapping[str, Any]:
    content = parse_json(
        read_plain(path, _BOUNDS.size), str(path), bounds=_BOUNDS, expected="a file that is not cut off"
    )
    if not (isinstance(content, dict) and {"results", "configs", "lm_eval_version"} <= content.keys()):
        raise InvalidInput(
            str(path), found="no results file of lm-eval", expected="results, configs, lm_eval_version", remedy=_LOGGED
        )
    return content


class _Sample(NamedTuple):
    """Of a line what a gate needs; a document's text and the answers, most of the line, are let go at once."""

    doc_id: int
    filter: str
    hashes: tuple[str, str, str]
    metrics: tuple[str, ...]
    scores: tuple[float | None, ...]  # None: no number
    cluster: str
    answered: AnsweredChoice | None  # of a choice task

    def score(self, metric: str) -> float | None:
        """Under a metric; None where it has none that is a number."""
        return self.scores[self.metrics.index(metric)] if metric in self.metrics else None


def _read_samples(file: ResultsFile, task: str, cluster_field: str | None, most: int) -> tuple[_Sample, ...]:
    """All lines of a samples file, after seeing that they are those of the results file, each document once."""
    stated = file.of("task_hashes").get(task)
    if not isinstance(stated, str) or "/" in task or "\0" in task:
        raise _no_samples(file.path.parent / "samples_…", file)
    path = file.path.with_name(f"samples_{task}_{file.date}.jsonl")
    if not path.exists():
        raise _no_samples(path, file)
    running, samples, names, config = hashlib.sha256(), [], _Names(), file.about("configs", task)
    seen: set[tuple[int, str]] = set()
    for number, line in read_lines(path, longest=MAX_SAMPLE_BYTES, most=most):
        sample = _sample(line, path, number, cluster_field, config, names)
        if (sample.doc_id, sample.filter) in seen:
            raise InvalidInput(
                str(path),
                found=f"document {sample.doc_id} twice under the filter {sample.filter}",
                expected="each document once",
                remedy=_ALTERED,
            )
        seen.add((sample.doc_id, sample.filter))
        running.update("".join(sample.hashes).encode())
        samples.append(sample)
    ids = {sample.doc_id for sample in samples}
    if running.hexdigest() != stated:
        raise InvalidInput(
            str(path),
            found=f"other samples than those of {file.path.name}: {len(ids)} documents, "
            f"{file.scored(task)} were scored",
            expected="the file as lm-eval wrote it",
            remedy="it is cut off, altered or of another run: copy it again, or run lm-eval again",
        )
    _check_counts(file, task, samples, path)
    return tuple(samples)


def _no_samples(path: Path, file: ResultsFile) -> InvalidInput:
    return InvalidInput(
        str(path), found="not there", expected=f"the samples that {file.path.name} speaks of", remedy=_LOGGED
    )


def _check_counts(file: ResultsFile, task: str, samples: Sequence[_Sample], path: Path) -> None:
    """Under each filter as many documents as the results file says, and none that the task does not have."""
    of_filter: dict[str, set[int]] = {}
    for sample in samples:
        of_filter.setdefault(sample.filter, set()).add(sample.doc_id)
    effective, original = file.scored(task), file.about("n-samples", task).get("original")
    has = original if type(original) is int else None
    for name, known in of_filter.items():
        odd = next((one for one in sorted(known) if one < 0 or (has is not None and one >= has)), None)
        if odd is not None or len(known) != effective:
            raise InvalidInput(
                str(path),
                found=f"document {odd} of {has}" if odd is not None else f"{len(known)} documents under {name}",
                expected=f"the {effective} of {has} documents that {file.path.name} speaks of",
                remedy=_ALTERED,
            )


class _Names:
    """Texts that are the same in every line, kept once."""

    def __init__(self) -> None:
        self._known: dict[Any, Any] = {}

    def __call__(self, value: Any) -> Any:
        return self._known.setdefault(value, value)


def _sample(
    line: bytes, path: Path, number: int, cluster_field: str | None, config: Mapping[str, Any], names: _Names
) -> _Sample:
    where = f"{path}: line {number}"
    sample = parse_json(line, where, bounds=_LINE_BOUNDS, expected="one sample a line; the file may be cut off")
    if not _is_sample(sample):
        raise InvalidInput(
            where, found="no sample of lm-eval", expected="doc_id, filter, metrics, " + ", ".join(_HASHES)
        )
    found = [sample.get(metric) for metric in sample["metrics"]]
    return _Sample(
        sample["doc_id"],
        names(sample["filter"]),
        (sample["doc_hash"], sample["prompt_hash"], sample["target_hash"]),
        names(tuple(sample["metrics"])),
        tuple(float(score) if isinstance(score, (bool, int, float)) else None for score in found),
        names(_cluster(sample, cluster_field, where)),
        answered_then(config, sample),
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


def _is_sample(sample: object) -> bool:
    return (
        isinstance(sample, dict)
        and type(sample.get("doc_id")) is int
        and isinstance(sample.get("metrics"), list)
        and len(sample["metrics"]) <= _MOST_METRICS
        and all(isinstance(metric, str) for metric in sample["metrics"])
        and isinstance(sample.get("filter"), str)
        and all(isinstance(sample.get(name), str) and len(sample[name]) <= 128 for name in _HASHES)
    )


def _means(file: ResultsFile, task: str, samples: Sequence[_Sample]) -> Iterator[tuple[str, str]]:
    """``('acc', 'acc,none')`` for every metric that the results file reports as the mean of its samples' scores.

    Raises:
        InvalidInput: when a metric is declared as a mean and is not that of these samples, or a score is none that its
            metric can have.
    """
    where = f"{file.path}: task {task}"
    reported = file.about("results", task)
    listed = file.about("configs", task).get("metric_list")
    declared = {
        str(entry.get("metric")): entry.get("aggregation")
        for entry in (listed if isinstance(listed, list) else ())
        if isinstance(entry, Mapping)
    }
    values: dict[tuple[str, str], list[float | None]] = {}
    for sample in samples:
        for metric, score in zip(sample.metrics, sample.scores, strict=True):
            key = f"{metric},{sample.filter}"
            if score is not None and declared.get(metric) in (None, "mean"):
                checked_score(where, key, sample.doc_id, score)
                _check_range(where, metric, sample.doc_id, score)
            values.setdefault((metric, key), []).append(score)
    for (metric, key), scores in values.items():
        total, how = reported.get(key), declared.get(metric)
        numbers = [score for score in scores if score is not None]
        is_mean = (
            len(numbers) == len(scores)
            and isinstance(total, (int, float))
            and math.isclose(math.fsum(numbers) / len(numbers), total, rel_tol=1e-9, abs_tol=1e-9)
        )
        # Where the task does not say how a metric is summed up, lm-eval takes the metric's own way: the numbers tell.
        if is_mean and how in (None, "mean"):
            yield metric, key
        elif how == "mean":
            raise InvalidInput(
                where,
                found=f"{key} is {total!r:.40}, which is not the mean of its samples",
                expected="samples as lm-eval wrote them",
                remedy=_ALTERED,
            )


def _check_range(where: str, metric: str, document: int, score: float) -> None:
    if metric in SHARES and not 0 <= score <= 1:
        raise InvalidInput(
            where,
            found=f"{metric} of document {document} is {score:g}",
            expected="a share, from 0 to 1",
            remedy="the results were altered, or are of another metric under this name: run lm-eval again",
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
        lm_eval_version=str(content["lm_eval_version"]),
        task_versions=tuple((leaf, str(file.of("versions").get(leaf))) for leaf in leaves),
        model_source=str(content.get("model_source")),
        chat_template_sha=str(content.get("chat_template_sha")),
        # Says nothing about prompts unless there is a template: lm-eval's library and command line differ there.
        fewshot_as_multiturn=str(bool(content.get("chat_template_sha") and content.get("fewshot_as_multiturn"))),
        system_instruction_sha=str(content.get("system_instruction_sha")),
        gen_kwargs=json.dumps(file.of("config").get("gen_kwargs") or {}, sort_keys=True),
    )


def _precision(file: ResultsFile) -> Precision:
    config = file.of("config")
    return Precision(
        model_dtype=str(config.get("model_dtype")),
        batch_size=str(config.get("batch_size")),
        max_length=str(file.content.get("max_length")),
        transformers_version=str(file.content.get("transformers_version")),
    )


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 40 else f"{text[:12]}…"

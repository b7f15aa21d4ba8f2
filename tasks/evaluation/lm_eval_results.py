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
from tasks.evaluation.choice_probability import PROBABILITY, answered_then, probabilities
from tasks.evaluation.document_scores import DocumentScore, score_of_sample
from tasks.evaluation.metrics import check_all_scored, checked_score

_DATE = re.compile(r"_(\d{4}-\d\d-\d\dT\d\d-\d\d-\d\d(?:\.\d+)?)\.json$")
_LOGGED = "run lm-eval with --output_path and --log_samples"
_HASHES = ("doc_hash", "prompt_hash", "target_hash")


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

    def leaves(self, task: str) -> tuple[str, ...]:
        """The tasks below a group, or the task itself; empty where this file has neither."""
        children = self.of("group_subtasks").get(task)
        if children:
            return tuple(dict.fromkeys(leaf for child in children for leaf in self.leaves(str(child))))
        return (task,) if task in self.of("configs") else ()


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
    for leaf in leaves:
        samples = _read_samples(file, leaf)
        directions = file.of("higher_is_better").get(leaf) or {}
        found_here: list[DocumentScore] = []
        for metric, key in _means(file, leaf, samples):
            if (higher := directions.get(metric)) is not None:
                found_here += [
                    _outcome(file, leaf, key, metric, bool(higher), sample, cluster_field)
                    for sample in samples
                    if _has(sample, metric, key)
                ]
        if not found_here:
            has = sorted({str(metric) for sample in samples for metric in sample["metrics"]})
            raise InvalidInput(
                f"{file.path}: task {leaf}",
                found="no metric that is a mean over documents with a direction, only "
                + (", ".join(has) or "none at all"),
                expected="a score of each document, of which the task's is the mean",
                remedy="guard the other tasks of the group one by one" if leaf != task else "",
            )
        check_all_scored(f"{file.path}: task {task}", ((leaf, sample["doc_id"]) for sample in samples), found_here)
        outcomes += found_here
        if PROBABILITY not in directions:
            outcomes += _probabilities(file, leaf, samples, cluster_field)
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
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise InvalidInput(str(path), found=f"cannot be read, or is cut off: {error}", remedy=_LOGGED) from None
    if not (isinstance(content, dict) and {"results", "configs", "lm_eval_version"} <= content.keys()):
        raise InvalidInput(
            str(path), found="no results file of lm-eval", expected="results, configs, lm_eval_version", remedy=_LOGGED
        )
    return content


def _read_samples(file: ResultsFile, task: str) -> tuple[Mapping[str, Any], ...]:
    """All lines of a samples file, after seeing that they are those of the results file."""
    path = file.path.with_name(f"samples_{task}_{file.date}.jsonl")
    stated = file.of("task_hashes").get(task)
    if stated is None or not path.is_file():
        raise InvalidInput(
            str(path), found="not there", expected=f"the samples that {file.path.name} speaks of", remedy=_LOGGED
        )
    samples = tuple(_lines(path))
    sha256 = hashlib.sha256("".join(sample[name] for sample in samples for name in _HASHES).encode()).hexdigest()
    if sha256 != stated:
        counted = file.of("n-samples").get(task, {}).get("effective")
        raise InvalidInput(
            str(path),
            found=f"other samples than those of {file.path.name}: {len({s['doc_id'] for s in samples})} documents, "
            f"{counted} were scored",
            expected="the file as lm-eval wrote it",
            remedy="it is cut off, altered or of another run: copy it again, or run lm-eval again",
        )
    return samples


def _lines(path: Path) -> Iterator[Mapping[str, Any]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            where = f"{path}: line {number}"
            try:
                sample = json.loads(line)
            except ValueError as error:
                raise InvalidInput(
                    where, found=f"not JSON: {error}", expected="one sample a line", remedy="the file is cut off"
                ) from None
            if not _is_sample(sample):
                raise InvalidInput(
                    where, found="no sample of lm-eval", expected="doc_id, filter, metrics, " + ", ".join(_HASHES)
                )
            yield sample


def _is_sample(sample: object) -> bool:
    return (
        isinstance(sample, dict)
        and isinstance(sample.get("doc_id"), int)
        and isinstance(sample.get("metrics"), list)
        and all(isinstance(sample.get(name), str) for name in ("filter", *_HASHES))
    )


def _means(file: ResultsFile, task: str, samples: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    """``('acc', 'acc,none')`` for every metric that the results file reports as the mean of its samples' scores.

    Raises:
        InvalidInput: when a metric is declared as a mean and is not that of these samples.
    """
    reported = file.of("results").get(task, {})
    declared = {
        str(entry.get("metric")): entry.get("aggregation")
        for entry in file.of("configs").get(task, {}).get("metric_list") or ()
        if isinstance(entry, Mapping)
    }
    values: dict[tuple[str, str], list[object]] = {}
    for sample in samples:
        for metric in sample["metrics"]:
            key, score = f"{metric},{sample['filter']}", sample.get(metric)
            if isinstance(score, float) and declared.get(metric) in (None, "mean"):
                checked_score(f"{file.path}: task {task}", key, sample["doc_id"], score)
            values.setdefault((str(metric), key), []).append(score)
    for (metric, key), scores in values.items():
        total, how = reported.get(key), declared.get(metric)
        numbers = [float(score) for score in scores if isinstance(score, (bool, int, float))]
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
                f"{file.path}: task {task}",
                found=f"{key} is {total}, which is not the mean of its samples",
                expected="samples as lm-eval wrote them",
                remedy="one of the two files was altered: copy both again, or run lm-eval again",
            )


def _has(sample: Mapping[str, Any], metric: str, key: str) -> bool:
    return metric in sample["metrics"] and key == f"{metric},{sample['filter']}"


def _outcome(
    file: ResultsFile,
    task: str,
    key: str,
    metric: str,
    higher_is_better: bool,
    sample: Mapping[str, Any],
    cluster_field: str | None,
) -> DocumentScore:
    cluster = ""
    if cluster_field is not None:
        document = sample.get("doc")
        if not isinstance(document, dict) or cluster_field not in document:
            raise InvalidInput(
                f"{file.path}: task {task}: document {sample['doc_id']}",
                found=f"no field {cluster_field!r}",
                expected="the field that cluster_by names, in every document",
                remedy=suggest(cluster_field, document) if isinstance(document, dict) and document else "",
            )
        cluster = str(document[cluster_field])
    return score_of_sample(task, key, sample, float(sample[metric]), cluster, higher_is_better)


def _probabilities(
    file: ResultsFile, task: str, samples: Sequence[Mapping[str, Any]], cluster_field: str | None
) -> list[DocumentScore]:
    """The probability of the right answer in each document; none where the samples do not tell."""
    config = file.of("configs").get(task) or {}
    found = probabilities(samples, [answered_then(config, sample) for sample in samples])
    return [
        _outcome(
            file,
            task,
            f"{PROBABILITY},{sample['filter']}",
            PROBABILITY,
            True,
            {**sample, PROBABILITY: probability},
            cluster_field,
        )
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

"""Read the scores of each document from a log of inspect_ai, without running any model and without inspect_ai.

A log has the results of one task. A document is a sample, and its score is the mean over the epochs of the sample. Each
scorer that reports ``accuracy`` or ``mean`` is a metric: ``match/accuracy``, or ``grader/tone/mean`` for the key
``tone`` of a scorer that returns several scores. In logs that mergegate exports, a scorer has the name of lm-eval's
metric (``acc,none``), which is the metric.

A log repeats its scores: as metrics, as a list of reduced scores and, in a ``.eval`` log, as a list of summaries. This
module recomputes the metrics and compares all of them. Every sample of the dataset must be in the log, for every epoch
and without an error. A score that inspect_ai leaves out of a metric, or that was edited afterwards, is refused.

inspect_ai does not record whether higher is better. Every score counts as higher-is-better, unless the metadata of the
scorer has ``higher_is_better: false``.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from mergegate.merge_core.errors import InvalidInput, suggest
from mergegate.merge_core.parsing import format_value
from mergegate.tasks.quality.evaluation.results.contract import EXPORTED, INSPECT, LoggedResults, TaskResults
from mergegate.tasks.quality.evaluation.results.inspect_log import (
    DAMAGED,
    MAX_SAMPLES,
    REWRITE,
    LoggedReduction,
    LoggedSample,
    LoggedScore,
    LoggedSpec,
    LoggedSummary,
    LogHeader,
    SampleScore,
    open_samples,
)
from mergegate.tasks.quality.evaluation.scoring.document_scores import DocumentScore
from mergegate.tasks.quality.evaluation.scoring.metrics import check_all_scored

_MEANS = ("accuracy", "mean")  # metrics of inspect_ai that are means over samples
_GRADES = {"C": 1.0, "P": 0.5, "I": 0.0, "N": 0.0}
_WORDS = {"yes": 1.0, "true": 1.0, "no": 0.0, "false": 0.0}


class SampleEvidence(NamedTuple):
    """The values of a sample in one epoch that a gate needs. The conversation, most of the sample, is dropped."""

    hashes: tuple[str, str, str]  # of document, prompt and target
    has_lm_eval_hashes: bool
    cluster: str
    chances: Mapping[str, float]  # score of a random choice by scorer, see ``DocumentScore``
    scores: Mapping[str, SampleScore]
    uuid: str | None


Documents = Mapping[int | str, Mapping[int, SampleEvidence]]  # by id and epoch


def plain_digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


class MeanMetric(NamedTuple):
    """Scores of all documents under one metric."""

    scorer: str
    key: str  # of the scorer's dictionary of scores; empty if its score is a single value
    label: str
    higher_is_better: bool
    scores: Mapping[int | str, float]  # means over the scored epochs, without unscored documents
    partial: frozenset[int | str]  # documents that were not scored in all epochs


def mean_metrics(header: LogHeader, path: Path, documents: Documents) -> Iterator[MeanMetric]:
    """Yield every metric that the log reports as a mean over samples, ``accuracy`` first."""
    assert header.results is not None
    computed: dict[tuple[str, str], tuple[dict[int | str, float], frozenset[int | str]]] = {}
    metrics = []
    for entry in header.results.scores:
        for name in _MEANS:
            if entry.reducer not in (None, "mean") or name not in entry.metrics or entry.metrics[name].group:
                continue
            location = f"{path}: {entry.name:.80}/{name}"
            column = (entry.scorer, entry.name)
            if column not in computed:
                computed[column] = _document_means(path, entry, documents)
            scores, partial = computed[column]
            reported = entry.metrics[name].value
            mean = math.fsum(scores.values()) / len(scores) if scores else math.nan
            if isinstance(reported, bool) or not isinstance(reported, int | float):
                raise InvalidInput(location, found=format_value(reported), expected="a number", remedy=DAMAGED)
            if not math.isclose(mean, reported, rel_tol=1e-9, abs_tol=1e-9):
                raise InvalidInput(
                    location,
                    found=f"{reported!r:.40}, which is not the mean of its samples",
                    expected="the unchanged log of inspect_ai",
                    remedy=DAMAGED,
                )
            if name == "accuracy" and not all(0 <= score <= 1 for score in scores.values()):
                raise InvalidInput(location, found="scores out of range", expected="a fraction from 0 to 1")
            key = "" if entry.name == entry.scorer else entry.name
            own = "/".join(part for part in (entry.scorer, key, name) if part)
            label = entry.scorer if "," in entry.scorer else own
            direction = (entry.metadata or {}).get("higher_is_better", True)
            if not isinstance(direction, bool):
                raise InvalidInput(
                    f"{location}: higher_is_better", found=format_value(direction), expected="true or false"
                )
            metrics.append(MeanMetric(entry.scorer, key, label, direction, scores, partial))
    labels = [metric.label for metric in metrics]
    if len(set(labels)) < len(labels):
        raise InvalidInput(str(path), found="two metrics with the same name", remedy=DAMAGED)
    yield from sorted(metrics, key=lambda metric: metric.label.endswith("/mean"))


def _document_means(
    path: Path, entry: LoggedScore, documents: Documents
) -> tuple[dict[int | str, float], frozenset[int | str]]:
    """Return the mean score of each document over its scored epochs, and the documents with an unscored epoch."""
    means: dict[int | str, float] = {}
    partial = set()
    for document, epochs in documents.items():
        values = []
        for epoch, sample in sorted(epochs.items()):
            score = sample.scores.get(entry.scorer)
            value = score.value if score is not None else math.nan
            if isinstance(value, dict):
                value = value.get(entry.name)
            number = _as_number(value)
            if number is None:
                raise InvalidInput(
                    f"{path}: sample {document!r:.80} of epoch {epoch}",
                    found=f"the score {format_value(value)} by {entry.name:.80}",
                    expected="a number, true or false, or one of C, P, I and N",
                )
            if math.isnan(number):
                partial.add(document)
            else:
                values.append(number)
        if values:
            means[document] = math.fsum(values) / len(values)
    return means, frozenset(partial)


def _as_number(value: object) -> float | None:
    """Return a score as a number, as inspect_ai's ``value_to_float`` does. NaN: not scored. None: not a number.

    inspect_ai counts texts that are not numbers as 0, with a warning. The gate refuses them.
    """
    if isinstance(value, str):
        known = _GRADES.get(value, _WORDS.get(value.lower()))
        try:
            value = float(value) if known is None else known
        except ValueError:
            return None
        return value if math.isfinite(value) else None
    if isinstance(value, bool | int | float):
        try:
            number = float(value)
        except OverflowError:
            return None
        return None if math.isinf(number) else number
    return None


def require_equal_summaries(summaries: Sequence[LoggedSummary] | None, documents: Documents, path: Path) -> None:
    """Raise InvalidInput if the list of summaries contradicts the samples."""
    if summaries is None:
        return
    listed = {(summary.id, summary.epoch): summary for summary in summaries}
    samples = {(document, epoch): each for document, epochs in documents.items() for epoch, each in epochs.items()}
    different = min(listed.keys() ^ samples.keys(), key=str, default=None)
    for key, sample in samples.items():
        if different is None and (
            sample.uuid != listed[key].uuid
            or plain_digest({name: score.value for name, score in sample.scores.items()})
            != plain_digest({name: score.value for name, score in (listed[key].scores or {}).items()})
        ):
            different = key
    if different is not None or len(listed) < len(summaries):
        which = f"sample {different[0]!r:.80} of epoch {different[1]}" if different else "a sample twice"
        raise InvalidInput(
            f"{path}: {which}",
            found="it differs from its summary",
            expected="the same sample and scores in both",
            remedy=DAMAGED,
        )


def require_equal_reductions(
    reductions: Sequence[LoggedReduction] | None, metrics: Sequence[MeanMetric], path: Path
) -> None:
    """Raise InvalidInput if the list of scores over all epochs contradicts the samples."""
    for reduction in reductions or ():
        if reduction.reducer not in (None, "mean"):
            continue
        listed = {str(each.sample_id): each.value for each in reduction.samples}
        for metric in metrics:
            if metric.scorer != reduction.scorer:
                continue
            means = {str(document): score for document, score in metric.scores.items()}
            for document in listed.keys() | means.keys():
                value = listed.get(document, math.nan)
                number = _as_number(value.get(metric.key) if isinstance(value, dict) else value)
                mean = means.get(document, math.nan)
                if number is None or not (
                    math.isclose(number, mean, rel_tol=1e-9, abs_tol=1e-9) or (math.isnan(number) and math.isnan(mean))
                ):
                    raise InvalidInput(
                        f"{path}: reductions of {metric.scorer:.80}",
                        found=f"a different score of sample {document!r:.80}",
                        expected="the mean of the scores of the sample",
                        remedy=DAMAGED,
                    )


_HASHES = ("doc_hash", "prompt_hash", "target_hash")
_HASH = re.compile(r"[0-9a-f]{64}")
# Generation settings that do not change what a model answers.
_OPERATIONAL = frozenset(
    ("max_retries", "timeout", "attempt_timeout", "max_connections", "adaptive_connections", "batch", "cache")
)
_LIMITS = (
    *("message_limit", "token_limit", "token_limit_type", "turn_limit"),
    *("time_limit", "working_limit", "cost_limit"),
)
# Model arguments that name the model, or may be secret.
_UNCOMPARED = re.compile(r"path|revision|base_url|key|secret|password|credential|auth|token$", re.IGNORECASE)
_SELF_GRADED = frozenset(("model_graded_qa", "model_graded_fact"))
_UNSTABLE = frozenset(("id", "source", "model", "metadata"))  # keys of a message
_ATTACHMENT = "attachment://"


@dataclass(frozen=True)
class InspectLog(LoggedResults):
    """A log of inspect_ai without its samples."""

    path: Path
    date: str
    content: LogHeader

    @property
    def model(self) -> str:
        return self.content.eval.model

    @property
    def group(self) -> str:  # known in logs that mergegate exports
        group = (self.content.eval.metadata or {}).get("task")
        return group if isinstance(group, str) and group != self.content.eval.task else ""

    @property
    def task_names(self) -> tuple[str, ...]:
        spec = self.content.eval
        names = [name for name in (spec.task, spec.task_registry_name) if name]
        return tuple(dict.fromkeys((*names, *(name.rpartition("/")[2] for name in names))))

    def has(self, task: str) -> bool:
        return task in self.task_names

    def read(self, task: str, cluster_field: str | None) -> TaskResults:
        header, path = self.content, self.path
        if header.status != "success" or header.results is None or header.invalidated:
            raise InvalidInput(
                f"{path}: {'invalidated' if header.invalidated else 'status'}",
                found="true" if header.invalidated else f"{header.status!r:.40}",
                expected="the log of a complete evaluation, with the status 'success'",
                remedy=f"complete the evaluation: inspect eval-retry {path.name}",
            )
        documents: dict[int | str, dict[int, SampleEvidence]] = {}
        limits: Counter[str] = Counter()
        with open_samples(path) as file:
            for count, sample in enumerate(file.samples()):
                _require_sound(sample, path)
                epochs = documents.setdefault(sample.id, {})
                if sample.epoch in epochs or count >= MAX_SAMPLES:
                    raise InvalidInput(
                        str(path),
                        found=f"over {MAX_SAMPLES} samples" if count >= MAX_SAMPLES else f"{_name(sample)} twice",
                        expected="each sample once in each epoch",
                        remedy=DAMAGED,
                    )
                epochs[sample.epoch] = _condense(sample, path, cluster_field)
                stops = {choice.stop_reason for choice in sample.output.choices} & {"max_tokens", "model_length"}
                if sample.limit is not None or stops:
                    limits[f"{sample.limit.type} limit" if sample.limit else min(map(str, stops))] += 1
            repeated = file.repeated_scores()
        _require_complete(header, path, documents)
        # The order of the dataset, because each format of the file has another one.
        listed = header.eval.dataset.sample_ids or sorted(documents, key=str)
        documents = {document: documents[document] for document in listed}
        numbers = _numbers(documents, path)
        metrics = tuple(mean_metrics(header, path, documents))
        require_equal_summaries(repeated.summaries, documents, path)
        require_equal_reductions(repeated.reductions, metrics, path)
        is_exported = all(sample.has_lm_eval_hashes for epochs in documents.values() for sample in epochs.values())
        leaf = header.eval.task if is_exported else task
        outcomes = [
            DocumentScore(
                leaf,
                metric.label,
                numbers[document],
                *_combined_hashes(epochs, document, path),
                outcome=metric.scores[document],
                cluster=epochs[1].cluster,
                higher_is_better=metric.higher_is_better,
                chance=epochs[1].chances.get(metric.scorer, 0.0),
            )
            for metric in metrics
            for document, epochs in documents.items()
            if document in metric.scores and document not in metric.partial
        ]
        if not outcomes:
            names = sorted({name for score in header.results.scores for name in score.metrics})
            raise InvalidInput(
                f"{path}: task {task}",
                found=f"no metric that is a mean over samples, only {', '.join(names)[:200] or 'none at all'}",
                expected="a scorer with the metric accuracy or mean, over epochs that are reduced to their mean",
                remedy="score the log again: inspect score LOG --scorer SCORER, with the epochs reducer mean",
            )
        check_all_scored(f"{path}: task {task}", ((leaf, number) for number in numbers.values()), outcomes)
        if all(isinstance(document, int) for document in documents):
            names_by_number = {}
        else:
            names_by_number = {number: str(document) for document, number in numbers.items()}
        count = sum(map(len, documents.values()))
        return TaskResults(
            task,
            tuple(outcomes),
            EXPORTED if is_exported else INSPECT,
            version := _version(header.eval, is_exported),
            _conditions(header, version, is_exported),
            {
                f"model_args.{name}": _text(value)
                for name, value in header.eval.model_args.items()
                if not _UNCOMPARED.search(name)
            },
            path,
            names_by_number,
            tuple(
                f"{number} of {count} answers in {path} were cut off ({reason}); they count as scored"
                for reason, number in limits.items()
            ),
        )


def open_log(path: Path) -> InspectLog:
    """Open a log of inspect_ai. Raise InvalidInput if it is not valid."""
    with open_samples(path) as log:
        content = log.header()
    if content.version != 2:
        raise InvalidInput(f"{path}: version", found=str(content.version), expected="2", remedy=REWRITE)
    try:
        created = datetime.fromisoformat(content.eval.created).astimezone(UTC)
    except (ValueError, OverflowError):
        raise InvalidInput(
            f"{path}: eval.created", found=format_value(content.eval.created), expected="a date", remedy=DAMAGED
        ) from None
    return InspectLog(path, created.isoformat(timespec="microseconds"), content)


def combine_logs(results: Sequence[TaskResults], group: str) -> TaskResults:
    return replace(
        results[0],
        task=group,
        outcomes=tuple(outcome for each in results for outcome in each.outcomes),
        conditions={f"{each.task}: {name}": value for each in results for name, value in each.conditions.items()},
        precision={name: value for each in results for name, value in each.precision.items()},
        names={},
        warnings=tuple(warning for each in results for warning in each.warnings),
    )


def _name(sample: LoggedSample) -> str:
    return f"sample {sample.id!r:.80} of epoch {sample.epoch}"


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)


def _require_sound(sample: LoggedSample, path: Path) -> None:
    edited = [name for name, score in (sample.scores or {}).items() if score.history]
    if sample.error is not None:
        found = "it ended with an error"
    elif sample.invalidation is not None:
        found = "it was invalidated"
    elif sample.limit is not None and sample.limit.type == "operator":
        found = "an operator ended it"
    elif edited:
        found = f"its score by {edited[0]:.80} was edited"
    else:
        return
    raise InvalidInput(
        f"{path}: {_name(sample)}",
        found=found,
        expected="samples that all ended by themselves, with the score of the scorer",
        remedy="evaluate both models again, without the sample if it cannot be evaluated",
    )


def _condense(sample: LoggedSample, path: Path, cluster_field: str | None) -> SampleEvidence:
    """Return the values of a sample that a gate needs. Hashes in the metadata take precedence over the texts."""
    metadata = sample.metadata
    recorded = [metadata.get(name) for name in _HASHES]
    hashes = [each for each in recorded if isinstance(each, str) and _HASH.fullmatch(each)]
    is_exported = len(hashes) == len(_HASHES)
    if not is_exported:
        prompt = []
        for message in sample.messages:  # those before the first answer, such as instructions and examples
            if message.get("role") == "assistant" and message.get("source") == "generate":
                break
            prompt.append(message)
        question = sample.input if isinstance(sample.input, str) else _messages(sample.input, sample)
        hashes = [
            plain_digest([_resolve(question, sample), sample.choices]),
            plain_digest(_messages(prompt, sample)),
            plain_digest(sample.target),
        ]
    cluster = ""
    if cluster_field is not None:
        name = "cluster" if is_exported and cluster_field not in metadata else cluster_field
        if name not in metadata:
            raise InvalidInput(
                f"{path}: {_name(sample)}",
                found=f"no field {cluster_field!r} in its metadata",
                expected="the field of cluster_by in every sample",
                remedy=suggest(cluster_field, metadata),
            )
        cluster = _text(metadata[name])
    # A question with several right answers has no known chance level.
    chance = 1 / len(sample.choices) if sample.choices and isinstance(sample.target, str) else 0.0
    scores = sample.scores or {}
    chances = {
        scorer: _exported_chance(sample, scorer, score, path) if is_exported else chance
        for scorer, score in scores.items()
    }
    return SampleEvidence((hashes[0], hashes[1], hashes[2]), is_exported, cluster, chances, scores, sample.uuid)


def _exported_chance(sample: LoggedSample, scorer: str, score: SampleScore, path: Path) -> float:
    """Return the chance level of a score, which is in its own metadata if those of a sample differ."""
    chance, location = sample.metadata.get("chance", 0.0), "metadata.chance"
    if score.metadata is not None and score.metadata.chance is not None:
        chance, location = score.metadata.chance, f"scores.{scorer:.80}.metadata.chance"
    if isinstance(chance, bool) or not isinstance(chance, int | float) or not 0 <= chance <= 1:
        raise InvalidInput(
            f"{path}: {_name(sample)}: {location}",
            found=format_value(chance),
            expected="a number from 0 to 1",
            remedy=DAMAGED,
        )
    return float(chance)


def _messages(messages: Sequence[Mapping[str, Any]], sample: LoggedSample) -> list[Any]:
    """Return messages without the keys that differ between evaluations of the same sample."""
    return [
        {key: _resolve(value, sample) for key, value in message.items() if key not in _UNSTABLE and value is not None}
        for message in messages
    ]


def _resolve(value: Any, sample: LoggedSample) -> Any:
    """Replace references to attachments of the sample by their content."""
    if isinstance(value, str):
        return sample.attachments.get(value.removeprefix(_ATTACHMENT), value) if _ATTACHMENT in value else value
    if isinstance(value, Mapping):
        return {key: _resolve(inner, sample) for key, inner in value.items()}
    return [_resolve(inner, sample) for inner in value] if isinstance(value, list) else value


def _require_complete(header: LogHeader, path: Path, documents: Documents) -> None:
    """Raise InvalidInput unless the log has every sample of its dataset in every epoch."""
    assert header.results is not None
    totals = header.results
    ids = header.eval.dataset.sample_ids
    epochs = header.eval.config.get("epochs") or 1
    count = sum(map(len, documents.values()))
    expected = set(range(1, epochs + 1)) if isinstance(epochs, int) and epochs <= MAX_SAMPLES else set()
    problem = ""
    if totals.early_stopping is not None:
        problem = "an evaluation that was stopped early"
    elif not documents:
        problem = "no samples"
    elif len({str(document) for document in documents}) < len(documents):
        problem = "two samples with the same id"
    elif ids is not None and (len(set(ids)) < len(ids) or documents.keys() != set(ids)):
        different = min(map(str, documents.keys() ^ set(ids)), default="")
        problem = f"{len(documents)} samples, of {len(ids)} in its dataset" + (
            f"; the first difference is {different!r:.80}" if different else ""
        )
    elif incomplete := [name for name, each in documents.items() if each.keys() != expected]:
        problem = f"epochs {sorted(documents[incomplete[0]])} of sample {incomplete[0]!r:.80}, of {epochs!r:.20} epochs"
    elif {totals.total_samples, totals.completed_samples, totals.logged_samples or count} != {count}:
        problem = f"{count} samples; {totals.completed_samples} of {totals.total_samples} were completed"
    if problem:
        raise InvalidInput(
            str(path),
            found=problem,
            expected="every sample of the dataset in every epoch",
            remedy=f"the log is incomplete or altered: copy it again, or complete it (inspect eval-retry {path.name})",
        )


def _numbers(documents: Iterable[int | str], path: Path) -> dict[int | str, int]:
    """Return a number for each sample that is the same in every log: its id, or a hash of an id that is a text."""
    names = list(documents)
    if all(isinstance(name, int) and 0 <= name < 1 << 53 for name in names):
        return {name: int(name) for name in names}
    numbers = {name: int(hashlib.sha256(str(name).encode()).hexdigest()[:13], 16) for name in names}
    if len(set(numbers.values())) < len(names):
        raise InvalidInput(str(path), found="two sample ids with the same hash", expected="other sample ids")
    return numbers


def _combined_hashes(epochs: Mapping[int, SampleEvidence], document: int | str, path: Path) -> tuple[str, str, str]:
    """Return the hashes of a sample over all epochs, whose prompts may differ."""
    docs, prompts, targets = zip(*(epochs[epoch].hashes for epoch in sorted(epochs)), strict=True)
    if len({*docs}) > 1 or len({*targets}) > 1:
        raise InvalidInput(
            f"{path}: sample {document!r:.80}",
            found="its epochs have different inputs or targets",
            expected="the same input and target in each epoch",
            remedy=DAMAGED,
        )
    return docs[0], prompts[0] if len({*prompts}) == 1 else plain_digest(prompts), targets[0]


def _version(spec: LoggedSpec, is_exported: bool) -> str:
    """Return what scored the documents: the version of lm-eval, or inspect_ai with its version."""
    if is_exported:
        return str((spec.metadata or {}).get("lm_eval_version", spec.packages.get("lm_eval", "")))
    return f"inspect_ai {spec.packages.get('inspect_ai', '')}"


def _conditions(header: LogHeader, version: str, is_exported: bool) -> dict[str, str]:
    """Return everything about an evaluation, except the model, on which its scores depend."""
    spec, config = header.eval, header.eval.config
    scorers = spec.scorers or []
    generation = {**header.plan.config, **spec.model_generate_config}
    changes = [change for update in header.config_updates or () for change in update.get("changes") or ()]
    nested: dict[str, Mapping[str, Any]] = {
        "package": {} if is_exported else spec.packages,
        "task_args": spec.task_args,
        "generation": {key: value for key, value in generation.items() if key not in _OPERATIONAL},
        "limit": {key: config[key] for key in _LIMITS if config.get(key) is not None},
        "role": spec.model_roles or {},
    }
    graders = {
        scorer.name.rpartition("/")[2]
        for scorer in scorers
        if scorer.name.rpartition("/")[2] in _SELF_GRADED and not (scorer.options or {}).get("model")
    }
    return {
        **({"lm_eval_version": version} if is_exported else {}),
        "task_version": str(spec.task_version),
        "epochs": str(config.get("epochs") or 1),
        "provider": spec.model.partition("/")[0],
        "solver": _text([step.model_dump() for step in (*header.plan.steps, header.plan.finish) if step]),
        "scorers": _text([scorer.model_dump() for scorer in scorers]),
        # Without a grader, each model would judge its own answers.
        "grader": spec.model if graders and "grader" not in (spec.model_roles or {}) else "",
        "changed_settings": _text(
            [
                [change.get("name"), change.get("value")]
                for change in changes
                if isinstance(change, dict)
                and change.get("config") == "generate"
                and change.get("name") not in _OPERATIONAL
            ]
        ),
        **{f"{name}.{key}": _text(value) for name, values in nested.items() for key, value in values.items()},
    }

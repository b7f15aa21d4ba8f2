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
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from mergegate.merge_core.errors import InvalidInput, suggest
from mergegate.merge_core.parsing import format_value
from mergegate.tasks.evaluation.inspect_files import (
    DAMAGED,
    MAX_SAMPLES,
    LoggedSample,
    LoggedSpec,
    LogHeader,
    SampleScore,
    open_samples,
    read_log_header,
)
from mergegate.tasks.evaluation.inspect_scores import (
    Documents,
    SampleEvidence,
    mean_metrics,
    plain_digest,
    require_equal_reductions,
    require_equal_summaries,
)
from mergegate.tasks.evaluation.logged_results import EXPORTED, INSPECT, LoggedResults, TaskResults
from mergegate.tasks.evaluation.scoring.document_scores import DocumentScore
from mergegate.tasks.evaluation.scoring.metrics import check_all_scored

_HASHES = ("doc_hash", "prompt_hash", "target_hash")
_HASH = re.compile(r"[0-9a-f]{64}")
# Generation settings that do not change what a model answers.
_OPERATIONAL = frozenset(
    ("max_retries", "timeout", "attempt_timeout", "max_connections", "adaptive_connections", "batch", "cache")
)
_LIMITS = (
    "message_limit",
    "token_limit",
    "token_limit_type",
    "turn_limit",
    "time_limit",
    "working_limit",
    "cost_limit",
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
        """Name of the model, with its provider."""
        return self.content.eval.model

    @property
    def group(self) -> str:
        """Group to which the task belongs, in logs that mergegate exports; empty if unknown."""
        group = (self.content.eval.metadata or {}).get("task")
        return group if isinstance(group, str) and group != self.content.eval.task else ""

    @property
    def task_names(self) -> tuple[str, ...]:
        """Name of the task, with and without its package."""
        spec = self.content.eval
        names = [name for name in (spec.task, spec.task_registry_name) if name]
        return tuple(dict.fromkeys((*names, *(name.rpartition("/")[2] for name in names))))

    def has(self, task: str) -> bool:
        """Return whether this is the log of ``task``."""
        return task in self.task_names

    def read(self, task: str, cluster_field: str | None) -> TaskResults:
        """Read the results, which are those of one task."""
        return _read(self, task, cluster_field)


def open_log(path: Path) -> InspectLog:
    """Open a log of inspect_ai. Raise InvalidInput if it is not valid."""
    content = read_log_header(path)
    try:
        created = datetime.fromisoformat(content.eval.created).astimezone(UTC)
    except (ValueError, OverflowError):
        raise InvalidInput(
            f"{path}: eval.created", found=format_value(content.eval.created), expected="a date", remedy=DAMAGED
        ) from None
    return InspectLog(path, created.isoformat(timespec="microseconds"), content)


def _read(log: InspectLog, task: str, cluster_field: str | None) -> TaskResults:
    header, path = log.content, log.path
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
    _require_complete(log, documents)
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


def combine_logs(results: Sequence[TaskResults], group: str) -> TaskResults:
    """Combine the results of all tasks of a group, each from a log of its own."""
    first = results[0]
    return TaskResults(
        group,
        tuple(outcome for each in results for outcome in each.outcomes),
        first.format,
        first.version,
        {f"{each.task}: {name}": value for each in results for name, value in each.conditions.items()},
        {name: value for each in results for name, value in each.precision.items()},
        first.file,
        {},
        tuple(warning for each in results for warning in each.warnings),
    )


def _name(sample: LoggedSample) -> str:
    return f"sample {sample.id!r:.80} of epoch {sample.epoch}"


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)


def _require_sound(sample: LoggedSample, path: Path) -> None:
    """Raise InvalidInput if a sample ended with an error, or was stopped, invalidated or edited by hand."""
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


def _require_complete(log: InspectLog, documents: Documents) -> None:
    """Raise InvalidInput unless the log has every sample of its dataset in every epoch."""
    header, path = log.content, log.path
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

"""Compute the scores of documents from the samples of an inspect_ai log, and compare them with its repeated scores."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from mergegate.merge_core.errors import InvalidInput
from mergegate.merge_core.parsing import format_value
from mergegate.tasks.evaluation.inspect_files import (
    DAMAGED,
    LoggedReduction,
    LoggedScore,
    LoggedSummary,
    LogHeader,
    SampleScore,
)

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
    """Return a hash of plain data."""
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
    """Yield every metric that the log reports as a mean over samples, ``accuracy`` first.

    Raises:
        InvalidInput: If a reported mean is not that of the samples, or a score is not a number.
    """
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

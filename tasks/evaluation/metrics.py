"""Choose the metric that judges each task, and its direction, for every module that compares scores.

The tasks below a group (its leaves) may have different metrics. In ``leaderboard``, BBH has ``acc_norm``, MATH has
``exact_match`` and IFEval has four of its own. The metric is therefore chosen leaf by leaf, and every evaluated
document counts, under the metric of its leaf::

    metrics = choose_metrics(rows, guard.metric, "leaderboard")
    metrics.label                                # 'acc_norm,none + exact_match,none'
    metrics.judge(rows, "leaderboard")          # one score per document, or an error that names the leaf

A metric can judge a task if lm-eval averages it over documents and the task declares a direction. If the leaves of a
group have different directions, each score for which lower is better is replaced by 1 - score. Higher is then better
in the whole group, and differences keep their size.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from mergegate.merge_core.errors import InvalidInput, suggest
from mergegate.tasks.evaluation.choice_probability import PROBABILITY
from mergegate.tasks.evaluation.document_scores import DocumentScore

# Setting of a guard: nothing, one metric for all leaves that have it, or a metric by leaf (or pattern of leaves).
MetricSetting = str | Mapping[str, str] | None

LabelledMetric = tuple[str, bool]  # 'acc,none', and whether higher is better


@dataclass(frozen=True)
class JudgedMetrics:
    """The metric of each leaf, by name. A task that is not a group is its own leaf."""

    by_leaf: Mapping[str, LabelledMetric]

    @property
    def label(self) -> str:
        """The distinct metrics, in the order of the leaves' names, such as ``acc,none + exact_match,none``."""
        return " + ".join(dict.fromkeys(self.by_leaf[leaf][0] for leaf in sorted(self.by_leaf)))

    @property
    def by_leaf_if_different(self) -> dict[str, str]:
        """The metric by leaf; empty if all leaves share one."""
        names = {leaf: name for leaf, (name, _) in self.by_leaf.items()}
        return names if len(set(names.values())) > 1 else {}

    @property
    def higher_is_better(self) -> bool:
        """Direction of the scores that ``judge`` returns."""
        return any(higher for _, higher in self.by_leaf.values())

    def select(self, rows: Iterable[DocumentScore]) -> tuple[DocumentScore, ...]:
        """Return the scores under the metrics of their leaves, in one direction, with ``label`` as their metric."""
        label, higher_is_better = self.label, self.higher_is_better
        selected = []
        for row in rows:
            name, higher = self.by_leaf.get(row.task, ("", True))
            if row.metric == name:
                score = 1 - row.outcome if higher_is_better and not higher else row.outcome
                selected.append(row._replace(metric=label, outcome=score, higher_is_better=higher_is_better))
        return tuple(selected)

    def other_scores(self, rows: Iterable[DocumentScore]) -> dict[str, dict[tuple[str, int], DocumentScore]]:
        """Return the scores under all other metrics, by metric, then by leaf and document.

        The probability of the right answer is left out, because it measures confidence and not correctness.
        """
        scores: dict[str, dict[tuple[str, int], DocumentScore]] = {}
        for row in rows:
            if row.metric != self.by_leaf.get(row.task, ("", True))[0] and row.metric.partition(",")[0] != PROBABILITY:
                scores.setdefault(row.metric, {})[row.task, row.doc_id] = row
        return scores

    def judge(self, rows: Sequence[DocumentScore], location: str) -> tuple[DocumentScore, ...]:
        """Return one score for each document in ``rows``.

        Raises:
            InvalidInput: If a document has no score under the metric of its leaf; the message names both.
        """
        selected = self.select(rows)
        check_all_scored(
            location, documents_of(rows), selected, {leaf: name for leaf, (name, _) in self.by_leaf.items()}
        )
        return selected


def choose_metrics(rows: Iterable[DocumentScore], setting: MetricSetting, task: str) -> JudgedMetrics:
    """Choose the metric that judges each leaf that has documents in ``rows``.

    Args:
        rows: Scores under all metrics.
        setting: None: each leaf uses its default (``default_metric``). A name: leaves that have this metric use it,
            and the others their default; ``acc_norm`` means ``acc_norm,none`` if the leaf has no other ``acc_norm``.
            A mapping: metrics by leaf or by pattern of leaves (``leaderboard_math_*``). Names precede patterns,
            the first matching pattern applies, and leaves that match nothing use their default.
        task: Name of the task in messages.

    Raises:
        InvalidInput: If no leaf has the metric, the leaf for which it is set does not have it, or the leaf is unknown.
    """
    return choose_known_metrics(metrics_by_leaf(rows), setting, task)


def choose_known_metrics(
    labels_by_leaf: Mapping[str, Mapping[str, bool]], setting: MetricSetting, task: str
) -> JudgedMetrics:
    """Choose metrics as ``choose_metrics`` does, but before any document is scored.

    ``labels_by_leaf`` holds the available metrics of each leaf and whether higher is better.
    """
    location = f"evaluate.tasks: {task}: metric"
    requested: dict[str, str] = {}
    if isinstance(setting, Mapping):
        for leaf, metrics in labels_by_leaf.items():
            patterns = [leaf] if leaf in setting else [each for each in setting if fnmatchcase(leaf, each)]
            if not patterns:
                continue
            label = _full_label(setting[patterns[0]], metrics)
            if label not in metrics:
                raise InvalidInput(
                    location,
                    found=f"{label!r} for {leaf}, which does not have it",
                    expected=" or ".join(metrics),
                    remedy=_missing_metric_advice(label, metrics),
                )
            requested[leaf] = label
        for pattern in setting:
            if not any(pattern == leaf or fnmatchcase(leaf, pattern) for leaf in labels_by_leaf):
                names = ", ".join(list(labels_by_leaf)[:5]) + (", …" if len(labels_by_leaf) > 5 else "")
                raise InvalidInput(
                    location,
                    found=f"{pattern!r}, which matches none of its tasks",
                    expected=f"one of {names}, or a pattern",
                    remedy=suggest(pattern, labels_by_leaf),
                )
    elif setting is not None:
        for leaf, metrics in labels_by_leaf.items():
            if (label := _full_label(setting, metrics)) in metrics:
                requested[leaf] = label
        if labels_by_leaf and not requested:
            labels = dict.fromkeys(name for metrics in labels_by_leaf.values() for name in metrics)
            is_ambiguous = any(name.partition(",")[0] == setting for name in labels)
            raise InvalidInput(
                location,
                found=f"{setting!r}, " + ("which is ambiguous" if is_ambiguous else "which the task does not have"),
                expected=" or ".join(labels),
                remedy=_missing_metric_advice(setting, labels),
            )
    chosen = {leaf: requested.get(leaf) or default_metric(tuple(metrics)) for leaf, metrics in labels_by_leaf.items()}
    return JudgedMetrics({leaf: (name, labels_by_leaf[leaf][name]) for leaf, name in chosen.items()})


def metrics_by_leaf(rows: Iterable[DocumentScore]) -> dict[str, dict[str, bool]]:
    """Return the metrics of each leaf and whether higher is better, in order of first occurrence."""
    labels: dict[str, dict[str, bool]] = {}
    for row in rows:
        labels.setdefault(row.task, {}).setdefault(row.metric, row.higher_is_better)
    return labels


def default_metric(metrics: Sequence[str]) -> str:
    """Return the metric that judges a task if the guard does not name one.

    This is ``acc,none`` if available, else a metric that extracts answers leniently (strict patterns measure format,
    and a good model can score near zero), else the first. The probability of the right answer is the default only if
    the task has no other metric.
    """
    own = [metric for metric in metrics if metric.partition(",")[0] != PROBABILITY] or metrics
    if "acc,none" in own:
        return "acc,none"
    return next((metric for metric in own if metric.endswith(",flexible-extract")), own[0])


def documents_of(rows: Iterable[DocumentScore]) -> dict[tuple[str, int], None]:
    """Return the documents in ``rows`` as (leaf, position in the leaf's data), in order of first occurrence."""
    return dict.fromkeys((row.task, row.doc_id) for row in rows)


def check_all_scored(
    location: str,
    documents: Iterable[tuple[str, int]],
    rows: Iterable[DocumentScore],
    metrics: Mapping[str, str] | None = None,
) -> None:
    """Check that every evaluated document has a score, so that no document is dropped silently.

    ``metrics`` holds the required metric by leaf. None: any metric.

    Raises:
        InvalidInput: If scores are missing. The message names the first leaf, the number of its documents without a
            score, and the first of them.
    """
    available = {(row.task, row.doc_id) for row in rows}
    expected = tuple(dict.fromkeys(documents))
    missing = [document for document in expected if document not in available]
    if not missing:
        return
    leaf, first = missing[0]
    of_leaf = [document for document in expected if document[0] == leaf]
    lost = sum(document[0] == leaf for document in missing)
    under = f"under {metrics[leaf]!r}" if metrics and leaf in metrics else "under any metric that is a mean"
    raise InvalidInput(
        location,
        found=f"{lost} of {len(of_leaf)} documents of {leaf} without a score {under}, first document {first}",
        expected="a score for every evaluated document",
        remedy="exclude them in the task's process_docs, or judge the leaf by a metric that all of them have "
        f"(metric: {{{leaf}: ...}})",
    )


def checked_score(location: str, metric: str, document: object, value: Any) -> float:
    """Return ``value`` as a number that can be averaged.

    Raises:
        InvalidInput: If ``value`` is not a finite number; the message names the metric and the document.
    """
    try:
        score = float(value)
    except (TypeError, ValueError):
        raise InvalidInput(
            location,
            found=f"{metric} of document {document} is {value!r:.60}",
            expected="a number, because the score of the task is the mean",
            remedy="choose another metric of the task, or correct its process_results",
        ) from None
    if not math.isfinite(score):
        raise InvalidInput(
            location,
            found=f"{metric} of document {document} is {score}",
            expected="a number",
            remedy="a model that computes NaN is broken (check its perplexity and weights); if other models get the "
            "same, the metric divides by zero: correct the task",
        )
    return score


def _full_label(metric: str, labels: Iterable[str]) -> str:
    """Expand ``acc_norm`` to the only label that begins with it, or return it unchanged if several or none do."""
    matches = [label for label in labels if label.partition(",")[0] == metric]
    return matches[0] if len(matches) == 1 else metric


def _missing_metric_advice(metric: str, labels: Iterable[str]) -> str:
    if metric.partition(",")[0] == PROBABILITY:
        return "only choice tasks (output_type: multiple_choice) with lm-eval's own scoring have it; use another"
    return suggest(metric, labels)

"""Which metric judges each task, and in which direction: said once, for everybody who compares scores.

The tasks below a group (its leaves) need not share a metric: in ``leaderboard``, BBH has ``acc_norm``, MATH
``exact_match``, IFEval four of its own. So the question is asked leaf by leaf, and every document that was asked
counts, under the metric of its leaf::

    metrics = choose_metrics(rows, guard.metric, "leaderboard")
    metrics.label                                # 'acc_norm,none + exact_match,none'
    metrics.judged(rows, "leaderboard")          # one score a document, or a refusal that names the leaf

A metric can judge where lm-eval averages it over documents and the task says which direction is better. Where leaves
disagree on the direction, the scores of those where less is better are turned round (1 - score), so that in the group
more is better and a difference keeps its size.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from mergegate.merge_core.errors import InvalidInput, suggest
from mergegate.tasks.evaluation.choice_probability import PROBABILITY
from mergegate.tasks.evaluation.document_scores import DocumentScore

# What a guard may say: nothing, one metric for all leaves that have it, or one by leaf (or pattern of leaves).
MetricSetting = str | Mapping[str, str] | None

LabelledMetric = tuple[str, bool]  # 'acc,none', and whether more of it is better


@dataclass(frozen=True)
class JudgedMetrics:
    """The metric of each leaf, by the leaf's name; of a task that is no group, of the task alone."""

    by_leaf: Mapping[str, LabelledMetric]

    @property
    def label(self) -> str:
        """The metric; where leaves differ, each once, by the leaves' names: ``acc,none + exact_match,none``."""
        return " + ".join(dict.fromkeys(self.by_leaf[leaf][0] for leaf in sorted(self.by_leaf)))

    @property
    def differing(self) -> dict[str, str]:
        """The metric by leaf where they differ; empty where ``label`` says it all."""
        names = {leaf: name for leaf, (name, _) in self.by_leaf.items()}
        return names if len(set(names.values())) > 1 else {}

    @property
    def higher_is_better(self) -> bool:
        """Of the scores that ``judged`` returns."""
        return any(higher for _, higher in self.by_leaf.values())

    def chosen(self, rows: Iterable[DocumentScore]) -> tuple[DocumentScore, ...]:
        """The rows under the metrics of their leaves, all in one direction, under ``label`` as their metric."""
        label, turned = self.label, self.higher_is_better
        found = []
        for row in rows:
            name, higher = self.by_leaf.get(row.task, ("", True))
            if row.metric == name:
                score = 1 - row.outcome if turned and not higher else row.outcome
                found.append(row._replace(metric=label, outcome=score, higher_is_better=turned))
        return tuple(found)

    def judged(self, rows: Sequence[DocumentScore], where: str) -> tuple[DocumentScore, ...]:
        """One score for each document in ``rows``.

        Raises:
            InvalidInput: when a document has no score under the metric of its leaf, naming both.
        """
        chosen = self.chosen(rows)
        check_all_scored(where, documents_of(rows), chosen, {leaf: name for leaf, (name, _) in self.by_leaf.items()})
        return chosen


def choose_metrics(rows: Iterable[DocumentScore], setting: MetricSetting, where: str) -> JudgedMetrics:
    """The metric that judges each leaf that has documents in ``rows``.

    Args:
        setting: None: each leaf by its own default (``default_metric``). A name: that metric in every leaf that has it,
            and the default in the others; ``acc_norm`` means ``acc_norm,none`` where the leaf has no other
            ``acc_norm``. A mapping: by leaf or pattern of leaves
            (``leaderboard_math_*``), a name before a pattern and patterns in the order given; leaves that none of them
            means keep their default.

    Raises:
        InvalidInput: for a metric that no leaf has, or not the leaf that it is meant for; a leaf that there is not.
    """
    return choose_known_metrics(metrics_by_leaf(rows), setting, where)


def choose_known_metrics(known: Mapping[str, Mapping[str, bool]], setting: MetricSetting, where: str) -> JudgedMetrics:
    """As ``choose_metrics``, also before anything is scored: from the labels of each leaf, and whether more of each is
    better."""
    if isinstance(setting, Mapping):
        wanted = _wanted_by_leaf(known, setting, where)
    elif setting is None:
        wanted = {}
    else:
        metric = setting
        wanted = {leaf: label for leaf, metrics in known.items() if (label := _in_full(setting, metrics)) in metrics}
        if known and not wanted:
            every = dict.fromkeys(name for metrics in known.values() for name in metrics)
            several = any(name.partition(",")[0] == setting for name in every)
            raise InvalidInput(
                f"evaluate.tasks: {where}: metric",
                found=f"{setting!r}, " + ("which can mean several" if several else "which the task does not have"),
                expected=" or ".join(every),
                remedy=_only_of_choices(metric) or suggest(setting, every),
            )
    named = {leaf: wanted.get(leaf) or default_metric(tuple(metrics)) for leaf, metrics in known.items()}
    return JudgedMetrics({leaf: (name, known[leaf][name]) for leaf, name in named.items()})


def metrics_by_leaf(rows: Iterable[DocumentScore]) -> dict[str, dict[str, bool]]:
    """For each leaf, in the order in which they are met, its metrics and whether more of each is better."""
    known: dict[str, dict[str, bool]] = {}
    for row in rows:
        known.setdefault(row.task, {}).setdefault(row.metric, row.higher_is_better)
    return known


def default_metric(metrics: Sequence[str]) -> str:
    """The metric that judges where a guard names none: ``acc,none``; else what is leniently extracted from free
    answers (strict patterns measure format: a good model can score near zero); else the first. Never the probability of
    the right answer, unless there is nothing else: it is asked for by name."""
    own = [metric for metric in metrics if metric.partition(",")[0] != PROBABILITY] or metrics
    if "acc,none" in own:
        return "acc,none"
    return next((metric for metric in own if metric.endswith(",flexible-extract")), own[0])


def documents_of(rows: Iterable[DocumentScore]) -> dict[tuple[str, int], None]:
    """Every (leaf, position in its data) in ``rows``, once, in their order."""
    return dict.fromkeys((row.task, row.doc_id) for row in rows)


def check_all_scored(
    where: str,
    asked: Iterable[tuple[str, int]],
    scored: Iterable[DocumentScore],
    metrics: Mapping[str, str] | None = None,
) -> None:
    """See that every document that was asked has a score: none is dropped in silence.

    Args:
        metrics: By leaf, under which metric; absent: under any.

    Raises:
        InvalidInput: naming the first leaf that lacks some, how many, and the first of them.
    """
    there = {(row.task, row.doc_id) for row in scored}
    everything = tuple(dict.fromkeys(asked))
    missing = [document for document in everything if document not in there]
    if not missing:
        return
    leaf, first = missing[0]
    of_leaf = [document for document in everything if document[0] == leaf]
    lost = sum(document[0] == leaf for document in missing)
    under = f"under {metrics[leaf]!r}" if metrics and leaf in metrics else "under any metric that is a mean"
    raise InvalidInput(
        where,
        found=f"{lost} of {len(of_leaf)} documents of {leaf} without a score {under}, first document {first}",
        expected="a score for every document that was asked",
        remedy="leave them out by the task's process_docs, or judge the leaf by a metric that all of them have "
        f"(metric: {{{leaf}: ...}})",
    )


def checked_score(where: str, metric: str, document: object, value: float) -> float:
    """``value``, which is a number that can be averaged.

    Raises:
        InvalidInput: for NaN and infinities, naming metric and document.
    """
    if value != value or value in (float("inf"), float("-inf")):
        raise InvalidInput(
            where,
            found=f"{metric} of document {document} is {value}",
            expected="a number",
            remedy="a model that computes NaN is broken (look at perplexity and the merge's health); if other models "
            "get it too, it is the metric that divides by nothing: correct the task",
        )
    return value


def _in_full(metric: str, labels: Iterable[str]) -> str:
    """``acc_norm`` as the only one of ``labels`` that begins so; with a filter, or where several do, as it is."""
    meant = [label for label in labels if label.partition(",")[0] == metric]
    return meant[0] if len(meant) == 1 else metric


def _only_of_choices(metric: str) -> str:
    """What to do without a probability; empty for any other metric."""
    if metric.partition(",")[0] != PROBABILITY:
        return ""
    return "only choice tasks (output_type: multiple_choice) whose answers lm-eval scores itself have it; name another"


def _wanted_by_leaf(known: Mapping[str, Mapping[str, bool]], setting: Mapping[str, str], where: str) -> dict[str, str]:
    place = f"evaluate.tasks: {where}: metric"
    wanted: dict[str, str] = {}
    for leaf, metrics in known.items():
        patterns = [leaf] if leaf in setting else [each for each in setting if fnmatchcase(leaf, each)]
        if not patterns:
            continue
        metric = _in_full(setting[patterns[0]], metrics)
        if metric not in metrics:
            raise InvalidInput(
                place,
                found=f"{metric!r} for {leaf}, which does not have it",
                expected=" or ".join(metrics),
                remedy=_only_of_choices(metric) or suggest(metric, metrics),
            )
        wanted[leaf] = metric
    for pattern in setting:
        if not any(pattern == leaf or fnmatchcase(leaf, pattern) for leaf in known):
            raise InvalidInput(
                place,
                found=f"{pattern!r}, which is none of its tasks",
                expected=f"one of {', '.join(list(known)[:5])}{', …' if len(known) > 5 else ''}, or a pattern",
                remedy=suggest(pattern, known),
            )
    return wanted

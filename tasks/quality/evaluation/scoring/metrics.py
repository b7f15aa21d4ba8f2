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

For each document of a choice task, lm-eval requests the log-likelihood ``l_i`` of every choice and scores only which
one is largest. A model's confidence changes before its answers do, so mergegate adds a metric ``prob,none`` that
retains it::

    prob = sum of exp(l_i) over the right choices / sum of exp(l_i) over all choices              in [0, 1]

Like ``acc,none``, which is 1 if the likeliest choice is right, it uses likelihoods that are *not* divided by the
length of the choice (``acc_norm`` and ``acc_bytes`` divide). The chance level is 1 / number of choices. If no choice
is right because the label is not among the choices, the score is 0; lm-eval counts the document as wrong. A task that
scores answers with its own function has no ``prob``, because only that function knows what its target means.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from mergegate.merge_core.errors import InvalidInput, suggest
from mergegate.tasks.quality.evaluation.scoring.document_scores import DocumentScore

# Setting of a guard: nothing, one metric for all leaves that have it, or a metric by leaf (or pattern of leaves).
MetricSetting = str | Mapping[str, str] | None

LabelledMetric = tuple[str, bool]  # 'acc,none', and whether higher is better
_LONGEST_LITERAL = 1000  # characters of a position, or of a list of positions
PROBABILITY = "prob"  # name of the metric in a guard; its label is 'prob,none', in lm-eval's notation


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
        """Return one score for each document in ``rows``."""
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
    """Return ``value`` as a number that can be averaged."""
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


class AnsweredChoice(NamedTuple):
    """Likelihoods that a model assigned to the choices of one document, and the right choices."""

    likelihoods: tuple[float, ...]  # log-likelihood of each choice, in nats
    right: frozenset[int]  # positions of the right choices; empty if the label is not among the choices

    @property
    def probability(self) -> float | None:
        """Probability of the right answer, in [0, 1]. None if a likelihood is NaN or the largest is infinite."""
        shares = self._shares()
        return math.fsum(shares[position] for position in sorted(self.right)) / math.fsum(shares) if shares else None

    @property
    def entropy(self) -> float | None:
        """Entropy of the distribution over the choices, in nats. None in the same cases as ``probability``."""
        shares = self._shares()
        total = math.fsum(shares)
        return -math.fsum(share / total * math.log(share / total) for share in shares if share) if shares else None

    def _shares(self) -> list[float]:
        """Return numbers proportional to the probabilities of the choices; empty in the cases of ``probability``."""
        largest = max(self.likelihoods)
        if not math.isfinite(largest) or any(map(math.isnan, self.likelihoods)):
            return []
        return [math.exp(likelihood - largest) for likelihood in self.likelihoods]

    @property
    def is_right(self) -> bool:
        """Whether the likeliest choice (the first, if several tie) is right. Equals ``acc``."""
        return self.likelihoods.index(max(self.likelihoods)) in self.right


def probabilities(accuracies: Sequence[object], answers: Sequence[AnsweredChoice | None]) -> list[float | None] | None:
    """Return the probability of the right answer for each document; None for a document with unusable likelihoods.

    ``accuracies`` are lm-eval's ``acc``; None where it is missing. The function returns None instead of a list if a
    document has no choices, or if ``acc`` contradicts the likelihoods, which means that the label was misunderstood or
    that the scores belong to other samples.
    """
    choices = [answer for answer in answers if answer is not None]
    if len(choices) < len(answers) or not answers:
        return None
    values = [answer.probability for answer in choices]
    for accuracy, answer, probability in zip(accuracies, choices, values, strict=True):
        if probability is not None and accuracy in (0, 1) and bool(accuracy) != answer.is_right:
            return None
    return values


def choices_of(task: Any, document: Mapping[str, Any]) -> tuple[int, frozenset[int]] | None:
    """Return the number of choices of a document and the positions of the right ones.

    The result is None if ``task``, lm-eval's ``lm_eval.api.task.Task``, has no choices or scores answers with its own
    function.
    """
    from lm_eval.api.task import ConfigurableTask

    if task.OUTPUT_TYPE != "multiple_choice":
        return None
    has_own_function = type(task).process_results is not getattr(ConfigurableTask, "process_results", None)
    if has_own_function or task.get_config("process_results") is not None:
        return None
    choices = task.doc_to_choice(document)
    target = task.doc_to_text(document) if task.multiple_input else task.doc_to_target(document)
    return len(choices), _right(target, choices)


def chance_level(output_type: object, sample: Mapping[str, Any], choices: tuple[int, int] | None) -> float:
    """Return the score of a random choice on one document: right choices / choices, or 0 for free answers.

    Args:
        output_type: Kind of task in lm-eval's words, such as ``multiple_choice``.
        sample: Sample of lm-eval, with one request per choice.
        choices: Number of choices and of right ones. None: one of the requested choices is assumed to be right.
    """
    if output_type != "multiple_choice":
        return 0.0
    count, right = choices or (len(sample.get("arguments") or ()), 1)
    return right / count if count else 0.0


def choice_from_log(config: Mapping[str, Any], sample: Mapping[str, Any]) -> AnsweredChoice | None:
    """Return the likelihoods and right choices in a sample that lm-eval wrote to a file.

    ``config`` is the task's configuration in the results file, and ``sample`` is a line of the samples file. The result
    is None if the task has no choices, or if the file does not reveal which choice is right.
    """
    if config.get("output_type") != "multiple_choice" or config.get("process_results") is not None:
        return None
    arguments = sample.get("arguments")
    if not (isinstance(arguments, Mapping) and all(isinstance(each, Mapping) for each in arguments.values())):
        return None
    requests = [(each.get("arg_0", ""), each.get("arg_1", "")) for each in arguments.values()]
    answers = _single_answers(sample.get("filtered_resps"))
    if not isinstance(answers, list):
        return None
    texts = [text for pair in requests for text in pair]
    texts += [answer[0] if isinstance(answer, list) and answer else None for answer in answers]
    if not all(isinstance(text, str) for text in texts):
        return None  # lm-eval always writes prompts, choices and likelihoods as text
    metric_list = config.get("metric_list")
    metrics = [
        entry.get("metric")
        for entry in (metric_list if isinstance(metric_list, list) else ())
        if isinstance(entry, dict)
    ]
    if "acc_mutual_info" in metrics:  # the second half repeats each choice without the question
        requests = requests[: len(requests) // 2]
    if len({context for context, _ in requests}) > 1:  # choices are part of the prompts; the right one is unknown
        return None
    choices = [continuation.strip() for _, continuation in requests]
    # The file contains only the text of the target. lm-eval interprets a number as a position, and a text as a choice.
    text, source, document = str(sample.get("target", "")).strip(), config.get("doc_to_target"), sample.get("doc")
    target: object = text
    if isinstance(source, str) and isinstance(document, Mapping) and source in document:
        value = document[source]
        if "target" in sample and str(value).strip() != text:
            return None  # the target belongs to another document
        target = value.strip() if isinstance(value, str) else value
    elif len(text) <= _LONGEST_LITERAL:
        try:
            literal = ast.literal_eval(text)
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            literal = None
        if isinstance(literal, (int, list)):
            is_template = isinstance(source, str) and "{{" in source
            if not is_template and not isinstance(source, (int, list)) and text in choices:
                return None  # ambiguous: the number may be a position or the text of a choice
            target = literal
    likelihoods = likelihoods_of(sample, len(choices))
    return AnsweredChoice(likelihoods, _right(target, choices)) if likelihoods else None


def _right(target: object, choices: Sequence[str]) -> frozenset[int]:
    """Return the positions of the right choices for a target that is a position, a text, or a list of positions."""
    if isinstance(target, str):
        return frozenset([list(choices).index(target)] if target in choices else [])
    positions = target if isinstance(target, (list, tuple)) else [target]
    return frozenset(int(each) for each in positions if isinstance(each, int) and 0 <= each < len(choices))


def _single_answers(answers: Any) -> Any:
    """Return one answer per choice. lm-eval 0.5 writes a list with one answer for each choice, unless a filter ran."""
    if isinstance(answers, list) and answers and all(isinstance(each, list) and len(each) == 1 for each in answers):
        return [each[0] for each in answers]
    return answers


def likelihoods_of(sample: Mapping[str, Any], choices: int) -> tuple[float, ...]:
    """Return the log-likelihood of each choice in a sample, in nats; empty if a filter changed the answers."""
    answers = _single_answers(sample.get("filtered_resps") or ())
    try:
        likelihoods = tuple(float(likelihood) for likelihood, _ in answers[:choices])
    except (TypeError, ValueError, OverflowError):
        return ()
    return likelihoods if choices and len(likelihoods) == choices else ()

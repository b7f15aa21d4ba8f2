"""Compute the probability of the right answer, a graded score for choice tasks, from likelihoods that lm-eval computes.

For each document of a choice task, lm-eval requests the log-likelihood ``l_i`` of every choice and scores only which
one is largest. A model's confidence changes before its answers do, so mergegate adds a metric ``prob,none`` that
retains it::

    prob = sum of exp(l_i) over the right choices / sum of exp(l_i) over all choices              in [0, 1]

Like ``acc,none``, which is 1 if the likeliest choice is right, it uses likelihoods that are *not* divided by the
length of the choice (``acc_norm`` and ``acc_bytes`` divide). The chance level is 1 / number of choices. If no choice
is right because the label is not among the choices, the score is 0; lm-eval counts the document as wrong.

A task that scores answers with its own function has no ``prob``, because only that function knows what its target
means.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

_LONGEST_LITERAL = 1000  # characters of a position, or of a list of positions
PROBABILITY = "prob"  # name of the metric in a guard; its label is 'prob,none', in lm-eval's notation


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

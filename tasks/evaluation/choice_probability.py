"""The probability of the right answer: a graded score of choice tasks, from likelihoods that were asked anyway.

lm-eval asks a choice task for the log-likelihood ``l_i`` of every choice and keeps which is largest. How sure the model
was is lost in that, and it is what moves first when a model changes. Kept beside lm-eval's own metrics, as
``prob,none``::

    prob = sum of exp(l_i) over the right choices / sum of exp(l_i) over all choices              in [0, 1]

That is the share that ``acc,none`` gives all or nothing of: likelihoods of whole answers, *not* divided by their length
(``acc_norm`` and ``acc_bytes`` divide). Chance is 1 / number of choices. Where several choices are right they count
together. Where none is (a label outside the choices, which lm-eval counts as wrong) it is 0.

A task that scores its answers by a function of its own has no ``prob``: what its target means is known to it alone.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

_LONGEST_LITERAL = 1000  # characters: a position, or a list of them
PROBABILITY = "prob"  # what a guard says; its label is 'prob,none', as lm-eval writes metrics


class AnsweredChoice(NamedTuple):
    """What a model said of one document of a choice task."""

    likelihoods: tuple[float, ...]  # of each choice, nats
    right: frozenset[int]  # positions of the right ones; empty where the label is none of the choices

    @property
    def probability(self) -> float | None:
        """Of the right answer, in [0, 1]; None where likelihoods are no numbers, or none is above minus infinity."""
        if (shares := self._shares()) is None:
            return None
        return math.fsum(shares[position] for position in sorted(self.right)) / math.fsum(shares)

    @property
    def entropy(self) -> float | None:
        """Of what is expected among the choices, nats; None as of ``probability``."""
        if (shares := self._shares()) is None:
            return None
        whole = math.fsum(shares)
        return -math.fsum(share / whole * math.log(share / whole) for share in shares if share)

    def _shares(self) -> list[float] | None:
        """In proportion to the probability of each choice."""
        largest = max(self.likelihoods)
        if not math.isfinite(largest) or any(map(math.isnan, self.likelihoods)):
            return None
        return [math.exp(likelihood - largest) for likelihood in self.likelihoods]

    @property
    def is_right(self) -> bool:
        """Whether the likeliest choice, of equals the first, is a right one: ``acc``."""
        return self.likelihoods.index(max(self.likelihoods)) in self.right


def probabilities(accuracies: Sequence[object], answers: Sequence[AnsweredChoice | None]) -> list[float | None] | None:
    """The probability of the right answer in each document; None in place of those that have none.

    None for all where the task asks no choices, or where ``acc`` says anything else than the likelihoods do: then the
    label was not understood, or the samples are not what was scored.

    Args:
        accuracies: What lm-eval says under ``acc``, of each document; None where it does not.
        answers: The same documents' likelihoods and right choices.
    """
    understood = [answer for answer in answers if answer is not None]
    if len(understood) < len(answers) or not answers:
        return None
    found = [answer.probability for answer in understood]
    for accuracy, answer, probability in zip(accuracies, understood, found, strict=True):
        if probability is not None and accuracy in (0, 1) and bool(accuracy) != answer.is_right:
            return None
    return found


def answered_now(task: Any, sample: Mapping[str, Any]) -> AnsweredChoice | None:
    """From a sample and lm-eval's own task object; None where the task asks no choices.

    Args:
        task: ``lm_eval.api.task.Task``.
    """
    found = choices_of(task, sample["doc"])
    if found is None:
        return None
    choices, right = found
    likelihoods = _likelihoods(sample, choices)
    return AnsweredChoice(likelihoods, right) if likelihoods else None


def choices_of(task: Any, document: Mapping[str, Any]) -> tuple[int, frozenset[int]] | None:
    """How many choices lm-eval's ``task`` gives, and which are right; None where it asks none, or judges otherwise.

    Args:
        task: ``lm_eval.api.task.Task``.
        document: As its data has it.
    """
    from lm_eval.api.task import ConfigurableTask

    own_way = type(task).process_results is not getattr(ConfigurableTask, "process_results", None)
    if task.OUTPUT_TYPE != "multiple_choice" or own_way or task.get_config("process_results") is not None:
        return None
    choices = task.doc_to_choice(document)
    target = task.doc_to_text(document) if task.multiple_input else task.doc_to_target(document)
    return len(choices), _right(target, choices)


def answered_then(config: Mapping[str, Any], sample: Mapping[str, Any]) -> AnsweredChoice | None:
    """From a sample and a task's configuration as lm-eval wrote them; None where the task asks no choices, or where it
    does not follow from what was written which choice is right.

    Args:
        config: Of the task, from ``configs`` of the results file.
    """
    if config.get("output_type") != "multiple_choice" or config.get("process_results") is not None:
        return None
    arguments = sample.get("arguments")
    if not (isinstance(arguments, Mapping) and all(isinstance(each, Mapping) for each in arguments.values())):
        return None
    asked = [(each.get("arg_0", ""), each.get("arg_1", "")) for each in arguments.values()]
    answers = sample.get("filtered_resps")
    if not isinstance(answers, list):
        return None
    written = [text for pair in asked for text in pair]
    written += [answer[0] if isinstance(answer, list) and answer else None for answer in answers]
    if not all(isinstance(text, str) for text in written):
        return None  # lm-eval writes prompts, choices and likelihoods as text
    listed = config.get("metric_list")
    metrics = [entry.get("metric") for entry in (listed if isinstance(listed, list) else ()) if isinstance(entry, dict)]
    if "acc_mutual_info" in metrics:  # each choice was asked a second time, without the question
        asked = asked[: len(asked) // 2]
    if len({context for context, _ in asked}) > 1:  # the choices are in the questions: nothing says which is right
        return None
    choices = [continuation.strip() for _, continuation in asked]
    right = _right_as_written(config, sample, choices)
    likelihoods = _likelihoods(sample, len(choices))
    return AnsweredChoice(likelihoods, right) if likelihoods and right is not None else None


def _right_as_written(
    config: Mapping[str, Any], sample: Mapping[str, Any], choices: Sequence[str]
) -> frozenset[int] | None:
    """Positions of the right choices; None where the target, of which only the text was written, can mean two things.

    lm-eval takes a number for a position and a text for one of the choices.
    """
    text, source, document = str(sample.get("target", "")).strip(), config.get("doc_to_target"), sample.get("doc")
    if isinstance(source, str) and isinstance(document, Mapping) and source in document:
        value = document[source]
        if "target" in sample and str(value).strip() != text:
            return None  # the document is not the one whose target was written
        return _right(value.strip() if isinstance(value, str) else value, choices)
    if len(text) > _LONGEST_LITERAL:
        return _right(text, choices)
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return _right(text, choices)
    if not isinstance(value, (int, list)):
        return _right(text, choices)
    is_template = isinstance(source, str) and "{{" in source
    is_sure = is_template or isinstance(source, (int, list)) or text not in choices
    return _right(value, choices) if is_sure else None


def _right(target: object, choices: Sequence[str]) -> frozenset[int]:
    """Positions of the right choices, from a position, a text, or a list of positions."""
    if isinstance(target, str):
        return frozenset([list(choices).index(target)] if target in choices else [])
    positions = target if isinstance(target, (list, tuple)) else [target]
    return frozenset(int(one) for one in positions if isinstance(one, int) and 0 <= one < len(choices))


def _likelihoods(sample: Mapping[str, Any], choices: int) -> tuple[float, ...]:
    """The likelihood of each choice; empty where a filter made something else of the answers."""
    answers = sample.get("filtered_resps") or ()
    try:
        found = tuple(float(likelihood) for likelihood, _ in answers[:choices])
    except (TypeError, ValueError, OverflowError):
        return ()
    return found if choices and len(found) == choices else ()

"""What a task asks of a model, as tokens: for whoever holds a network in memory and asks it the same many times.

Everything is lm-eval's: its documents, prompts and few-shot examples as the evaluation stage arranges them, its
requests, its way to cut a pair of context and answer into tokens. So what is computed from these tokens is what the
evaluation would compute, up to the last place. Runs in the process that holds models only::

    posed = pose(task, scoring, loaded)
    posed.documents[0].pairs[0].continuation       # tokens of the (first) answer
    posed.outcomes(loaded, "exact_match,none", range(100))      # answers written out, by lm-eval
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

from mergegate.merge_core.errors import InvalidInput
from mergegate.tasks.checkpoints import LoadedModel
from mergegate.tasks.evaluation.backends.hf import BACKEND, wrapped
from mergegate.tasks.evaluation.choice_probability import choices_of
from mergegate.tasks.evaluation.harness import (
    LoadedTask,
    ask_documents,
    counted_documents,
    load_task,
    mistakes_of,
    progress_to,
    quiet,
)
from mergegate.tasks.evaluation.metrics import choose_metrics
from mergegate.tasks.evaluation.prompt_settings import ResolvedPromptSettings, resolve_prompt_settings
from mergegate.tasks.evaluation.scoring import Scoring, ordered
from mergegate.tasks.evaluation.task_definition import EvalTask
from mergegate.tasks.evaluation.task_setup import arrange


class PromptTokens(NamedTuple):
    """What is read, and what the likelihood of is asked after it."""

    context: tuple[int, ...]  # at least one token; cut from the left where both are too long for the model
    continuation: tuple[int, ...]  # at least one token


@dataclass(frozen=True)
class TokenizedDocument:
    """A document as one model reads it.

    Args:
        leaf: The task that it is of; of a group, the one below it.
        doc_id: Its position in that task's data.
        pairs: Of a choice task one for each choice; else one for each right answer.
        right: Positions of the right ones among ``pairs``; empty where the label is none of the choices.
        is_choice: Whether others than the right answers are asked.
    """

    leaf: str
    doc_id: int
    pairs: tuple[PromptTokens, ...]
    right: frozenset[int]
    is_choice: bool


@dataclass(frozen=True)
class TokenizedTask:
    """The documents of a task's set, in the order in which they are scored.

    Args:
        task: Which one.
        scoring: How it is asked.
        order: (leaf, position) of each document.
        documents: As tokens; empty where nobody asked for them.
    """

    task: EvalTask
    scoring: Scoring
    order: tuple[tuple[str, int], ...]
    documents: tuple[TokenizedDocument, ...]
    _loaded: LoadedTask

    def outcomes(
        self, loaded: LoadedModel, metric: str, part: range, alive: Callable[[], None] = lambda: None
    ) -> list[float]:
        """What lm-eval says of the documents of ``part`` under ``metric``; where less is better, minus that.

        Args:
            loaded: The model; its answers are written out by lm-eval.
            metric: lm-eval's label; empty: the one that judges the task by default.
            part: Positions in ``order``.
            alive: Called as answers come.

        Raises:
            InvalidInput: for a metric that the task does not have.
        """
        wanted: dict[str, list[int]] = {}
        for leaf, document in sorted(self.order[position] for position in part):
            wanted.setdefault(leaf, []).append(document)
        with quiet(), _no_bars(alive):
            lm = wrapped(loaded, self.scoring)
            found = ask_documents(self._loaded, wanted, lm, "trial", self.task, self.scoring)
        where = f"task {self.task.name}"
        metrics = choose_metrics(found.outcomes, metric or None, where)
        sign = 1.0 if metrics.higher_is_better else -1.0
        judged = {(row.task, row.doc_id): sign * row.outcome for row in metrics.judged(found.outcomes, where)}
        return [judged[self.order[position]] for position in part]


def tokenize_task(task: EvalTask, scoring: Scoring, loaded: LoadedModel, *, tokens: bool = True) -> TokenizedTask:
    """Load a task and cut what it asks into the tokens of a model.

    Args:
        task: Whose documents; if it means a set of them, those.
        scoring: Few-shot examples, chat template, longest request.
        loaded: Whose tokenizer, and whose longest context.
        tokens: Whether documents are wanted as tokens.

    Raises:
        InvalidInput: The task's data cannot be loaded; it asks what has no right answer, or answers longer than what
            the model can read.
    """
    with quiet(), _no_bars():
        found = load_task(task)
        counted = counted_documents(found, task)
        order = [one for one in ordered(found.sizes, scoring.seed) if counted is None or one in counted]
        documents: dict[tuple[str, int], TokenizedDocument] = {}
        if tokens:
            lm = wrapped(loaded, scoring)
            by_leaf: dict[str, list[int]] = {}
            for leaf, document in sorted(order):
                by_leaf.setdefault(leaf, []).append(document)
            how = resolve_prompt_settings(task.asked, scoring)
            leaves = arrange(found, by_leaf, lm, how, scoring.seed)
            with mistakes_of(task):
                for name, leaf in leaves.items():
                    documents |= _posed(name, leaf, by_leaf[name], lm, how)
    return TokenizedTask(task, scoring, tuple(order), tuple(documents[one] for one in order if tokens), found)


def _no_bars(alive: Callable[[], None] = lambda: None) -> AbstractContextManager[None]:
    """One trial is too short for bars."""
    return progress_to(lambda done, of: alive(), BACKEND.draws_progress)


def _posed(
    name: str, leaf: Any, wanted: Sequence[int], lm: Any, how: ResolvedPromptSettings
) -> dict[tuple[str, int], TokenizedDocument]:
    """The documents ``wanted``, ascending, by (leaf, position)."""
    leaf.build_all_requests(
        samples=list(wanted),
        system_instruction=how.system_instruction,
        apply_chat_template=how.is_chat,
        fewshot_as_multiturn=how.is_multiturn,
        chat_template=lm.apply_chat_template if how.is_chat else None,
        tokenizer_name=lm.tokenizer_name if how.is_chat else "",
    )
    requests: dict[int, list[Any]] = {}
    for instance in leaf.instances:  # lm-eval counts those that are asked, not those that there are
        requests.setdefault(wanted[instance.doc_id], []).append(instance)
    texts: list[tuple[str, str]] = []
    asked: list[tuple[int, int, frozenset[int], bool]] = []  # document, how many pairs, the right ones, choices?
    for document, instances in requests.items():
        pairs, right, is_choice = _pairs(name, leaf, instances, how.is_chat)
        texts += pairs
        asked.append((document, len(pairs), right, is_choice))
    encoded = iter(_encoded(lm, texts, name))
    return {
        (name, document): TokenizedDocument(
            name, document, tuple(next(encoded) for _ in range(count)), right, is_choice
        )
        for document, count, right, is_choice in asked
    }


def _pairs(
    name: str, leaf: Any, instances: Sequence[Any], is_chat: bool
) -> tuple[list[tuple[str, str]], frozenset[int], bool]:
    """(context, answer) of each choice or right answer; positions of the right ones; and whether they are choices."""
    document = instances[0].doc
    found = choices_of(leaf, document)
    if found is not None:
        count, right = found
        by_position = sorted(instances, key=lambda instance: int(instance.idx))
        return [_texts(instance) for instance in by_position[:count]], right, True
    if leaf.OUTPUT_TYPE == "loglikelihood" and len(instances) == 1:
        return [_texts(instances[0])], frozenset([0]), False
    if leaf.OUTPUT_TYPE == "generate_until" and isinstance(instances[0].args[0], str):
        answers = _answers(leaf, document)
        if answers:
            context, delimiter = instances[0].args[0], _delimiter(leaf, is_chat)
            return [(context, f"{delimiter}{answer}") for answer in answers], frozenset(range(len(answers))), False
    raise InvalidInput(
        f"task {name}",
        found="questions that it judges in a way of its own",
        expected="an answer of which the likelihood can be asked",
        remedy="measure: metric, the task's own",
    )


def _texts(instance: Any) -> tuple[str, str]:
    context, continuation = instance.args[:2]
    return str(context), str(continuation)


def _delimiter(leaf: Any, is_chat: bool) -> str:
    """What stands between a prompt and an answer that is written out: what lm-eval puts before a choice."""
    prefix = leaf.get_config("gen_prefix")
    if is_chat and (not prefix or str(prefix)[-1].isspace()):
        return ""
    return str(leaf.get_config("target_delimiter") or "")


def _answers(leaf: Any, document: Mapping[str, Any]) -> list[str]:
    """The right answers of a task whose answers are written out, each at least a character long."""
    target = leaf.doc_to_target(document)
    if leaf.get_config("doc_to_choice") is not None and isinstance(target, int):
        target = leaf.doc_to_choice(document)[target]
    every = target if isinstance(target, (list, tuple)) else [target]
    return [text for text in map(str, every) if text.strip()]


def _encoded(lm: Any, texts: Sequence[tuple[str, str]], name: str) -> list[PromptTokens]:
    """The tokens of each pair, as lm-eval cuts them for a log-likelihood."""
    requests = [SimpleNamespace(args=pair) for pair in texts]
    # lm-eval cuts and asks in one method, which hands all tokens to another: that one is taken from it here.
    lm._loglikelihood_tokens = lambda found, disable_tqdm: found
    try:
        cut = lm.loglikelihood(requests, disable_tqdm=True)
    finally:
        del lm._loglikelihood_tokens
    longest = int(lm.max_length)
    pairs = []
    for (_, text), context, continuation in cut:
        if not 0 < len(continuation) <= longest:
            raise InvalidInput(
                f"task {name}: {text[:60]!r}",
                found=f"an answer of {len(continuation)} tokens",
                expected=f"1 to {longest}, as many as the model reads",
                remedy="" if continuation else "an answer that is not empty after its question",
            )
        room = longest + 1 - len(continuation)
        pairs.append(PromptTokens(tuple(context)[-room:], tuple(continuation)))
    return pairs

"""Convert a task to tokens, for callers that score many models on the same documents in memory.

lm-eval provides the documents, prompts, few-shot examples (set up as in the evaluation stage), requests, and the
division of context and answer into tokens. Numbers that are computed from these tokens therefore equal those of the
evaluation to the last digit. This module runs only in the process that holds models::

    tokenized = tokenize_task(task, scoring, loaded)
    tokenized.documents[0].pairs[0].continuation                    # tokens of the first answer
    tokenized.outcomes(loaded, "exact_match,none", range(100))      # answers that lm-eval generates
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

from mergegate.merge_core.errors import InvalidInput
from mergegate.tasks.checkpoints import LoadedModel
from mergegate.tasks.evaluation.backends.hf import BACKEND, wrap_model
from mergegate.tasks.evaluation.choice_probability import choices_of
from mergegate.tasks.evaluation.harness import progress_to, score_loaded_documents
from mergegate.tasks.evaluation.lm_eval_tasks import quiet, user_errors
from mergegate.tasks.evaluation.metrics import choose_metrics
from mergegate.tasks.evaluation.settings import ResolvedPromptSettings, Scoring, resolve_prompt_settings
from mergegate.tasks.evaluation.task_definition import EvalTask
from mergegate.tasks.evaluation.task_loading import LoadedTask, evaluated_documents, load_task
from mergegate.tasks.evaluation.task_setup import set_up_tasks


class PromptTokens(NamedTuple):
    """Tokens of a prompt, and of a continuation whose likelihood is computed."""

    context: tuple[int, ...]  # at least one token; truncated on the left if both exceed the model's context
    continuation: tuple[int, ...]  # at least one token


@dataclass(frozen=True)
class TokenizedDocument:
    """A document in the tokens of one model.

    Args:
        leaf: Task of the document; for a group, the task below it.
        doc_id: Position in that task's data.
        pairs: One per choice in a choice task, else one per right answer.
        right: Positions of the right answers in ``pairs``; empty if the label is not among the choices.
        is_choice: Whether ``pairs`` also contains wrong answers.
    """

    leaf: str
    doc_id: int
    pairs: tuple[PromptTokens, ...]
    right: frozenset[int]
    is_choice: bool


@dataclass(frozen=True)
class TokenizedTask:
    """The documents in a task's document set, in scoring order.

    Args:
        task: Task that was tokenized.
        scoring: Settings that determine the prompts.
        order: (leaf, position) of each document.
        documents: Documents as tokens; empty if tokens were not requested.
    """

    task: EvalTask
    scoring: Scoring
    order: tuple[tuple[str, int], ...]
    documents: tuple[TokenizedDocument, ...]
    _loaded: LoadedTask

    def outcomes(
        self, loaded: LoadedModel, metric: str, part: range, alive: Callable[[], None] = lambda: None
    ) -> list[float]:
        """Return lm-eval's scores of some documents under ``metric``, negated if lower is better.

        Args:
            loaded: Model that lm-eval generates the answers with.
            metric: lm-eval's label. Empty: the task's default metric.
            part: Positions in ``order``.
            alive: Called whenever answers arrive.

        Raises:
            InvalidInput: For a metric that the task does not have.
        """
        positions: dict[str, list[int]] = {}
        for leaf, document in sorted(self.order[index] for index in part):
            positions.setdefault(leaf, []).append(document)
        with quiet(), _no_bars(alive):
            lm = wrap_model(loaded, self.scoring)
            scores = score_loaded_documents(self._loaded, positions, lm, "trial", self.task, self.scoring)
        location = f"task {self.task.name}"
        metrics = choose_metrics(scores, metric or None, location)
        sign = 1.0 if metrics.higher_is_better else -1.0
        judged = {(row.task, row.doc_id): sign * row.outcome for row in metrics.judged(scores, location)}
        return [judged[self.order[index]] for index in part]


def tokenize_task(task: EvalTask, scoring: Scoring, loaded: LoadedModel, *, tokens: bool = True) -> TokenizedTask:
    """Load a task and convert it to the tokens of a model.

    Args:
        task: Task, or a document set of it.
        scoring: Few-shot examples, chat template and longest request.
        loaded: Model whose tokenizer and context length apply.
        tokens: Whether to convert the documents to tokens.

    Raises:
        InvalidInput: If the task's data cannot be loaded, the task has no right answers, or an answer is longer than
            the model's context.
    """
    with quiet(), _no_bars():
        loaded_task = load_task(task)
        order = list(evaluated_documents(loaded_task, task, scoring.seed))
        documents: dict[tuple[str, int], TokenizedDocument] = {}
        if tokens:
            lm = wrap_model(loaded, scoring)
            by_leaf: dict[str, list[int]] = {}
            for leaf, document in sorted(order):
                by_leaf.setdefault(leaf, []).append(document)
            how = resolve_prompt_settings(task.asked, scoring)
            leaves = set_up_tasks(loaded_task, by_leaf, lm, how, scoring.seed)
            with user_errors(task):
                for name, leaf in leaves.items():
                    documents |= _tokenized(name, leaf, by_leaf[name], lm, how)
    return TokenizedTask(task, scoring, tuple(order), tuple(documents[key] for key in order if tokens), loaded_task)


def _no_bars(alive: Callable[[], None] = lambda: None) -> AbstractContextManager[None]:
    """Replace lm-eval's progress bars, which are of no use in a short trial, by calls of ``alive``."""
    return progress_to(lambda done, of: alive(), BACKEND.draws_progress)


def _tokenized(
    name: str, leaf: Any, positions: Sequence[int], lm: Any, how: ResolvedPromptSettings
) -> dict[tuple[str, int], TokenizedDocument]:
    """Return the documents at ``positions``, ascending, by (leaf, position)."""
    leaf.build_all_requests(
        samples=list(positions),
        system_instruction=how.system_instruction,
        apply_chat_template=how.is_chat,
        fewshot_as_multiturn=how.is_multiturn,
        chat_template=lm.apply_chat_template if how.is_chat else None,
        tokenizer_name=lm.tokenizer_name if how.is_chat else "",
    )
    requests: dict[int, list[Any]] = {}
    for instance in leaf.instances:  # lm-eval numbers only the selected documents
        requests.setdefault(positions[instance.doc_id], []).append(instance)
    texts: list[tuple[str, str]] = []
    entries: list[tuple[int, int, frozenset[int], bool]] = []  # document, number of pairs, right pairs, is_choice
    for document, instances in requests.items():
        pairs, right, is_choice = _pairs(name, leaf, instances, how.is_chat)
        texts += pairs
        entries.append((document, len(pairs), right, is_choice))
    encoded = iter(_encoded(lm, texts, name))
    return {
        (name, document): TokenizedDocument(
            name, document, tuple(next(encoded) for _ in range(count)), right, is_choice
        )
        for document, count, right, is_choice in entries
    }


def _pairs(
    name: str, leaf: Any, instances: Sequence[Any], is_chat: bool
) -> tuple[list[tuple[str, str]], frozenset[int], bool]:
    """Return (context, answer) of each choice or right answer, the right positions, and whether they are choices."""
    document = instances[0].doc
    choices = choices_of(leaf, document)
    if choices is not None:
        count, right = choices
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
    """Return the text between a prompt and a generated answer, which is what lm-eval puts before a choice."""
    prefix = leaf.get_config("gen_prefix")
    if is_chat and (not prefix or str(prefix)[-1].isspace()):
        return ""
    return str(leaf.get_config("target_delimiter") or "")


def _answers(leaf: Any, document: Mapping[str, Any]) -> list[str]:
    """Return the right answers of a task with generated answers, without blank ones."""
    target = leaf.doc_to_target(document)
    if leaf.get_config("doc_to_choice") is not None and isinstance(target, int):
        target = leaf.doc_to_choice(document)[target]
    targets = target if isinstance(target, (list, tuple)) else [target]
    return [text for text in map(str, targets) if text.strip()]


def _encoded(lm: Any, texts: Sequence[tuple[str, str]], name: str) -> list[PromptTokens]:
    """Return the tokens of each pair, divided as lm-eval does for a log-likelihood."""
    requests = [SimpleNamespace(args=pair) for pair in texts]
    # lm-eval tokenizes and scores in one method, which passes the tokens to another. Replace that one to get them.
    lm._loglikelihood_tokens = lambda tokenized, disable_tqdm: tokenized
    try:
        tokenized = lm.loglikelihood(requests, disable_tqdm=True)
    finally:
        del lm._loglikelihood_tokens
    longest = int(lm.max_length)
    pairs = []
    for (_, text), context, continuation in tokenized:
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

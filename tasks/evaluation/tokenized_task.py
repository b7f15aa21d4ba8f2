"""Convert a task to tokens, for callers that score many models on the same documents in memory.

lm-eval provides the documents, prompts, few-shot examples (set up as in the evaluation stage), requests, and the
boundary between context and answer. Numbers that are computed from these tokens therefore equal those of the
evaluation to the last digit. This module runs only in the model process::

    tokenized = tokenize_task(task, scoring, loaded)
    tokenized.documents[0].pairs[0].continuation                    # tokens of the first answer
    tokenized.outcomes(loaded, "exact_match,none", range(100))      # scores of answers that lm-eval generates
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
from mergegate.tasks.evaluation.pictures import has_pictures
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
    """A document in the tokens of one model."""

    leaf: str  # task of the document; for a group, the task below it
    doc_id: int  # position in that task's data
    pairs: tuple[PromptTokens, ...]  # prompt with each choice, or with each right answer if there are no choices
    right: frozenset[int]  # positions of the right answers in ``pairs``; empty if the label is not among the choices
    is_choice: bool  # whether ``pairs`` also contains wrong answers


@dataclass(frozen=True)
class TokenizedTask:
    """The documents in a task's document set, in scoring order."""

    task: EvalTask
    scoring: Scoring
    order: tuple[tuple[str, int], ...]  # (leaf, position) of each document
    documents: tuple[TokenizedDocument, ...]  # empty if tokens were not requested
    _loaded: LoadedTask

    def outcomes(
        self, loaded_model: LoadedModel, metric: str, part: range, alive: Callable[[], None] = lambda: None
    ) -> list[float]:
        """Return lm-eval's scores of some documents under ``metric``, negated if lower is better.

        ``metric`` is lm-eval's label, or empty for the task's default metric. ``part`` holds positions in ``order``.
        ``alive`` is called whenever answers arrive.

        Raises:
            InvalidInput: If the task does not have the metric.
        """
        positions: dict[str, list[int]] = {}
        for leaf, document in sorted(self.order[index] for index in part):
            positions.setdefault(leaf, []).append(document)
        with quiet(), _no_bars(alive):
            lm = wrap_model(loaded_model, self.scoring)
            scores = score_loaded_documents(self._loaded, positions, lm, "trial", self.task, self.scoring)
        location = f"task {self.task.name}"
        metrics = choose_metrics(scores, metric or None, location)
        sign = 1.0 if metrics.higher_is_better else -1.0
        judged = {(row.task, row.doc_id): sign * row.outcome for row in metrics.judge(scores, location)}
        return [judged[self.order[index]] for index in part]


def tokenize_task(task: EvalTask, scoring: Scoring, loaded_model: LoadedModel, *, tokens: bool = True) -> TokenizedTask:
    """Load a task, or a document set of it, and convert it to the tokens of a model.

    The tokenizer and the context length are those of ``loaded_model``. If ``tokens`` is false, the task is only loaded.

    Raises:
        InvalidInput: If the task's data cannot be loaded, the task has no right answers, or an answer is longer than
            the model's context.
    """
    with quiet(), _no_bars():
        loaded_task = load_task(task)
        order = list(evaluated_documents(loaded_task, task, scoring.seed))
        documents: dict[tuple[str, int], TokenizedDocument] = {}
        if tokens:
            lm = wrap_model(loaded_model, scoring)
            by_leaf: dict[str, list[int]] = {}
            for leaf, document in sorted(order):
                by_leaf.setdefault(leaf, []).append(document)
            prompting = resolve_prompt_settings(task.prompt_settings, scoring)
            leaves = set_up_tasks(loaded_task, by_leaf, lm, prompting, scoring.seed)
            if any(map(has_pictures, leaves.values())):
                raise InvalidInput(
                    f"task {task.name}",
                    found="documents with pictures",
                    expected="a task with text only, whose prompts are tokenized once for all candidates",
                    remedy="search with text tasks, and guard the release with the pictures",
                )
            with user_errors(task):
                for name, leaf in leaves.items():
                    documents |= _tokenize_leaf(name, leaf, by_leaf[name], lm, prompting)
    return TokenizedTask(task, scoring, tuple(order), tuple(documents[key] for key in order if tokens), loaded_task)


def _no_bars(alive: Callable[[], None] = lambda: None) -> AbstractContextManager[None]:
    return progress_to(lambda done, of: alive(), BACKEND.draws_progress)


def _tokenize_leaf(
    name: str, leaf: Any, positions: Sequence[int], lm: Any, prompting: ResolvedPromptSettings
) -> dict[tuple[str, int], TokenizedDocument]:
    """Return the documents at ``positions`` (ascending) as tokens, by (leaf, position)."""
    leaf.build_all_requests(
        samples=list(positions),
        system_instruction=prompting.system_instruction,
        apply_chat_template=prompting.is_chat,
        fewshot_as_multiturn=prompting.is_multiturn,
        chat_template=lm.apply_chat_template if prompting.is_chat else None,
        tokenizer_name=lm.tokenizer_name if prompting.is_chat else "",
    )
    requests: dict[int, list[Any]] = {}
    for instance in leaf.instances:  # lm-eval numbers only the selected documents
        requests.setdefault(positions[instance.doc_id], []).append(instance)
    texts: list[tuple[str, str]] = []
    entries: list[tuple[int, int, frozenset[int], bool]] = []  # document, number of pairs, right pairs, is_choice
    for document, instances in requests.items():
        pairs, right, is_choice = _pairs(name, leaf, instances, prompting.is_chat)
        texts += pairs
        entries.append((document, len(pairs), right, is_choice))
    # lm-eval tokenizes and scores in one method, which passes the tokens to another. Replace that one to get them.
    lm._loglikelihood_tokens = lambda tokenized, disable_tqdm: tokenized
    try:
        tokenized = lm.loglikelihood([SimpleNamespace(args=pair) for pair in texts], disable_tqdm=True)
    finally:
        del lm._loglikelihood_tokens
    longest = int(lm.max_length)
    tokens = []
    for (_, text), context, continuation in tokenized:
        if not 0 < len(continuation) <= longest:
            raise InvalidInput(
                f"task {name}: {text[:60]!r}",
                found=f"an answer of {len(continuation)} tokens",
                expected=f"1 to {longest}, the context length of the model",
                remedy="" if continuation else "an answer that is not empty after its question",
            )
        room = longest + 1 - len(continuation)
        tokens.append(PromptTokens(tuple(context)[-room:], tuple(continuation)))
    encoded = iter(tokens)
    return {
        (name, document): TokenizedDocument(
            name, document, tuple(next(encoded) for _ in range(count)), right, is_choice
        )
        for document, count, right, is_choice in entries
    }


def _pairs(
    name: str, leaf: Any, instances: Sequence[Any], is_chat: bool
) -> tuple[list[tuple[str, str]], frozenset[int], bool]:
    """Return (context, answer) for each choice or right answer, the right positions, and whether they are choices."""
    document, prompt = instances[0].doc, instances[0].args[0]
    if (choices := choices_of(leaf, document)) is not None:
        count, right = choices
        by_position = sorted(instances, key=lambda instance: int(instance.idx))
        return [(str(each.args[0]), str(each.args[1])) for each in by_position[:count]], right, True
    if leaf.OUTPUT_TYPE == "loglikelihood" and len(instances) == 1:
        return [(str(prompt), str(instances[0].args[1]))], frozenset([0]), False
    if leaf.OUTPUT_TYPE == "generate_until" and isinstance(prompt, str):
        target = leaf.doc_to_target(document)
        if leaf.get_config("doc_to_choice") is not None and isinstance(target, int):
            target = leaf.doc_to_choice(document)[target]
        targets = target if isinstance(target, (list, tuple)) else [target]
        answers = [text for text in map(str, targets) if text.strip()]
        # Between a prompt and a generated answer is what lm-eval puts before a choice.
        prefix = leaf.get_config("gen_prefix")
        is_attached = is_chat and (not prefix or str(prefix)[-1].isspace())
        delimiter = "" if is_attached else str(leaf.get_config("target_delimiter") or "")
        if answers:
            return [(prompt, f"{delimiter}{answer}") for answer in answers], frozenset(range(len(answers))), False
    raise InvalidInput(
        f"task {name}",
        found="documents that the task scores with its own function",
        expected="documents with a right answer, whose likelihood can be computed",
        remedy="measure: metric, which uses the task's own score",
    )

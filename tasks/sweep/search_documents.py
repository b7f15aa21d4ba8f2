"""Score a model in memory on the documents of a study, as batches of tokens. Runs only in the model process.

The batches are built once per tokenizer and document set, and used for all candidates. The log-likelihoods of the
answers to a document give four measures:

* ``log_likelihood``: ``log p(answer | prompt) / tokens of the answer`` of the best right answer. Nats per token, <= 0.
* ``probability``: ``p(right) / p(all choices)`` for multiple choice, else ``p(answer | prompt)``. In [0, 1].
* ``exact``: 1 if greedy decoding gives a right answer, else 0. For multiple choice, 1 if the most likely choice is
  right.
* ``entropy``: Minus the entropy of the predictions. For multiple choice, this is the entropy of
  ``p(choice) / p(all choices)``, in nats. Otherwise it is that of the next token, averaged over the positions of the
  answers, in nats per token. It does not depend on which answer is right. AdaMerging minimizes the entropy of
  predictions (Yang et al. 2024, https://arxiv.org/abs/2310.02575).

For the measure ``metric``, lm-eval scores generated answers. Held-out text is read in the windows of
``perplexity``.

Each look has its own batches, so the scores at one look do not depend on whether another follows. The batches contain
the documents of all tasks, sorted by length and padded on the right. Identical inputs, such as those of single-token
choices, are read once. The softmax is computed in float32, only at the positions that predict answers.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mergegate.merge_core.errors import InvalidInput
from mergegate.tasks.quality.evaluation import AnsweredChoice, TokenizedDocument, TokenizedTask
from mergegate.tasks.quality.perplexity import TokenizedText
from mergegate.tasks.sweep.objective import TEXT, MetricKey, ScoresByMetric

if TYPE_CHECKING:
    import torch

    from mergegate.tasks.models.checkpoints import LoadedModel

_MAX_TOKENS = 1 << 13  # largest number of tokens in a batch, with padding
_MAX_LOGITS = 1 << 25  # largest number of logits computed at once: 128 MB in float32
_MIN_LENGTH_SHARE = 0.6  # rows shorter than this share of the longest row start a new batch
_MIN_TOKENS = 1 << 10  # smallest batch in tokens, unless no rows are left

# Answers by input tokens: index of the answer, position that predicts its first token, and its tokens.
_Rows = dict[tuple[int, ...], list[tuple[int, int, tuple[int, ...]]]]


@dataclass(frozen=True)
class _Batch:
    """Rows of tokens that are read together, and the ``n`` answer tokens to look up in the logits."""

    tokens: torch.Tensor  # padded on the right; int64 [rows, length]
    kept: int  # number of last positions whose logits are needed
    row: torch.Tensor  # row of each answer token; [n]
    position: torch.Tensor  # position, among the last ``kept``, that predicts each answer token; [n]
    target: torch.Tensor  # each answer token; [n]
    answer: torch.Tensor  # index of the answer that each token belongs to; [n]


@dataclass(frozen=True)
class _Look:
    """Documents and batches of one look."""

    parts: Mapping[str, range]  # documents of each task, as positions in its set
    batches: tuple[_Batch, ...]
    lengths: tuple[int, ...]  # number of tokens of each answer; the answers of one document are consecutive


class SearchDocuments:
    """Documents of one set, tokenized and grouped by look.

    ``looks`` are the shares of each task's documents that are evaluated by each look, increasing to 1.

    Raises:
        InvalidInput: A task has no documents, or ``log_likelihood`` is needed for a document whose right answer is not
            among the choices.
    """

    def __init__(
        self,
        metric_keys: Sequence[MetricKey],
        tasks: Mapping[str, TokenizedTask],
        text: TokenizedText | None,
        looks: Sequence[float],
    ) -> None:
        self._metric_keys, self._tasks, self._text = tuple(metric_keys), tasks, text
        # Tasks whose answers need likelihoods.
        self._likelihood_tasks = tuple(
            dict.fromkeys(key.task for key in metric_keys if key.task != TEXT and key.measure != "metric")
        )
        sizes = {name: len(task.order) for name, task in tasks.items()}
        if text is not None:
            sizes[TEXT] = len(text.documents)
        for name, size in sizes.items():
            if not size:
                raise InvalidInput(f"task {name}" if name else "perplexity.documents", found="no document to search on")
        for key in metric_keys:
            if key.measure != "log_likelihood" or key.task == TEXT:
                continue
            for document in tasks[key.task].documents:
                if not document.right:
                    raise InvalidInput(
                        f"task {document.leaf}: document {document.doc_id}",
                        found="a right answer that is not among the choices",
                        expected="a right answer that has a likelihood",
                        remedy="correct the task, or set measure: exact, which counts the document as wrong",
                    )
        self._looks = []
        start = dict.fromkeys(sizes, 0)
        for share in looks:
            end = {name: math.ceil(share * size) for name, size in sizes.items()}
            parts = {name: range(start[name], end[name]) for name in sizes}
            rows: _Rows = {}
            lengths: list[int] = []
            for name in self._likelihood_tasks:
                for index in parts[name]:
                    for context, continuation in tasks[name].documents[index].pairs:
                        input_tokens = (*context, *continuation)[:-1]
                        rows.setdefault(input_tokens, []).append((len(lengths), len(context) - 1, continuation))
                        lengths.append(len(continuation))
            self._looks.append(_Look(parts, tuple(_make_batches(rows)), tuple(lengths)))
            start = end

    def evaluate(self, loaded_model: LoadedModel, alive: Callable[[], None] = lambda: None) -> Iterator[ScoresByMetric]:
        """Evaluate a model, and yield the scores of all documents so far after each look.

        The caller may stop after any look. ``alive`` is called after each batch.
        """
        needs_entropy = any(key.measure == "entropy" for key in self._metric_keys)
        scores: dict[MetricKey, list[float]] = {key: [] for key in self._metric_keys}
        for look in self._looks:
            answers = measure_answers(
                loaded_model.network, look.batches, len(look.lengths), alive, entropy=needs_entropy
            )
            measures: dict[str, list[_Measures]] = {}
            begin = 0
            for name in self._likelihood_tasks:
                measures[name] = []
                for index in look.parts[name]:
                    document = self._tasks[name].documents[index]
                    part = slice(begin, begin + len(document.pairs))
                    answer_scores = _AnswerScores(answers.sums[part], answers.greedy[part], answers.entropies[part])
                    measures[name].append(_measure_document(document, answer_scores, look.lengths[part]))
                    begin = part.stop
            for key in self._metric_keys:
                documents = look.parts[key.task]
                if key.task == TEXT:
                    assert self._text is not None, "a metric key requires it"
                    scores[key] += self._text.likelihoods(loaded_model, documents)
                elif key.measure == "metric":
                    task = self._tasks[key.task]
                    scores[key] += task.outcomes(loaded_model, key.metric, documents, alive) if documents else []
                else:
                    scores[key] += [getattr(values, key.measure) for values in measures[key.task]]
            yield {key: np.array(numbers, np.float64) for key, numbers in scores.items()}


class _AnswerScores(NamedTuple):
    """Measurements of each answer."""

    sums: list[float]  # log-likelihoods in nats
    greedy: list[bool]  # whether greedy decoding gives the answer
    entropies: list[float]  # summed over the positions that predict the answer, in nats; 0 if not requested


class _Measures(NamedTuple):
    log_likelihood: float
    probability: float
    exact: float
    entropy: float


def _measure_document(document: TokenizedDocument, answers: _AnswerScores, lengths: Sequence[int]) -> _Measures:
    """Return the measures of one document. ``lengths`` is the number of tokens of each answer."""
    sums = answers.sums
    likely = max((sums[index] / lengths[index] for index in document.right), default=-math.inf)
    if document.is_choice:
        choice = AnsweredChoice(tuple(sums), document.right)
        probability, entropy = choice.probability, choice.entropy
        if probability is None or entropy is None:
            probability = entropy = math.nan
        return _Measures(likely, probability, float(choice.is_right), -entropy)
    certainty = -sum(answers.entropies) / sum(lengths)
    return _Measures(likely, math.exp(max(sums)), float(any(answers.greedy)), certainty)


def _make_batches(rows: _Rows) -> Iterator[_Batch]:
    """Yield batches of rows of similar length, longest first. Ties stay in order, so the batches are deterministic."""
    import torch

    groups: list[list[tuple[int, ...]]] = []
    for input_tokens in sorted(rows, key=len, reverse=True):
        longest, size = (len(groups[-1][0]), len(groups[-1]) * len(groups[-1][0])) if groups else (0, 0)
        is_short = len(input_tokens) < _MIN_LENGTH_SHARE * longest
        if not groups or size + longest > _MAX_TOKENS or (is_short and size > _MIN_TOKENS):
            groups.append([])
        groups[-1].append(input_tokens)

    for group in groups:
        longest = len(group[0])
        tokens = torch.zeros((len(group), longest), dtype=torch.long)
        row: list[int] = []
        position: list[int] = []
        target: list[int] = []
        answer: list[int] = []
        for number, input_tokens in enumerate(group):
            tokens[number, : len(input_tokens)] = torch.tensor(input_tokens)
            for answer_index, first, continuation in rows[input_tokens]:
                row += [number] * len(continuation)
                position += range(first, first + len(continuation))
                target += continuation
                answer += [answer_index] * len(continuation)
        first_kept = min(position)
        tensors = [torch.tensor(numbers, dtype=torch.long) for numbers in (row, position, target, answer)]
        yield _Batch(tokens, longest - first_kept, tensors[0], tensors[1] - first_kept, tensors[2], tensors[3])


def measure_answers(
    network: Any, batches: Sequence[_Batch], answers: int, alive: Callable[[], None], *, entropy: bool = False
) -> _AnswerScores:
    """Measure the ``answers`` answers in all ``batches`` with a causal language model in evaluation mode.

    ``alive`` is called after each part of a batch. Entropies are computed only if ``entropy`` is set.
    """
    import torch

    sums, entropies = torch.zeros(answers, dtype=torch.float64), torch.zeros(answers, dtype=torch.float64)
    mismatches = torch.zeros(answers, dtype=torch.long)
    trims_logits = "logits_to_keep" in inspect.signature(network.forward).parameters
    vocabulary = int(network.get_input_embeddings().num_embeddings)
    with torch.inference_mode():
        for batch in batches:
            positions = batch.kept if trims_logits else batch.tokens.shape[1]
            step = max(1, _MAX_LOGITS // (positions * vocabulary))  # rows whose logits fit into memory together
            for first in range(0, len(batch.tokens), step):
                rows = range(first, min(first + step, len(batch.tokens)))
                in_slice = (batch.row >= rows.start) & (batch.row < rows.stop)
                options = {"logits_to_keep": batch.kept} if trims_logits else {}
                inputs = batch.tokens[rows.start : rows.stop].to(network.device)
                logits = network(input_ids=inputs, use_cache=False, **options).logits[:, -batch.kept :]
                row, position = batch.row[in_slice] - rows.start, batch.position[in_slice]
                target = batch.target[in_slice].to(logits.device)
                answer_logits = logits[row.to(logits.device), position.to(logits.device)].float()
                log_probs = answer_logits.log_softmax(-1)
                likelihoods = log_probs.gather(1, target[:, None])[:, 0]
                sums.index_add_(0, batch.answer[in_slice], likelihoods.double().cpu())
                if entropy:
                    token_entropies = torch.special.entr(log_probs.exp()).sum(-1)
                    entropies.index_add_(0, batch.answer[in_slice], token_entropies.double().cpu())
                mismatches.index_add_(0, batch.answer[in_slice], (answer_logits.argmax(-1) != target).long().cpu())
                alive()
    return _AnswerScores(sums.tolist(), (mismatches == 0).tolist(), entropies.tolist())
